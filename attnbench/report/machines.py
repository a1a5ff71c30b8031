"""Which rows may share an axis: those of one class of machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.decision.measured import MEMORY_TOLERANCE
from attnbench.machine import machine_class, memory_bytes
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
    """Run -> what two runs share if they were measured on one class of machines; empty where a run does not say."""
    sizes: dict[str, list[int]] = {}
    found = {}
    for run, environment in environments.items():
        name = machine_class(environment) if environment.get("environment") else ""
        if name and (size := memory_bytes(environment)):
            known = sizes.setdefault(name, [])
            near = [one for one in known if abs(one - size) <= MEMORY_TOLERANCE * max(one, size)]
            known += [] if near else [size]
            name = f"{name} {near[0] if near else size}"
        found[run] = name
    return found
