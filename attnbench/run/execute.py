"""One cell to one record, inside the worker process."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnbench.cell import Cell
from attnbench.compiled import compiling, whole, why_not_compiled
from attnbench.errors import AttnbenchError, Unsupported, UsageError
from attnbench.measure.error import measure_error
from attnbench.measure.flops import count
from attnbench.measure.limits import Limits
from attnbench.measure.memory import peak_resident_bytes, peak_tensor_bytes
from attnbench.measure.time import (
    CudaEvents,
    Sample,
    Stopwatch,
    TimeSummary,
    TimingRules,
    WallClock,
    measure_time,
    summarise,
)
from attnbench.record import Record, one_line
from attnbench.reference import relative_error
from attnbench.run.call import Call, always_compiled, prepare
from attnbench.run.process import freed_memory_returned, return_freed_memory
from attnbench.status import Status

NOT_MEASURED = Limits()
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def stopwatch(device: str) -> Stopwatch:
    """Device events on CUDA, the host's clock elsewhere."""
    if device.startswith("cuda"):
        return CudaEvents(device)
    return WallClock(sync=torch.mps.synchronize) if device == "mps" else WallClock()


def output_bytes(output: Any) -> int:
    """Bytes of all tensors in what a call returned."""
    return sum(t.nbytes for t in _tensors(output))


def is_finite(output: Any) -> bool:
    """No NaN and no infinity in what a call returned."""
    return all(bool(torch.isfinite(t).all()) for t in _tensors(output))


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [t for t in output if t is not None]


def status_of(error: BaseException) -> tuple[Status, str]:
    """Which outcome an exception stands for, and the reason in one line."""
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, one_line(str(error))
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
    ):
        return Status.OOM, one_line(str(error).partition("\n")[0] or "MemoryError")
    if isinstance(error, FloatingPointError):
        return Status.NONFINITE, one_line(str(error))
    uncompiled = why_not_compiled(error)
    if uncompiled:
        return Status.UNSUPPORTED, one_line(uncompiled)
    text = str(error) if isinstance(error, AttnbenchError) else f"{type(error).__name__}: {error}"
    return Status.ERROR, one_line(text)


def run_cell(
    cell: Cell,
    rules: TimingRules,
    *,
    round_: int,
    earlier: Sequence[Sequence[Sample]],
    previous: Record | None,
    resident: bool,
    limits: Limits = NOT_MEASURED,
    tuned_limit: int | None = None,
    with_time: bool = True,
) -> tuple[Record, dict[str, Any] | None]:
    """Measure one round of a cell: everything in round 0, more time samples in later rounds.

    Args:
        earlier: time samples of each earlier round.
        previous: the record of the round before, which later rounds refine.
        resident: also measure resident memory (only meaningful in the ``as-shipped`` process).
        limits: what this machine can do in the cell's dtype, for ``peak_fraction`` and ``floor_s``.
        tuned_limit: in the tuned process, the memory limit: a cell that needs more than a third of it is measured with
            the allocator as shipped, and its row says so.

    Returns:
        The record, and the raw samples of this round as a JSON row (None where none were taken).
    """
    record = replace(previous) if previous else Record.of(cell, Status.OK, quick=rules.quick)
    samples_row: dict[str, Any] | None = None
    try:
        if round_ == 0 and "error" in cell.measure:
            _add_error(record, cell)
            if record.rel_error is not None and not math.isfinite(record.rel_error):
                raise FloatingPointError("the output holds NaN or infinity")
        if "time" in cell.measure or "memory" in cell.measure:
            compiles = round_ == 0 and (cell.compile or always_compiled(cell))
            call = _compile(record, cell) if compiles else prepare(cell)
            if round_ == 0:
                _first_look(record, cell, call, resident)
            if "time" in cell.measure and with_time:
                large = tuned_limit is not None and 3 * (record.peak_bytes or 0) > tuned_limit
                if large:
                    record.process = "as-shipped"
                before = [sample for samples in earlier for sample in samples]
                with freed_memory_returned(large):
                    timing = measure_time(call.run, rules, stopwatch=stopwatch(cell.device), earlier=before)
                if record.first_call_s is None:
                    record.first_call_s = timing.first_call_s
                samples_row = {
                    "cell_id": cell.cell_id,
                    "round": round_,
                    "first_call_s": timing.first_call_s,
                    "stopped": timing.stopped,
                    "samples": [sample.to_json() for sample in timing.samples],
                }
                summary = summarise([*earlier, timing.samples], quick=rules.quick)
                _add_time(record, cell, summary, limits)
                record.time_rounds = round_ + 1
    except Exception as error:
        status, reason = status_of(error)
        if status is not Status.UNSUPPORTED:
            traceback.print_exc()
        return Record.of(cell, status, reason, quick=rules.quick), None
    finally:
        gc.collect()
    return record, samples_row


