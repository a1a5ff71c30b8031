"""Measure one cell and give its record, inside the worker process."""

from __future__ import annotations

import gc
import json
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count as count_from
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnbench.catalogue.engines.forms import passed_over
from attnbench.contract.compiled import compiling, find_instructions, whole, why_not_compiled
from attnbench.contract.inputs import doubt
from attnbench.contract.problem.padding import real_tokens
from attnbench.contract.problem.reference import relative_error
from attnbench.errors import AttnbenchError, BrokenContract, Diverged, Unsupported, said
from attnbench.harness.inside.call import Call, always_compiled, held_to_formula, may_compile, prepare
from attnbench.harness.inside.fresh_inputs import Look, hold_to, hold_to_earlier, hold_to_unseen, look, tensors
from attnbench.harness.inside.launch import host_share, launch, note_work
from attnbench.harness.inside.turns import SEEN
from attnbench.laws.exact_error import beyond_rounding, measure_error
from attnbench.laws.own_error import measure_own_error
from attnbench.measure.allocator import freed_memory_returned, return_freed_memory
from attnbench.measure.card import Card
from attnbench.measure.cgroup import throttled_periods
from attnbench.measure.cuda_events import CudaEvents
from attnbench.measure.flops import Counted, count
from attnbench.measure.laps import first_share
from attnbench.measure.limits import IMPOSSIBLE, Limits, matmul_rate
from attnbench.measure.machine import throttling_warning
from attnbench.measure.memory import UNSURE, out_of_memory, peak_resident_bytes, peak_tensor_bytes, tensor_bytes
from attnbench.measure.standstill import Moment, Standstill
from attnbench.measure.statistics import median
from attnbench.measure.status import Status
from attnbench.measure.stopwatch import Stopwatch, WallClock
from attnbench.measure.time import Disturbed, OutputKeeper, Sample, measure_time, summarise
from attnbench.measure.yardstick import Pace, Yardstick
from attnbench.results.record import REPLACED, Record
from attnbench.suite.cell import Cell
from attnbench.text import one_line
from attnbench.units import format_bytes

if TYPE_CHECKING:
    from attnbench.harness.wire.protocol import VisitCell

NOT_MEASURED = Limits()


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


def stopwatch(device: str) -> Stopwatch:
    """Device events on CUDA, the host's clock elsewhere."""
    if device.startswith("cuda"):
        return CudaEvents(device)
    return WallClock(sync=torch.mps.synchronize) if device == "mps" else WallClock()


def is_finite(output: Any) -> bool:
    """True if the output of a call has no NaN and no infinity."""
    return all(bool(torch.isfinite(t).all()) for t in tensors(output))


