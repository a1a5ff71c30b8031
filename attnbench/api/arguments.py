"""Arguments that several functions take, and their values as the harness wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.suite.cell import UNTOUCHED

if TYPE_CHECKING:
    import pandas as pd


_ELSEWHERE = "cells are measured in another process"


def rows_of(results: str | Path | Sequence[str | Path] | pd.DataFrame) -> pd.DataFrame:
    """Rows as they are, or read from where they are kept."""
    from attnbench.results.read import read_results

    return read_results(results) if isinstance(results, str | Path | Sequence) else results


def check_importable(specs: Iterable[Spec], why: str = _ELSEWHERE) -> None:
    """Refuse a class that exists in this session only, since the worker could not import it."""
    for spec in specs:
        if spec.name != UNTOUCHED and VARIANTS.get(spec.name).make.__module__ == "__main__":
            raise UsageError(
                f"variant {spec.name!r} exists in this session only, and {why}; "
                "write it to a file and pass plugins=['FILE.py']"
            )
