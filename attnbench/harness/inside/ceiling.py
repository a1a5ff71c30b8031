"""Check that a cell can be as fast as its row says, against plain products of every dtype that it may use inside.

Only matrix products count: a cell need not read all bytes of its inputs. Sparse products are left out, since torch
counts more than is computed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import add_warning, hold_to_limits
from attnbench.harness.inside.turns import SEEN
from attnbench.measure.flops import count
from attnbench.measure.limits import IMPOSSIBLE, Limits, matmul_rate
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

_CERTAINLY = 4.0
"""More than this many times the best rate is impossible: some convolutions spare three quarters of the counted
products."""
_OF_THE_RUN = ("machine_id", "torch_version", "threads", "process", "started_at", "host")


def corrected(record: Record, cell: Cell, limits: Limits) -> Record:
    """The row of a timed cell, held to new limits; an error row if the cell cannot be so fast."""
    record = replace(record)
    hold_to_limits(record, limits)
    flops, seconds = record.matmul_flops, record.time_median_s
    if not flops or not seconds or (limits.peak_fraction(seconds, flops=flops, moved=0) or 0.0) <= IMPOSSIBLE:
        return record
    ratio = faster_than_possible(cell, flops, seconds)
    if ratio is None:
        add_warning(record, f"{record.peak_fraction:.2g} of the limits of this machine, which were measured twice")
        return record
    reason = f"faster than this machine can compute it: {ratio:.2g} times its fastest products"
    kept = {name: getattr(record, name) for name in _OF_THE_RUN}
    return Record.of(cell, Status.ERROR, reason, quick=record.quick, **kept)


def faster_than_possible(cell: Cell, flops: int, seconds: float) -> float | None:
    """The rate of ``flops`` in ``seconds`` over that of the fastest products; None if it is possible or unknown."""
    if count(prepare(cell).on(SEEN)).sparse:
        return None
    halves = {torch.bfloat16} if cell.device == "cpu" else {torch.bfloat16, torch.float16}  # CPUs lack the second
    dtypes = {getattr(torch, cell.dtype), torch.float32, *halves}
    fastest = max(matmul_rate(cell.device, dtype) for dtype in dtypes)
    ratio = flops / seconds / fastest if fastest else 0.0
    return ratio if ratio > _CERTAINLY else None
