"""One cell to one record, inside the worker process."""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config

from attnbench.cell import Cell, ModelSize
from attnbench.compiled import compiling, whole, why_not_compiled
from attnbench.errors import AttnbenchError, Unsupported, UsageError
from attnbench.measure.error import measure_error
from attnbench.measure.flops import count
from attnbench.measure.limits import CopyRate, peak_fraction
from attnbench.measure.memory import peak_resident_bytes, peak_tensor_bytes, state_bytes
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
from attnbench.model import Encoder, as_layer
from attnbench.qkv import draw_qkv
from attnbench.record import Record, one_line
from attnbench.run.process import choose_products, freed_memory_returned, return_freed_memory
from attnbench.status import Status
from attnbench.variant import VARIANTS, build

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Call:
    """One thing to run again and again, with the sizes of what it was built from."""

    run: Callable[[], Any]
    input_bytes: int
    param_bytes: int
    state_bytes: int | None = None
    """Of a decoding step."""
    like: Tensor | None = None
    """What the output must have the shape and dtype of."""
    uncompiled: Callable[[], Callable[[], Any]] | None = None
    """Makes the same call without ``torch.compile``, where ``run`` is compiled and therefore cannot be looked into."""


def prepare(cell: Cell, move: Callable[[nn.Module, torch.device, torch.dtype], nn.Module] = nn.Module.to) -> Call:
    """Build the variant and its inputs; nothing of this is ever timed.

    Args:
        move: brings a module to a device and type.

    Raises:
        Unsupported: the mathematics or the input does not allow this cell.
        UsageError: unknown names or options.
    """
    device, dtype = torch.device(cell.device), getattr(torch, cell.dtype)
    choose_products(of_one_row=cell.pass_ == "decode")
    module: nn.Module
    if cell.pass_ == "decode":
        if cell.level == "model":
            raise Unsupported("the encoder reads whole sequences; decode at level operator or layer")
        reason = VARIANTS.get(cell.variant.name).unsupported_reason(cell.shape, decode=True)
        if reason:
            raise Unsupported(reason)
    if cell.level == "operator":
        if VARIANTS.get(cell.variant.name).kind == "mixer":
            raise Unsupported("a mixer replaces the whole layer and has no q, k, v; use --level layer or model")
        module = build(cell.variant, cell.shape, seed=cell.seed)
        inputs = [t.to(device, dtype) for t in draw_qkv(cell.inputs, cell.shape, cell.seed)]
    elif cell.level == "layer":
        module = as_layer(cell.variant, cell.shape, seed=cell.seed)
        generator = torch.Generator().manual_seed(cell.seed)
        shape = (cell.shape.B, cell.shape.N, cell.shape.C)
        inputs = [torch.randn(shape, generator=generator).to(device, dtype)]
    else:
        size = cell.model or ModelSize()
        module = Encoder(cell.variant, cell.shape, size, seed=cell.seed)
        generator = torch.Generator().manual_seed(cell.seed)
        inputs = [torch.randint(size.vocab, (cell.shape.B, cell.shape.N), generator=generator).to(device)]
    module = move(module, device, dtype)
    own = cell.compile and not _always_compiled(cell)
    run, state = _run_and_state(cell, module, inputs, compiled=own)
    return Call(
        run=run,
        uncompiled=(lambda: _run_and_state(cell, module, inputs, compiled=False)[0]) if own else None,
        like=inputs[0] if cell.pass_ == "forward" and cell.level != "model" else None,
        state_bytes=None if state is None else state_bytes(state),
        input_bytes=sum(t.nbytes for t in inputs),
        param_bytes=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
    )


def _always_compiled(cell: Cell) -> bool:
    """The call is one of a variant that compiles itself; around it a layer or a model is not compiled by that."""
    return cell.level == "operator" and VARIANTS.get(cell.variant.name).claims(cell.variant).compiled


def _run_and_state(
    cell: Cell, module: nn.Module, inputs: Sequence[Tensor], *, compiled: bool
) -> tuple[Callable[[], Any], Any]:
    """What to run again and again, and the state against which it decodes."""
    if cell.pass_ == "decode":
        return _decode(cell, module, inputs, compiled=compiled)
    return _pass(cell, whole(module) if compiled else module, inputs), None


