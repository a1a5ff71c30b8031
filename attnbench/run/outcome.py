"""How a cell ended, by what it raised."""

from __future__ import annotations

import traceback

from attnbench.cell import Cell
from attnbench.compiled import why_not_compiled
from attnbench.errors import AttnbenchError, Unsupported, said
from attnbench.measure.memory import out_of_memory
from attnbench.record import Record, one_line
from attnbench.status import Status
from attnbench.training.loop import Diverged
from attnbench.units import format_bytes


class Nonfinite(Exception):  # an outcome of the cell, not an error of ours
    """A result holds NaN or infinity."""


def status_of(error: BaseException, memory_limit: int | None = None) -> tuple[Status, str]:
    """Which outcome an exception stands for, and the reason in one line.

    Args:
        memory_limit: bytes; the reason states it where memory ran out.
    """
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
    """The row of a cell that raised an exception, whose traceback goes to stderr unless it is only unsupported.

    Args:
        memory_limit: bytes; the reason states it where memory ran out.
    """
    status, reason = status_of(error, memory_limit)
    if status is not Status.UNSUPPORTED:
        traceback.print_exception(error)
    return Record.of(cell, status, reason, quick=quick)
