"""The runs of a report: their rows by class of machine, and their facts in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from attnbench.errors import UsageError
from attnbench.measure.card import in_words as in_words_of_card
from attnbench.measure.machine import (
    MEMORY_TOLERANCE,
    differing_products,
    differing_variables,
    machine_class,
    memory_bytes,
)
from attnbench.results.frame.settings import RUN
from attnbench.results.frame.words import in_words, launched
from attnbench.results.read import FOLDERS, find_results, read_results
from attnbench.results.store import ENVIRONMENT, RunFolder
from attnbench.text import one_line
from attnbench.units import format_bytes, format_count, format_seconds

ONLY = ""
"""Name of the only run of a table; its rows have no column ``run``."""
Fact = tuple[str, str]
_MOST = 12
_SHORT = {
    "card",
    "environment",
    "rules",
    "variables",
    "matmul_rate",
    "exp_rate",
    "copy_rates",
    "process_notes",
    "plugins",
}
_NOT_SAID = {"run_key", "cells", "suite_digest", "schema_version", "seal", "input_files", "machine_id", "device"}
_NOT_SAID |= {"run_id", "opening", "ends", "products", "machines"}  # the rows say which machine measured them
_NOT_SAID |= {"together", "sources", "repeats"}


def read_sources(paths: Sequence[str | Path], *, warn: Callable[[str], None]) -> pd.DataFrame:
    """The rows of runs, tables and folders of runs, as ``attnbench plot`` takes them.

    ``warn`` gets a line for each fault of a run outside its rows. Raises UsageError if one run is named twice,
    CorruptResults for altered rows or ``environment.json``, and ResultsError if there is nothing to read.
    """
    files = [file for path in paths for file in find_results(Path(path))]
    seen: dict[Path, Path] = {}
    for file in files:
        if (whole := file.resolve()) in seen:
            raise UsageError(f"{file} is named twice; name each run once, and a folder that holds it not as well")
        seen[whole] = file
    return read_results(files if len(files) != 1 else files[0], warn=warn)


def folders_of(frame: pd.DataFrame) -> dict[str, Path]:
    """Name -> folder of each run whose rows :func:`attnbench.read_results` has read."""
    return {str(name): Path(folder) for name, folder in frame.attrs.get(FOLDERS, ())}


@dataclass(frozen=True)
class MachineClass:
    """One class of machines and its measurements."""

    rows: pd.DataFrame
    environments: Mapping[str, Mapping[str, Any]]


def by_machine(frame: pd.DataFrame) -> list[MachineClass]:
    """The rows by class of machine, in the order of the table."""
    folders = {name: folder for name, folder in folders_of(frame).items() if (folder / ENVIRONMENT).is_file()}
    written = {name: RunFolder(folder).environment for name, folder in folders.items()}
    runs = frame[RUN] if RUN in frame else pd.Series(ONLY, index=frame.index)
    known = {str(run): written.get(str(run), {}) for run in dict.fromkeys(runs)}
    classes = _classes(known)
    # A table without its folder does not say its class.
    keys = [classes[run] or f"id {name}" for run, name in zip(runs, frame["machine_id"], strict=True)]
    return [
        MachineClass(part.reset_index(drop=True), {run: known[run] for run in dict.fromkeys(runs[part.index])})
        for _, part in frame.groupby(pd.Series(keys, index=frame.index), sort=False)
    ]


def _classes(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    first: dict[str, list[Mapping[str, Any]]] = {}
    found = {}
    for run, environment in environments.items():
        name = machine_class(environment) if environment.get("environment") else ""
        if name:
            known = first.setdefault(name, [])
            place = next((place for place, one in enumerate(known) if _alike(one, environment)), len(known))
            known += [environment] if place == len(known) else []
            name = f"{name} {place}"
        found[run] = name
    return found


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    here, there = memory_bytes(one), memory_bytes(other)
    near = not here or not there or abs(here - there) <= MEMORY_TOLERANCE * max(here, there)
    return near and not differing_products(one, other) and not differing_variables(one, other)


def title_of(machine: MachineClass) -> str:
    """``AMD EPYC, 2 threads``; the digest of a machine without other facts."""
    known = _environment(machine)
    name = known.get("gpu") if str(known.get("device", "")).startswith("cuda") else known.get("processor")
    asked = next((one["threads"] for one in machine.environments.values() if one.get("threads")), None)
    threads = [in_words("threads", asked)] if isinstance(asked, int) else _values(machine.rows, "threads")
    threads = [] if known.get("gpu") else threads
    parts = [one_line(str(name or f"machine {machine.rows['machine_id'].iloc[0] or 'not known'}"), 80)]
    return ", ".join([*parts, *threads[:1]])


def heading(machine: MachineClass) -> list[Fact]:
    """The facts that every number depends on: machine, date, torch, threads."""
    rows, known = machine.rows, _environment(machine)
    days = sorted({str(at)[:10] for at in rows["started_at"] if at})
    size = known.get("memory_bytes")
    cores = known.get("cores")
    processor = [one_line(str(known["processor"]), 80)] if known.get("processor") else []
    processor += [f"{cores} cores"] if isinstance(cores, int) else []
    processor += [format_bytes(size)] if isinstance(size, int) else []
    gpu = known.get("gpu")
    facts = [
        ("GPU", one_line(str(gpu), 80) if gpu else ""),
        ("Machine", ", ".join(processor)),
        ("System", ", ".join(one_line(str(known[name]), 60) for name in ("system",) if known.get(name))),
        ("Threads", _by_kind(rows, "threads", " threads", " thread")),
        ("Launch", launched(rows)),
        ("Process", _by_kind(rows, "process", "process ")),
        ("torch", ", ".join(one.removeprefix("torch ") for one in _values(rows, "torch_version"))),
        ("Measured", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}" if days else ""),
        ("Rows", f"{len(rows)}, {int((rows['status'] == 'ok').sum())} of them with numbers"),
    ]
    return [(name, said) for name, said in facts if said]


def _by_kind(rows: pd.DataFrame, name: str, *words: str) -> str:
    trained = rows["protocol"] != ""
    said = []
    for part in (rows[~trained], rows[trained]):
        values = _values(part, name)
        for word in words:
            values = [one.replace(word, "") for one in values]
        said.append(", ".join(values))
    timed, of_trainings = said
    if not timed or not of_trainings or timed == of_trainings:
        return timed or of_trainings
    return f"{timed}; of trainings {of_trainings}"


def _environment(machine: MachineClass) -> Mapping[str, Any]:
    for environment in machine.environments.values():
        known = environment.get("environment")
        if isinstance(known, Mapping):
            return known
    return {}


def _values(rows: pd.DataFrame, name: str) -> list[str]:
    values = rows[name].replace("", None).dropna()
    return [in_words(name, value) for value in values.value_counts().index]


def environment_of(facts: Mapping[str, Any]) -> list[Fact]:
    """The facts of ``environment.json``, one line for each name."""
    return [(name, one_line(said, 500)) for name, said in _lines(facts) if said]


def _lines(facts: Mapping[str, Any]) -> Iterator[Fact]:
    known = facts.get("environment")
    if isinstance(known, Mapping):
        for name, value in known.items():
            yield str(name).removesuffix("_bytes"), _said(str(name), value)
    for name, value in facts.items():
        if name not in _SHORT | _NOT_SAID:
            yield str(name).removesuffix("_bytes").removesuffix("_s"), _said(str(name), value)
    for name, unit in (("matmul_rate", "FLOP/s"), ("exp_rate", "exp/s")):
        rates = facts.get(name)
        if isinstance(rates, Mapping):
            yield name, ", ".join(f"{dtype} {_count(rate)}{unit}" for dtype, rate in rates.items())
    copies = facts.get("copy_rates")
    if isinstance(copies, Sequence) and all(isinstance(one, Sequence) and len(one) == 2 for one in copies):
        yield "copy_rates", ", ".join(f"{_bytes(size)} at {_bytes(rate)}/s" for size, rate in copies)
    card = facts.get("card")
    yield from in_words_of_card("card", card) if isinstance(card, Mapping) else ()
    for name in ("rules", "variables", "plugins"):
        values = facts.get(name)
        if isinstance(values, Mapping):
            yield name, ", ".join(f"{key} {_said(str(key), value)}" for key, value in values.items())


def _said(name: str, value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            return format_bytes(value)
        if name.endswith("_s") or name in ("min_time", "max_time", "warmup_time", "shortest_sample"):
            return format_seconds(value)
        return f"{value:.2%}" if name == "noise_floor" else f"{value:g}"
    return str(value) if value else ""


def _count(rate: object) -> str:
    return f"{format_count(rate)} " if isinstance(rate, int | float) else f"{rate} "


def _bytes(count: object) -> str:
    return format_bytes(count) if isinstance(count, int | float) else str(count)


def warnings(rows: pd.DataFrame) -> list[tuple[int, str]]:
    """Kinds of warnings in rows, each with how many rows have it and one of its texts; the most frequent first."""
    kinds: dict[str, list[str]] = {}
    for said in rows["warnings"]:
        for one in filter(None, _ADVICE.sub("\0", said).split("; ")):
            text = one.replace("\0", "; ")
            kinds.setdefault(re.sub(r"[0-9][0-9.]*", "#", text), []).append(text)
    ordered = sorted(kinds.values(), key=len, reverse=True)
    shown = [(len(texts), texts[0]) for texts in ordered[:_MOST]]
    rest = sum(len(texts) for texts in ordered[_MOST:])
    if rest:
        shown.append((rest, "warnings of other kinds; the table has all of them"))
    return shown


_ADVICE = re.compile(r"; (?=(?:close|raise|use|expect|repeat|lower|give|free|do not)\b)")


def name_of(run: str, facts: Mapping[str, Any], rows: pd.DataFrame) -> str:
    """A readable name of a run: its distinguishing name among several, else its suite and its folder."""
    folder = facts.get("folder")
    suites = ", ".join(dict.fromkeys(rows["suite"]))
    return one_line(run or " ".join([suites, *([str(folder)] if folder else [])]), 120)