def _pass(cell: Cell, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[[], Any]:
    if cell.pass_ == "forward":
        module.requires_grad_(False)

        @torch.inference_mode()
        def forward() -> Tensor:
            output: Tensor = module(*inputs)
            return output

        return forward

    module.train()
    wanted = [t.requires_grad_() for t in (*inputs, *module.parameters()) if t.is_floating_point()]
    loss = _loss(cell, module, inputs)
    if cell.pass_ == "training":
        return lambda: torch.autograd.grad(loss(), wanted, allow_unused=True)
    with config.patch(donated_buffer=False):  # compiled code must not reuse what the next walk needs again
        value = loss()  # the graph is built once; only walking it backward is timed
    return lambda: torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)


def _decode(cell: Cell, module: Any, inputs: Sequence[Tensor], *, compiled: bool) -> tuple[Callable[[], Any], Any]:
    """One step, and the state of all tokens but the last against which it is taken, always the same."""
    module.requires_grad_(False)
    token = [x[..., -1:, :] for x in inputs]
    with torch.inference_mode():
        state = module.begin(*(x[..., :-1, :] for x in inputs))

    step = whole(module.step) if compiled else module.step

    @torch.inference_mode()
    def run() -> Tensor:
        output: Tensor = step(state, *token)[0]
        return output

    return run, state


def _loss(cell: Cell, module: nn.Module, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    """A scalar to differentiate: cross-entropy for the model, a fixed random projection of the output otherwise."""
    generator = torch.Generator().manual_seed(cell.seed + 1)
    device = torch.device(cell.device)
    if cell.level == "model":
        labels = torch.randint(2, (cell.shape.B,), generator=generator).to(device)
        return lambda: nn.functional.cross_entropy(module(*inputs).float(), labels)
    like = inputs[0]
    direction = torch.randn(like.shape, generator=generator).to(device, like.dtype)
    return lambda: torch.sum(module(*inputs) * direction)


def stopwatch(device: str) -> Stopwatch:
    """Device events on CUDA, the host's clock elsewhere."""
    if device.startswith("cuda"):
        return CudaEvents(device)
    return WallClock(sync=torch.mps.synchronize) if device == "mps" else WallClock()


def output_bytes(output: Any) -> int:
    """Bytes of all tensors in what a call returned."""
    tensors = [output] if isinstance(output, Tensor) else [t for t in output if t is not None]
    return sum(t.nbytes for t in tensors)


def is_finite(output: Any) -> bool:
    """No NaN and no infinity in what a call returned."""
    tensors = [output] if isinstance(output, Tensor) else [t for t in output if t is not None]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


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
    matmul_rate: float | None,
    copy_rates: Sequence[CopyRate] = (),
    tuned_limit: int | None = None,
    with_time: bool = True,
) -> tuple[Record, dict[str, Any] | None]:
    """Measure one round of a cell: everything in round 0, more time samples in later rounds.

    Args:
        earlier: time samples of each earlier round.
        previous: the record of the round before, which later rounds refine.
        resident: also measure resident memory (only meaningful in the ``as-shipped`` process).
        matmul_rate: this machine's FLOPs per second, for ``peak_fraction``; ``copy_rates`` likewise.
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
            compiles = round_ == 0 and (cell.compile or _always_compiled(cell))
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
                    "samples": [asdict(sample) for sample in timing.samples],
                }
                summary = summarise([*earlier, timing.samples], quick=rules.quick)
                _add_time(record, cell, summary, matmul_rate, copy_rates)
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
        adapt=whole if cell.compile and not _always_compiled(cell) else None,
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
    record.compiled = True
    return call


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
    record.matmul_flops, record.kernel = counted.matmul_flops, counted.kernel
    del counted
    return_freed_memory()
    if "memory" in cell.measure:
        record.peak_bytes = peak_tensor_bytes(call.run, cell.device)
        return_freed_memory()
        if resident:
            record.peak_rss_bytes = peak_resident_bytes(call.run)


def _add_time(
    record: Record, cell: Cell, summary: TimeSummary, matmul_rate: float | None, copy_rates: Sequence[CopyRate]
) -> None:
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
    record.peak_fraction = peak_fraction(
        summary.median, flops=record.matmul_flops, moved=moved, matmul_rate=matmul_rate, rates=copy_rates
    )


def moved_bytes(record: Record) -> int:
    """What the call must at least move: inputs and parameters read once, the output written once.

    A decoding step reads the state in the place of its inputs. 0 where nothing was allocated: its output is an input.
    """
    if record.peak_bytes == 0:
        return 0
    read = record.input_bytes if record.state_bytes is None else record.state_bytes
    return (read or 0) + (record.param_bytes or 0) + (record.output_bytes or 0)
