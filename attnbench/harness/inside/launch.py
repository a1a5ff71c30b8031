"""The launch of timed calls on a GPU: kernel after kernel from Python, or all of them as a CUDA graph.

A graph is captured for each of the inputs in turn, and must equal the call's own output. Memory, error and all else are
measured on the call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from time import perf_counter
from typing import Any

import torch

from attnbench.errors import AttnbenchError
from attnbench.harness.inside.call import Call
from attnbench.harness.inside.fresh_inputs import Look, agree, look, tensors
from attnbench.harness.inside.turns import SEEN
from attnbench.measure.cuda_events import CudaEvents
from attnbench.measure.cuda_graph import CudaRecorder, NotCaptured, Replay, captured
from attnbench.measure.device_work import device_work
from attnbench.measure.stopwatch import Stopwatch
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from attnbench.text import one_line

EAGER = "launched by the host"
"""Start of a warning about a call that is no graph, with the reason."""
_NO_GRAPH = {
    "backward": "the backward pass alone: its forward pass was made outside of any capture",
    "stepwise": "stepwise: each step has a place of its own; pass decode captures one",
    "generate": "generate: its parts are timed while it runs; pass decode captures a step",
}
_LISTS = "a trained model takes its attention call by call"
_OTHER = "a replay gives other numbers than the call"
_LONG = 5.0
"""Seconds. A longer call is not worth the many calls of a capture."""
_DRAWS = "its numbers change from call to call, so that no replay could be held to them"


@dataclass(frozen=True, slots=True)
class Launch:
    """The call that is timed."""

    run: Callable[[], Any]
    """Like :attr:`attnbench.harness.inside.call.Call.run`; the next call on the same inputs may overwrite its
    output."""
    launched: str = ""
    """``eager`` or ``graph``; empty without a choice."""
    note: str = ""
    """The reason against a graph; empty if it is one, or was not to be one."""

    def without_graphs(self, call: Call) -> Launch:
        """The same without graphs, since memory may not hold both them and a call."""
        return replace(self, run=call.run)

    def seconds_by_host(self, watch: Stopwatch, seconds: float) -> float:
        """The time of one call of :meth:`without_graphs`, if a timed one takes ``seconds``."""
        return watch.time(self.run, SEEN)[0] / SEEN if self.launched == "graph" else seconds

    def of_part(
        self, part: Callable[[], Any], device: str, recorder: Callable[[str], CudaRecorder] = CudaRecorder
    ) -> Callable[[], Any]:
        """A part of the call on inputs in turn, as a graph if the call is one and the part can be."""
        if self.launched != "graph":
            return part
        try:
            turns = cycle(captured([part] * SEEN, recorder(device)))
        except NotCaptured:
            return part
        return lambda: next(turns)()


def launch(
    cell: Cell, call: Call, *, before: Record | None = None, recorder: Callable[[str], CudaRecorder] = CudaRecorder
) -> Launch:
    """Capture the call of a cell on a GPU, unless the host is to launch it.

    ``before`` is an earlier round's row: all rounds launch in the same way. Raises AttnbenchError if its graph cannot
    be captured now, RuntimeError if the device is lost.
    """
    if not cell.device.startswith("cuda"):
        return Launch(call.run)
    if cell.launch == "eager" or (before is not None and before.launched != "graph"):
        return Launch(call.run, "eager", before.launch_note if before else "")
    note = _NO_GRAPH.get(cell.pass_, "") or _LISTS * (cell.level == "pretrained")
    if not note:
        try:
            turns = cycle(_graphs(cell, call, recorder(cell.device)))
            return Launch(lambda: next(turns)(), "graph")
        except (NotCaptured, torch.OutOfMemoryError) as why:
            note = one_line(str(why).partition("\n")[0])
    if before is not None:
        raise AttnbenchError(f"it was a CUDA graph in the first round, and is none now: {note}")
    return Launch(call.run, "eager", note)


def _graphs(cell: Cell, call: Call, recorder: CudaRecorder) -> list[Replay]:
    """A replay for each of the inputs in turn, held to the call itself.

    Raises NotCaptured without any, if the numbers differ, or if the call takes too long.
    """
    wanted, seen, ends = list[Any](), list[Look](), [perf_counter()]
    for number in range(SEEN):
        wanted.append(call.on(number)())
        seen.append(look(wanted[number]))
        ends.append(perf_counter())
    if (last := ends[-1] - ends[-2]) > _LONG:
        raise NotCaptured(f"a call takes {last:.0f} s, which is too long to capture it")
    replays = captured([call.on(number) for number in range(SEEN)], recorder)
    for number, replay in enumerate(replays):
        _spoil(replay.output, wanted[number])
        if not agree(look(replay()), seen[number], cell):
            del replay
            replays.clear()
            steady = agree(look(call.on(number)()), seen[number], cell)
            raise NotCaptured(_OTHER if steady else _DRAWS)
    return replays


@torch.inference_mode()
def _spoil(output: Any, other: Any) -> None:
    """Overwrite the captured output, except for parts that the call only passes on."""
    for one, beside in zip(tensors(output), tensors(other), strict=True):
        storage = one.untyped_storage()
        if one.is_floating_point() and storage.data_ptr() != beside.untyped_storage().data_ptr():
            one.new_empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in any type


def note_work(record: Record, run: Callable[[], Any], watch: Stopwatch, seconds: float) -> None:
    """Fill in a GPU's work in a timed call of ``seconds``."""
    if isinstance(watch, CudaEvents) and (work := device_work(run, watch.flush, seconds)) is not None:
        record.device_s, record.kernels = work.seconds, round(work.kernels)


def host_share(device_s: float | None, seconds: float | None) -> float | None:
    """The share of a call's time without a running kernel; None if unknown."""
    return None if device_s is None or not seconds else max(0.0, 1 - device_s / seconds)
