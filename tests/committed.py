"""The committed runs, each read once for all tests of a process: reading checks every row and every sample."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

from attnbench.plots.load import read_results

REFERENCE = Path(__file__).parents[1] / "results" / "reference"


def rows_of(run: str) -> pd.DataFrame:
    """The rows of a committed run, which the test that asks may change."""
    return _read(run).copy()


@cache
def _read(run: str) -> pd.DataFrame:
    return read_results(REFERENCE / run)
