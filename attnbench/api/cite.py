"""The method of a run, and BibTeX of what it measured: ``attnbench.cite``."""

from __future__ import annotations

import warnings
from pathlib import Path

from attnbench.cli.cite import cited


def cite(run: str | Path) -> str:
    """Write how a run was measured, and BibTeX of attnbench and all that it measured, as ``attnbench cite`` does.

    Args:
        run: the folder of a run, or of a suite for its newest run.

    Raises:
        ResultsError: there is no run.
        UsageError: it has no row yet.
    """
    method, entries, doubts = cited(Path(run))
    for doubt in doubts:
        warnings.warn(doubt, stacklevel=2)
    return "\n".join([method, *entries])