def run_cell(
    visit: VisitCell,
    *,
    resident: bool = False,
    limits: Limits = NOT_MEASURED,
    memory_limit: int | None = None,
    begins: Callable[..., None] = lambda part, first=False: None,
) -> tuple[Record, dict[str, Any] | None]:
    """Measure one round of a cell: everything in round 0, more time samples in later rounds.

    Args:
        resident: also measure resident memory (only meaningful in the ``as-shipped`` process).
        limits: the machine's rates in the cell's dtype, for ``peak_fraction`` and ``floor_s``.
        memory_limit: bytes. On a CPU a tuned cell that needs more than a third of it gets the default allocator and a
            note.
        begins: called with the name of each part, and with ``first`` if its first call may compile.

    Returns:
        The record, and this round's raw samples as a JSON row (None without any).
    """
    cell, rules, round_, earlier = visit.cell, visit.rules, visit.round, visit.earlier_samples()
    record = visit.previous or Record.of(cell, Status.OK, quick=rules.quick)
    record = replace(record, status=Status.OK, reason="")  # a round before may have been disturbed
    samples_row: dict[str, Any] | None = None
    try:
        slow = may_compile(cell)
        if round_ == 0 and "error" in cell.measure:
            begins("its error", first=slow and bool(cell.fit))
            _add_error(record, cell, begins, unchecked=visit.unchecked)
            if record.rel_error is not None and not math.isfinite(record.rel_error):
                raise Nonfinite("the output holds NaN or infinity")
        if round_ == 0 and "own_error" in cell.measure:
            begins("its own error", first=slow)
            _add_own_error(record, cell)
        if round_ == 0 and cell.pretrained is not None:
            begins("its trained model", first=slow)
            _add_trained(record, cell, begins)
        if "time" in cell.measure or "memory" in cell.measure:
            begins("its first calls", first=slow)
            compiles = round_ == 0 and (cell.compile or always_compiled(cell))
            call = _compile(record, cell) if compiles else prepare(cell)
            looks = _first_look(record, cell, call, resident) if round_ == 0 else []
            if round_ == 0:
                add_warning(record, held_to_formula(call, unchecked=visit.unchecked))
            if "time" in cell.measure:
                on_cpu, most = cell.device == "cpu", 3 * (record.peak_bytes or 0)
                large = on_cpu and memory_limit is not None and not resident and most > memory_limit
                if large:
                    record.process = "as-shipped"
                watch, first = stopwatch(cell.device), list[Look]()
                if cell.device.startswith("cuda"):
                    begins("its capture as a CUDA graph", first=slow)
                timed = launch(cell, call, before=None if round_ == 0 else record)
                record.launched, record.launch_note = timed.launched, timed.note

                def on_first(output: Any) -> None:
                    if slow:
                        begins("its timed calls")
                    first.append(look(output))

                if not slow:  # else the first of them may compile, where an earlier round was in another process
                    begins("its timed calls")
                throttled = throttled_periods()
                pace: Pace | None = None
                if not rules.quick:
                    pace = Yardstick() if on_cpu else Card.of(cell.device, energy=round_ == 0)
                with freed_memory_returned(large):
                    timing = measure_time(timed.run, rules, stopwatch=watch, pace=pace, on_first=on_first)
                prompt = first_share(call.laps, timing.samples) if call.laps is not None else None
                if round_ == 0 and not compiles and not cell.device.startswith("cuda"):
                    record.first_call_s = timing.first_call_s
                samples_row = {
                    "cell_id": cell.cell_id,
                    "round": round_,
                    "first_call_s": timing.first_call_s,
                    "stopped": timing.stopped,
                    "samples": [sample.to_json() for sample in timing.samples],
                }
                record.time_rounds = round_ + 1
                add_warning(record, throttling_warning(throttled_periods() - throttled))
                begins("the checks of its timed calls")
                seconds = median([sample.seconds for sample in timing.samples])
                if round_ == 0:
                    note_work(record, timed.run, watch, seconds)
                timed = timed.without_graphs(call)
                for column, part in (("select_s", call.select), ("rollback_s", call.rollback)):
                    if round_ == 0 and part is not None:
                        with suppress(Disturbed):
                            alone = measure_time(timed.of_part(part, cell.device), rules, stopwatch=watch)
                            setattr(record, column, summarise([alone.samples], quick=rules.quick).median)
                if round_ == 0:
                    add_warning(record, hold_to_earlier(call, first[0], 0, looks, cell))
                    seconds = timed.seconds_by_host(watch, seconds)
                    number, unseen, undecided = hold_to_unseen(cell, call, watch, seconds, looks)
                    add_warning(record, undecided)
                    if not always_compiled(cell):
                        del call, timed  # first, since there may be memory for only one
                        call = prepare(replace(cell, compile=False))
                    add_warning(record, hold_to(unseen, call.on(number), cell))
                _add_time(record, cell, [*earlier, timing.samples], limits)
                add_parts(record, prompt, round_)
                if isinstance(pace, Card) and round_ == 0:
                    record.energy_j = pace.joules
        if "error" in cell.measure:
            reads = cell.entry.claims(cell.variant, causal=cell.shape.causal).reads
            add_warning(record, doubt(cell.inputs, cell.shape, reads))
        if cell.pretrained is not None:
            from attnbench.models.pretrained.pretrained_cell import opened  # only trained models need it

            add_warning(record, opened(cell).left)
    except Disturbed as why:  # error and memory, which wait for no core, stand in the row all the same
        record.status, record.reason = Status.DISTURBED, one_line(str(why))
    except Exception as error:
        return failed(cell, error, quick=rules.quick, memory_limit=memory_limit), None
    finally:
        gc.collect()
    return record, samples_row


