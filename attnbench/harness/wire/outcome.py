"""Map an exception to a cell's status, and to its row."""

from __future__ import annotations

import traceback

from attnbench.contract.compiled import why_not_compiled
from attnbench.errors import AttnbenchError, Diverged, Unsupported, said
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
