"""Add rounds to selected cells of a finished run, with its original settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from attnbench.errors import UsageError
from attnbench.harness.outside.isolation import Worker
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.repeat import time_limits_of
from attnbench.harness.run_identity import identity
from attnbench.harness.runner import Watcher, go_on
from attnbench.harness.trial import load_all
from attnbench.harness.wire.protocol import Ready
from attnbench.measure.machine import machine_id
from attnbench.measure.time import TimingRules
from attnbench.results.manifest import BESIDE
from attnbench.results.store import SUITE, RunFolder
from attnbench.suite.cell import METHOD_VERSION

_SAME = ("method_version", "machine_id", "threads", "process", "variables", "input_files", "plugins")
"""Facts of a run's identity that must be equal today; its cells and rules are its own."""


def more_rounds(
    path: Path,
    cells: Collection[str],
    rounds: int,
    *,
    plugins: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> None:
    """Visit each of ``cells``, by id, ``rounds`` times more, for as long as each earlier visit took.

    Each round has a fresh process and the reversed order of an earlier one, that of the last one first. The worker uses
    the libraries, rates and time limits with which the run began.

    Raises UsageError if the run cannot go on here, StoreError and its kinds or CorruptResults for its folder.
    """
    folder = RunFolder(path)
    environment = folder.environment
    rules = environment.get("rules")
    if environment.get("method_version") != METHOD_VERSION or not isinstance(rules, dict):
        raise UsageError(f"{path}: measured by another version, so it cannot go on; measure it again")
    if BESIDE in environment:
        raise UsageError(f"{path}: measured in turn with another environment; measure both again with more --rounds")
    for doubt in folder.doubts():
        raise UsageError(doubt)
    load_all(plugins)
    plan = _plan(folder, environment, TimingRules(**rules), plugins)
    counts = {id_: row.time_rounds or 0 for id_, row in folder.records().items() if id_ in cells}
    with Worker(plan.settings) as worker:
        worker.state = cast("Ready", {name: environment[name] for name in Ready.__annotations__ if name in environment})
        here = machine_id("cpu") if plan.settings.device == "cpu" else worker.start()["machine_id"]
        _refuse_others(path, environment, identity(plan, here))
        for visited in sorted(set(counts.values())):
            only = frozenset(id_ for id_, count in counts.items() if count == visited)
            rules = _stretched(plan.rules, visited + rounds)
            go_on(replace(plan, only=only, mirror=visited, rules=rules), folder, worker, watcher)


def _plan(folder: RunFolder, environment: Mapping[str, Any], rules: TimingRules, plugins: Sequence[str]) -> Plan:
    options = Options(
        device=environment["environment"]["device"],
        plugins=tuple(plugins),
        threads=environment["threads"],
        process=environment["process"],
        memory_limit=environment.get("memory_limit_bytes"),
        quick=rules.quick,
        **time_limits_of(environment),
    )
    return replace(make_plan(folder.path / SUITE, options), rules=rules)


def _stretched(rules: TimingRules, rounds: int) -> TimingRules:
    """Rules for ``rounds`` more visits: their amounts are for all rounds together."""
    more = rounds / rules.rounds
    return replace(
        rules,
        rounds=rounds,
        min_time=rules.min_time * more,
        max_time=rules.max_time * more,
        warmup_time=rules.warmup_time * more,
        min_samples=round(rules.min_samples * more),
        max_samples=round(rules.max_samples * more),
    )


def _refuse_others(path: Path, environment: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    if differ := ", ".join(name for name in _SAME if environment.get(name) != facts[name]):
        raise UsageError(f"{path}: cannot go on here, with other {differ}; measure it again, without --confirm")
