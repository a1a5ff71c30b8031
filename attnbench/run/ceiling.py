"""Whether a cell can be as fast as it seems: timed on inputs that it has not seen, in turn with plain products.

Only matrix products are held to a limit: a cell cannot leave out those that are counted, but need not read all bytes of
its inputs. The plain products are of every dtype that a variant may use inside. On a CPU both the clock and the
processor's time must show it, so that a busy machine accuses no variant. Where torch counts more than is computed, as
in products of sparse matrices, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter, process_time  # bound before a plug-in can replace them
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from attnbench.cell import STEPS, Cell
from attnbench.compiled import without_compiler
from attnbench.measure.limits import IMPOSSIBLE, Limits
from attnbench.measure.time import garbage_collection_off
from attnbench.record import Record
from attnbench.run.call import prepare
from attnbench.run.execute import add_warning, hold_to_limits
from attnbench.run.turns import SEEN
from attnbench.status import Status

_TURNS = 20
"""Turns at most: on a busy machine it may take a while until a product is as quick as it can be."""
_CERTAINLY = 4.0
"""More than this many times the rate of the best products is impossible. Less is not: some algorithms for convolutions
spare three quarters of what is counted."""
_SIZE = 512
_OF_THE_RUN = ("machine_id", "torch_version", "threads", "process", "started_at", "host")
"""Columns that say where and when it was measured."""


def corrected(record: Record, cell: Cell, limits: Limits) -> Record:
    """The row of a cell that has a time, held to new limits; an error row where the cell cannot be so fast."""
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
    """How many times as fast as the fastest products the cell computes its ``flops``; None where that is possible.

    Args:
        seconds: what its row says that it took. What is quicker there than it can be is impossible as well.
    """
    call = prepare(cell)
    if _uses_sparse_matrices(call.on(SEEN)):
        return None
    device = torch.device(cell.device)
    factors = [torch.randn(_SIZE, _SIZE, device=device).to(dtype) for dtype in _dtypes(cell)]
    own, best = (0.0, 0.0), (0.0, 0.0)
    with torch.inference_mode(cell.pass_ in ("forward", *STEPS)), garbage_collection_off():
        for turn in range(_TURNS):
            for factor in factors:
                best = _faster(best, _rates(partial(torch.mm, factor, factor), 2 * _SIZE**3, device))
            own = _faster(own, _rates(call.on(SEEN + turn), flops, device))
            by_clock, by_processor = (mine / theirs for mine, theirs in zip(own, best, strict=True))
            ratio = min(by_clock, by_processor) if device.type == "cpu" else by_clock
            ideal = max(best[0], best[1] * torch.get_num_threads() if device.type == "cpu" else 0.0)
            ratio = max(ratio, flops / seconds / ideal)
            if ratio <= _CERTAINLY:
                return None
    return ratio


def _dtypes(cell: Cell) -> set[torch.dtype]:
    halves = {torch.bfloat16} if cell.device == "cpu" else {torch.bfloat16, torch.float16}  # CPUs lack the second
    return {getattr(torch, cell.dtype), torch.float32, *halves}


def _faster(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return max(one[0], other[0]), max(one[1], other[1])


def _rates(call: Callable[[], Any], flops: int, device: torch.device) -> tuple[float, float]:
    """FLOPs per second of the clock, and per second of the processor."""
    _synchronise(device)
    start, worked = perf_counter(), process_time()
    call()
    _synchronise(device)
    return flops / max(perf_counter() - start, 1e-9), flops / max(process_time() - worked, 1e-9)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@without_compiler
class _Sparse(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes whether a call uses a matrix that is not stored in full."""

    seen: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = (x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor))
        self.seen = self.seen or any(x.layout is not torch.strided for x in tensors)
        return func(*args, **(kwargs or {}))


def _uses_sparse_matrices(call: Callable[[], Any]) -> bool:
    mode = _Sparse()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with mode:
        call()
    return mode.seen
