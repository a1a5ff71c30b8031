"""The committed runs, each read once for all tests of a process: reading checks every row and every sample."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pandas as pd

from attnbench.files import unpack
from attnbench.results.read import read_results
from attnbench.results.store import FILES, TABLE

REFERENCE = Path(__file__).parents[1] / "results" / "reference"


def rows_of(run: str) -> pd.DataFrame:
    """The rows of a committed run, which the test that asks may change."""
    return _read(run).copy()


def copy_of(run: str, to: Path) -> Path:
    """A copy of a committed run as ``attnbench run`` left it, with nothing compressed."""
    shutil.copytree(REFERENCE / run, to)
    for name in (*FILES, TABLE):
        unpack(to / name)
    return to


@cache
def _read(run: str) -> pd.DataFrame:
    return read_results(REFERENCE / run)