def _add_error(record: Record, cell: Cell) -> None:
    result = measure_error(
        cell.variant,
        cell.shape,
        cell.inputs,
        cell.seed,
        cell.error_draws,
        getattr(torch, cell.dtype),
        cell.device,
        adapt=whole if cell.compile and not always_compiled(cell) else None,
    )
    record.error_kind = result.kind
    record.rel_error, record.rel_error_std = result.rel_error, result.rel_error_std
    record.max_abs_error, record.cosine = result.max_abs_error, result.cosine
    record.trivial_error, record.error_draws = result.trivial_error, result.draws


def _compile(record: Record, cell: Cell) -> Call:
    """A cell whose first call compiles, for seconds that have a column of their own."""
    with compiling():
        call = prepare(cell)
        start = time.perf_counter()
        output = call.run()
        record.first_call_s = time.perf_counter() - start
    if not is_finite(output):
        raise FloatingPointError("the compiled output holds NaN or infinity")
    if call.uncompiled:
        _hold_to(output, call.uncompiled())
    record.compiled = True
    return call


def _hold_to(output: Any, plain: Callable[[], Any]) -> None:
    """What was compiled computes what it was compiled from, to half the digits of its type.

    torch's compiler is known to lose what custom gradients write in place. What draws anew in each call is let pass.

    Raises:
        AttnbenchError: it gives other numbers.
    """
    wanted = plain()
    for got, one, again in zip(*map(_tensors, (output, wanted, plain())), strict=True):
        enough = torch.finfo(one.dtype).eps ** 0.5
        off = relative_error(got, one)
        if off > enough and relative_error(again, one) <= enough:
            raise AttnbenchError(f"torch.compile made something else of it: a result is off by {off:.1g} of its norm")


def _first_look(record: Record, cell: Cell, call: Call, resident: bool) -> None:
    """Correctness before speed: sizes, FLOPs and memory of one call, whose output must be finite."""
    counted = count(call.uncompiled() if call.uncompiled else call.run)
    if call.like is not None and (counted.output.shape, counted.output.dtype) != (call.like.shape, call.like.dtype):
        got, wanted = (f"{tuple(x.shape)} {str(x.dtype)[6:]}" for x in (counted.output, call.like))
        raise UsageError(f"it breaks the contract: the output is {got}, not {wanted}")
    if not is_finite(counted.output):
        raise FloatingPointError("the output holds NaN or infinity")
    record.input_bytes, record.param_bytes = call.input_bytes, call.param_bytes
    record.output_bytes = output_bytes(counted.output)
    if call.state_bytes is not None:
        record.state_bytes = call.state_bytes
        record.state_bytes_per_token = call.state_bytes / (cell.shape.B * max(1, cell.shape.N - 1))
    record.matmul_flops, record.exponentials = counted.matmul_flops, counted.exponentials
    record.kernel = counted.kernel
    del counted
    return_freed_memory()
    if "memory" in cell.measure:
        record.peak_bytes = peak_tensor_bytes(call.run, cell.device)
        return_freed_memory()
        if resident:
            record.peak_rss_bytes = peak_resident_bytes(call.run)


def _add_time(record: Record, cell: Cell, summary: TimeSummary, limits: Limits) -> None:
    record.time_median_s, record.time_min_s = summary.median, summary.minimum
    record.time_iqr_s = None if record.quick else summary.iqr
    record.time_ci_low_s, record.time_ci_high_s = summary.interval or (None, None)
    record.time_samples = summary.used
    record.examples_per_s = cell.shape.B / summary.median
    tokens = 1 if cell.pass_ == "decode" else cell.shape.N
    record.tokens_per_s = cell.shape.B * tokens / summary.median
    record.warnings = "; ".join(summary.warnings)
    if record.matmul_flops:
        record.flops_per_s = record.matmul_flops / summary.median
    moved = moved_bytes(record)
    record.bytes_per_s = moved / summary.median if moved else None
    record.peak_fraction = limits.peak_fraction(summary.median, flops=record.matmul_flops, moved=moved)
    record.floor_s = limits.floor(flops=record.matmul_flops, exponentials=record.exponentials, moved=moved)


def moved_bytes(record: Record) -> int:
    """What the call must at least move: inputs and parameters read once, the output written once.

    A decoding step reads the state in the place of its inputs. 0 where nothing was allocated: its output is an input.
    """
    if record.peak_bytes == 0:
        return 0
    read = record.input_bytes if record.state_bytes is None else record.state_bytes
    return (read or 0) + (record.param_bytes or 0) + (record.output_bytes or 0)
