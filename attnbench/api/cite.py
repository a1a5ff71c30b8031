"""The method of a run, and BibTeX of its variants: ``attnbench.cite``."""

from __future__ import annotations

import warnings
from pathlib import Path

from attnbench.cli.cite import cited


def cite(run: str | Path) -> str:
    """Write how the run in a folder, or the newest of a suite's folder, was measured, and BibTeX of its variants.

    Raises:
        ResultsError: there is no run.
        UsageError: it has no row yet.
    """
    method, entries, doubts = cited(Path(run))
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    return "\n".join([method, *entries])
