"""Score one cell and give its record, inside the process that trains."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnbench.cell import Cell
from attnbench.measure.allocator import keep_freed_memory
from attnbench.record import Record, one_line
from attnbench.run.outcome import failed
from attnbench.status import Status


def score_cell(
    cell: Cell,
    *,
    folder: Path | None,
    tell: Callable[[int, int], None],
    memory_limit: int | None = None,
    quick: bool,
    alone: bool = False,
) -> tuple[Record, list[dict[str, Any]]]:
    """Train and test.

    Args:
        folder: where its checkpoint is kept; None for none.
        tell: called about once a second with the steps done and all steps.
        alone: no other cell of the run computes meanwhile.

    Returns:
        The record, and the points of its learning curve.
    """
    from attnbench.training.score import score  # needs scipy, which a run that only measures times need not load

    if cell.device == "cpu":
        keep_freed_memory()  # page faults cost time, and no digit depends on them
    try:
        scored = score(cell, folder=folder, tell=tell, alone=alone)
    except Exception as error:
        return failed(cell, error, quick=quick, memory_limit=memory_limit), []
    finally:
        gc.collect()
    warnings = "; ".join(one_line(one.replace(";", ",")) for one in scored.warnings)
    return Record.of(cell, Status.OK, quick=quick, warnings=warnings, **scored.columns), scored.points
