"""Which rows may share an axis: those of one kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attnbench.plots.setting import RUN
from attnbench.report.sources import ONLY, Sources


@dataclass(frozen=True)
class Machine:
    """One kind of machine and what was measured on it."""

    key: str
    rows: pd.DataFrame
    """Its rows, counted from 0."""
    environments: Mapping[str, Mapping[str, Any]]
    """Name of each of its runs -> ``environment.json``."""


def by_machine(sources: Sources) -> list[Machine]:
    """The rows by machine, in the order of the table."""
    frame = sources.frame
    runs = frame[RUN] if RUN in frame else pd.Series(ONLY, index=frame.index)
    keys = pd.Series(
        [
            machine_of(sources.environments.get(run, {}), name)
            for run, name in zip(runs, frame["machine_id"], strict=True)
        ],
        index=frame.index,
    )
    return [
        Machine(
            str(key),
            part.reset_index(drop=True),
            {run: sources.environments.get(run, {}) for run in dict.fromkeys(runs[part.index])},
        )
        for key, part in frame.groupby(keys, sort=False)
    ]


def machine_of(environment: Mapping[str, Any], machine_id: str) -> str:
    """What two rows must share to stand on one axis."""
    return machine_id