def _add_error(record: Record, cell: Cell, begins: Callable[..., None], *, unchecked: bool) -> None:
    own, draws = cell.compile and not always_compiled(cell), count_from(0)

    def adapt(module: nn.Module) -> nn.Module:
        begins("its error", first=next(draws) == 0)
        return whole(module) if own else module

    result = measure_error(cell, adapt=adapt if may_compile(cell) else None)
    record.error_kind = result.kind
    record.rel_error, record.rel_error_std = result.rel_error, result.rel_error_std
    record.rel_error_first, record.rel_error_last = result.first, result.last
    steps = [None if one is None else float(f"{one:.4g}") for one in result.steps]
    record.rel_error_steps = json.dumps(steps) if steps else ""
    record.max_abs_error, record.cosine = result.max_abs_error, result.cosine
    record.trivial_error, record.error_draws = result.trivial_error, result.draws
    record.kept_mass, record.kept_pairs = result.kept_mass, result.kept_pairs
    record.fit_steps = result.fit_steps
    add_warning(record, result.doubt)
    if result.rel_error is not None and result.rel_error > result.bound:
        off = beyond_rounding(result.rel_error, getattr(torch, cell.dtype))
        if not unchecked:
            raise off
        add_warning(record, str(off))


def _add_own_error(record: Record, cell: Cell) -> None:
    own = cell.compile and not always_compiled(cell)
    result = measure_own_error(cell, adapt=whole if own else None)
    record.own_error, record.own_error_late, record.own_error_grad = result.output, result.late, result.grad
    record.own_error_note = one_line(result.note)


def _add_trained(record: Record, cell: Cell, begins: Callable[..., None]) -> None:
    from attnbench.harness.swap.loss import measure_loss  # only trained models need it
    from attnbench.models.pretrained.pretrained_cell import opened

    one = opened(cell)
    record.model_digest, record.text, record.text_digest = one.subject.digest, one.text.name, one.text.digest
    if "loss" not in cell.measure:
        return
    for column, value in measure_loss(cell, begins).items():
        setattr(record, column, value)


def _compile(record: Record, cell: Cell) -> Call:
    if cell.device == "cpu":
        find_instructions()
    try:
        call, output, record.first_call_s = _first_compiled(cell)
    except Unsupported:  # by torch's caches it may have been compiled, or given up, for other shapes
        torch.compiler.reset()
        call, output, record.first_call_s = _first_compiled(cell)
    if not is_finite(output):
        raise Nonfinite("the compiled output holds NaN or infinity")
    if call.uncompiled:
        _hold_to(output, call.uncompiled())
    record.compiled = True
    return call


def _first_compiled(cell: Cell) -> tuple[Call, Any, float | None]:
    with compiling():
        call = prepare(cell)
        start = Moment.now()
        output = call.on(0)()
        end = Moment.now()
    return call, output, None if Standstill().between(start, end) else end.passed - start.passed


def _hold_to(output: Any, plain: Callable[[], Any]) -> None:
    """Hold compiled code to its source, to half the digits of the dtype; raise AttnbenchError if they differ.

    torch's compiler is known to lose in-place writes of custom gradients. Code with random draws passes.
    """
    wanted = plain()
    for got, one, again in zip(*map(tensors, (output, wanted, plain())), strict=True):
        enough = torch.finfo(one.dtype).eps ** 0.5
        off = relative_error(got, one)
        if off > enough and not relative_error(again, one) > enough:  # the error of 0 against 0 is NaN
            raise AttnbenchError(f"torch.compile made something else of it: a result is off by {off:.1g} of its norm")


