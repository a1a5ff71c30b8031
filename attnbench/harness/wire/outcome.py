"""Map an exception to a cell's status, and train a cell into a record."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnbench.contract.compiled import why_not_compiled
from attnbench.errors import AttnbenchError, Diverged, Unsupported, said
from attnbench.measure.allocator import keep_freed_memory
from attnbench.measure.memory import out_of_memory
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from attnbench.text import one_line
from attnbench.units import format_bytes


class Nonfinite(Exception):  # an outcome of the cell, not an error of ours
    """A result holds NaN or infinity."""


def status_of(error: BaseException, memory_limit: int | None = None) -> tuple[Status, str]:
    """The status of an exception, and its reason in one line; ``memory_limit``, bytes, is stated if memory ran out."""
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, one_line(str(error))
    if isinstance(error, Nonfinite | Diverged):
        return Status.NONFINITE, one_line(str(error))
    short = out_of_memory(error)
    if short is not None:
        return Status.OOM, short + (f"; limit {format_bytes(memory_limit)}" if memory_limit else "")
    uncompiled = why_not_compiled(error)
    if uncompiled:
        return Status.UNSUPPORTED, one_line(uncompiled)
    text = str(error) if isinstance(error, AttnbenchError) else said(error)
    return Status.ERROR, one_line(text)


def failed(cell: Cell, error: BaseException, *, quick: bool, memory_limit: int | None = None) -> Record:
    """The row of a cell that raised ``error``, with a traceback on stderr unless it is only unsupported.

    ``memory_limit``: bytes, for the reason.
    """
    status, reason = status_of(error, memory_limit)
    if status is not Status.UNSUPPORTED:
        traceback.print_exception(error)
    return Record.of(cell, status, reason, quick=quick)


def score_cell(
    cell: Cell,
    *,
    folder: Path | None,
    tell: Callable[[int, int], None],
    memory_limit: int | None = None,
    quick: bool,
    keep: bool = False,
    alone: bool = False,
) -> tuple[Record, list[dict[str, Any]]]:
    """Train and test; return the record, and its learning curve.

    Args:
        folder: for its checkpoint; None for none.
        keep: leave that of its end there, for other tests of this training.
        tell: called about once a second with the steps done and all steps.
        alone: no other cell of the run computes meanwhile.
    """
    from attnbench.harness.score.score import score  # needs scipy, which a run that only measures times need not load

    if cell.device == "cpu":
        keep_freed_memory()  # page faults cost time, and no digit depends on them
    try:
        scored = score(cell, folder=folder, tell=tell, keep=keep, alone=alone)
    except Exception as error:
        return failed(cell, error, quick=quick, memory_limit=memory_limit), []
    finally:
        gc.collect()
    warnings = "; ".join(one_line(one.replace(";", ",")) for one in scored.warnings)
    return Record.of(cell, Status.OK, quick=quick, warnings=warnings, **scored.columns), scored.points
