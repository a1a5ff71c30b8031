"""Which rows may share an axis: those of one class of machines, by the same libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.machine import MEMORY_TOLERANCE, differing_products, differing_variables, machine_class, memory_bytes
from attnbench.plots.setting import RUN
from attnbench.report.sources import ONLY, Sources


@dataclass(frozen=True)
class Machine:
    """One class of machines and what was measured on it."""

    rows: pd.DataFrame
    """Its rows, counted from 0."""
    environments: Mapping[str, Mapping[str, Any]]
    """Name of each of its runs -> ``environment.json``."""


def by_machine(sources: Sources) -> list[Machine]:
    """The rows by class of machine, in the order of the table."""
    frame = sources.frame
    runs = frame[RUN] if RUN in frame else pd.Series(ONLY, index=frame.index)
    known = {str(run): sources.environments.get(str(run), {}) for run in dict.fromkeys(runs)}
    classes = _classes(known)
    # A table without its folder does not say its class.
    keys = [classes[run] or f"id {name}" for run, name in zip(runs, frame["machine_id"], strict=True)]
    return [
        Machine(part.reset_index(drop=True), {run: known[run] for run in dict.fromkeys(runs[part.index])})
        for _, part in frame.groupby(pd.Series(keys, index=frame.index), sort=False)
    ]


def _classes(environments: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Run -> what two runs share if their times have one axis; empty where a run does not say."""
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
    """Whether two runs of one class have about as much memory, the same libraries of products and variables."""
    here, there = memory_bytes(one), memory_bytes(other)
    near = not here or not there or abs(here - there) <= MEMORY_TOLERANCE * max(here, there)
    return near and not differing_products(one, other) and not differing_variables(one, other)