def _first_look(record: Record, cell: Cell, call: Call, resident: bool) -> list[Look]:
    """Check one call before timing: sizes, FLOPs, memory, and a finite output.

    Returns a look at the output for each of the inputs in turn.
    """
    first = OutputKeeper([lambda: count(call.uncompiled(), call.on(0)) if call.uncompiled else count(call.on(0))])
    held = OutputKeeper([partial(tensor_bytes, first, cell.device)])
    rise: int | None = None
    start = Moment.now()
    if "memory" in cell.measure and not call.uncompiled:  # which has had its first call
        return_freed_memory()
        rise = peak_resident_bytes(held)
    else:
        first()
    if cell.device.startswith("cuda") and not record.compiled:  # the first timed call may be that of a graph
        torch.cuda.synchronize(cell.device)
        record.first_call_s = Moment.now().passed - start.passed
    counted: Counted = first.output
    tensors(counted.output)
    if call.like is not None and (counted.output.shape, counted.output.dtype) != (call.like.shape, call.like.dtype):
        got, wanted = (f"{tuple(x.shape)} {str(x.dtype)[6:]}" for x in (counted.output, call.like))
        raise BrokenContract(f"it breaks the contract: the output is {got}, not {wanted}")
    if not is_finite(counted.output):
        raise Nonfinite("the output holds NaN or infinity")
    looks = [look(counted.output)]
    record.input_bytes, record.param_bytes = call.input_bytes, call.param_bytes
    record.output_bytes = sum(x.nbytes for x in tensors(counted.output))
    record.moved_bytes = counted.moved_bytes
    if counted.moved_bytes is None:
        record.moved_bytes = call.input_bytes + call.param_bytes + record.output_bytes
    if call.state_bytes is not None:
        record.state_bytes = call.state_bytes
        tokens = sum(real_tokens(cell.shape.B, cell.whole_shape.N, cell.padding))
        if cell.pass_ == "decode":
            tokens -= cell.shape.B * (cell.new_tokens or 1)
        record.state_bytes_per_token = call.state_bytes / max(cell.shape.B, tokens)
    record.tokens_kept = call.tokens_kept
    record.matmul_flops, record.exponentials = counted.matmul_flops, counted.exponentials
    record.kernel = counted.kernel
    for why in passed_over():
        add_warning(record, why)
    if counted.put:
        add_warning(record, f"{REPLACED} ({counted.put}) in the place of its softmax, so this is sdpa's algorithm")
        if cell.pass_ != "forward" or cell.shape.causal:  # else a fused kernel takes as many for each pair
            record.matmul_flops = record.exponentials = None
    storages = {one.data_ptr(): one for one in (x.untyped_storage() for x in tensors(counted.output))}
    kept = held.output[1] - sum(one.nbytes() for one in storages.values()) if held.output else 0
    unsure = UNSURE * all(one.resizable() for one in storages.values())  # another library's memory is not
    del counted, first, held, storages
    return_freed_memory()
    other = OutputKeeper([call.on(1)])
    if "memory" in cell.measure:
        record.peak_bytes = peak_tensor_bytes(other, cell.device)
        _add_kept(record, cell, kept, rise, unsure)
    else:
        other()
    looks.append(look(other.output))
    del other
    return_freed_memory()
    if "memory" in cell.measure and resident:
        record.peak_rss_bytes = peak_resident_bytes(call.on(0))
    return looks


def _add_kept(record: Record, cell: Cell, kept: int, rise: int | None, unsure: int) -> None:
    """Count bytes ``kept`` behind the first call; warn of a ``rise`` of resident memory beyond it and ``unsure``."""
    if record.peak_bytes is None:
        return
    if kept > 0:
        record.peak_bytes += kept
        if kept > record.peak_bytes / 10:
            add_warning(record, f"keeps {format_bytes(kept)} from its first call on, which its peak includes")
    if cell.device == "cpu" and rise is not None and rise > 1.5 * record.peak_bytes + unsure:
        add_warning(
            record,
            f"resident memory rose by {format_bytes(rise)}, and torch knows of {format_bytes(record.peak_bytes)}: "
            "it takes memory that its peak leaves out",
        )


