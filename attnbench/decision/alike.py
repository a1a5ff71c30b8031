"""Whether runs were measured alike, so that their rows may stand in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from attnbench.errors import UsageError
from attnbench.machine import (
    MEMORY_TOLERANCE,
    class_facts,
    differing_products,
    differing_variables,
    memory_bytes,
    rates,
)
from attnbench.manifest import FRESH
from attnbench.record import one_line
from attnbench.units import format_bytes, format_count

Facts = Mapping[str, Any]
"""What ``environment.json`` says about a run."""


def refuse_unlike(runs: Sequence[tuple[Path, Facts, Sequence[Facts]]], rates_within: float) -> None:
    """Make sure that the runs are of one method and one class of machine, with equal memory and equal rates.

    Args:
        runs: folder, environment, and what is known of each machine that measured it.
        rates_within: share by which the largest rate of a machine may exceed the smallest; of one that measured several
            runs, the median counts.

    Raises:
        UsageError: they are not; the message names the run, or the odd one of several, and what differs.
    """
    (first, ours, _), *others = runs
    for path, theirs, _ in others:
        differ = [*_differences(_decisive(ours), _decisive(theirs)), *differing_variables(ours, theirs)]
        said = f"{first} and {path} were not measured alike"
        if differ:
            raise UsageError(f"{said}: {one_line('; '.join(differ), 160)}; {_MERGE_LIKE}")
        if chosen := differing_products(ours, theirs):
            remedy = f"a probe chose otherwise; measure it again with --fresh --like {first}"
            raise UsageError(f"{said}: {one_line('; '.join(chosen), 160)}: {remedy}")
    machines = [(path, machine) for path, _, machines in runs for machine in machines]
    memories = [(path, memory_bytes(machine)) for path, machine in machines]
    _refuse_odd("memory", [(path, size) for path, size in memories if size], MEMORY_TOLERANCE, format_bytes)
    by_name: dict[str, dict[object, list[tuple[Path, float]]]] = {}
    for number, (path, machine) in enumerate(machines):
        which = machine.get("host") or machine.get("machine_id") or number
        for name, rate in rates(machine):
            by_name.setdefault(name, {}).setdefault(which, []).append((path, rate))
    for name, found in by_name.items():  # what one machine measured twice differs by the noise of measuring
        each = [(known[0][0], median(rate for _, rate in known)) for known in found.values()]
        _refuse_odd(name, each, rates_within, lambda rate: f"{format_count(rate)}/s")


def _decisive(environment: Facts) -> dict[str, Any]:
    """Everything that decides numbers, but for memory and rates, which are never equal to the digit."""
    rules = environment.get("rules")
    machine = environment.get("environment")
    return {
        **{name: environment.get(name) for name in ("method_version", "schema_version", FRESH)},
        **class_facts(environment),
        "torch": machine.get("torch") if isinstance(machine, dict) else None,
        **{f"rule {name}": value for name, value in (rules or {}).items() if name != "rounds"},
        **{f"plug-in {name}": value for name, value in (environment.get("plugins") or {}).items()},
        "input files": environment.get("input_files") or {},
    }


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    files = ours.pop("input files"), theirs.pop("input files")
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            yield f"{name} {_shown(ours.get(name))} and {_shown(theirs.get(name))}"
    for name in files[0].keys() & files[1].keys():  # a shard knows only the files of its own cells
        if files[0][name] != files[1][name]:
            yield f"contents of {name}"


def _shown(value: object) -> str:
    return "unknown" if value is None else one_line(str(value), 40)


_MERGE_LIKE = "merge runs of one version on machines of one kind"
_ALLOW = "measure again on a quiet machine, or allow more with --rates-within"


def _refuse_odd(what: str, found: Sequence[tuple[Path, float]], within: float, shown: Callable[[float], str]) -> None:
    """Refuse values of which the largest exceeds the smallest by more than a share, and name the odd one."""
    values = [value for _, value in found]
    if not values or max(values) <= (1 + within) * min(values):
        return
    apart = f"{shown(min(values))} to {shown(max(values))}, more than {within:.0%} apart"
    if len(found) == 2:
        raise UsageError(f"{what} of {found[0][0]} and {found[1][0]} is {apart}; {_ALLOW}")
    middle = median(values)
    path, odd = max(found, key=lambda one: max(one[1] / middle, middle / one[1]))
    raise UsageError(f"{what} is {apart}; {path} is the odd one with {shown(odd)}: leave it out, or {_ALLOW}")