def _add_time(record: Record, cell: Cell, rounds: Sequence[Sequence[Sample]], limits: Limits) -> None:
    """Fill in statistics and warnings of all rounds; raise Disturbed if threads waited in nearly all samples."""
    summary = summarise(rounds, quick=record.quick)
    with suppress(Disturbed, ValueError):  # nothing was said of the rounds before
        for outdated in summarise(rounds[:-1], quick=record.quick).warnings:
            record.warnings = record.warnings.replace(outdated, "").replace("; ; ", "; ").strip("; ")
    record.time_median_s, record.time_min_s = summary.median, summary.minimum
    record.time_iqr_s = None if record.quick else summary.iqr
    record.time_ci_low_s, record.time_ci_high_s = summary.interval or (None, None)
    record.time_samples = summary.used
    record.host_share = host_share(record.device_s, summary.median)
    record.examples_per_s = cell.shape.B / summary.median
    padding = 0.0 if cell.shape.cross or cell.architecture == "encoder-decoder" else cell.padding  # of keys alone
    tokens = sum(real_tokens(cell.shape.B, cell.shape.N, padding))
    if cell.pass_ in ("decode", "generate"):
        tokens = cell.shape.B * (cell.new_tokens or 1)
    record.tokens_per_s = tokens / summary.median
    if record.first_call_s is None:
        add_warning(record, "first call unknown: the process was stopped or waited for a core")
    for warning in summary.warnings:
        add_warning(record, warning)
    hold_to_limits(record, limits)


def add_parts(record: Record, prompt: float | None, rounds: int = 0) -> None:
    """Divide the row's time between prompt and steps, by the prompt's share of a call and of ``rounds`` before it."""
    if rounds and record.first_token_s is not None and record.token_s is not None:
        before = record.first_token_s / (record.first_token_s + record.new_tokens * record.token_s)
        prompt = before if prompt is None else (rounds * before + prompt) / (rounds + 1)
    if prompt is not None and record.time_median_s is not None:
        record.first_token_s = prompt * record.time_median_s
        record.token_s = (1 - prompt) * record.time_median_s / record.new_tokens


def hold_to_limits(record: Record, limits: Limits) -> None:
    """Fill in a timed row's products and bytes per second, and compare them with the machine's limits."""
    if (time := record.time_median_s) is not None:
        flops, moved = record.matmul_flops, record.moved_bytes or 0
        record.flops_per_s, record.bytes_per_s = flops / time if flops else None, moved / time if moved else None
        record.peak_fraction = limits.peak_fraction(time, flops=flops, moved=moved)
        record.floor_s = limits.floor(flops=flops, exponentials=record.exponentials, moved=moved)


def add_warning(record: Record, warning: str | None) -> None:
    """Add ``warning`` to the row, unless the row has it already."""
    if warning and warning not in record.warnings:
        record.warnings = "; ".join(filter(None, (record.warnings, warning)))


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
    """The rate of ``flops`` in ``seconds`` over that of the fastest products; None if it is possible or unknown.

    Only matrix products of every dtype that the cell may use inside count: a cell need not read all bytes of its
    inputs. Sparse products are left out, since torch counts more than is computed.
    """
    if count(prepare(cell).on(SEEN)).sparse:
        return None
    halves = {torch.bfloat16} if cell.device == "cpu" else {torch.bfloat16, torch.float16}  # CPUs lack the second
    dtypes = {getattr(torch, cell.dtype), torch.float32, *halves}
    fastest = max(matmul_rate(cell.device, dtype) for dtype in dtypes)
    ratio = flops / seconds / fastest if fastest else 0.0
    return ratio if ratio > _CERTAINLY else None
