"""How the timed calls of a cell reach a GPU: kernel after kernel from Python, or all of them as a CUDA graph.

A graph is captured for each of the inputs that take turns, and must give what the call itself gives. Everything else
that is asked of a cell, such as its memory and its error, is asked of the call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from time import perf_counter
from typing import Any

import torch

from attnbench.cell import Cell
from attnbench.errors import AttnbenchError
from attnbench.measure.cuda_events import CudaEvents
from attnbench.measure.cuda_graph import CudaRecorder, NotCaptured, Recorder, Replay, captured
from attnbench.measure.device_work import device_work
from attnbench.measure.stopwatch import Stopwatch
from attnbench.record import Record, one_line
from attnbench.run.call import Call
from attnbench.run.turns import SEEN
from attnbench.run.unseen import Look, agree, look, tensors

EAGER = "launched by the host"
"""Start of a warning about a call that is no graph, with the reason."""
_NO_GRAPH = {
    "backward": "the backward pass alone: its forward pass was made outside of any capture",
    "stepwise": "stepwise: each step has a place of its own; pass decode captures one",
    "generate": "generate: its parts are timed while it runs; pass decode captures a step",
}
"""Passes that are not captured, and why."""
_LISTS = "a trained model takes its attention call by call"
_OTHER = "a replay gives other numbers than the call"
_LONG = 5.0
"""Seconds. A call that takes longer is made too often by a capture to be worth it."""
_DRAWS = "its numbers change from call to call, so that no replay could be held to them"


@dataclass(frozen=True, slots=True)
class Launch:
    """The call that is timed."""

    run: Callable[[], Any]
    """Like :attr:`attnbench.run.call.Call.run`; the next call on the same inputs may overwrite what it gives."""
    launched: str = ""
    """``eager`` or ``graph``; empty where there is no choice."""
    note: str = ""
    """Why it is not a graph; empty if it is, or if it was not to be one."""

    def without_graphs(self, call: Call) -> Launch:
        """The same, with the call itself in the place of its graphs, beside which there may be no memory for a call."""
        return replace(self, run=call.run)

    def seconds_by_host(self, watch: Stopwatch, seconds: float) -> float:
        """What one call of :meth:`without_graphs` takes, if a timed one takes ``seconds``."""
        return watch.time(self.run, SEEN)[0] / SEEN if self.launched == "graph" else seconds

    def of_part(
        self, part: Callable[[], Any], device: str, recorder: Callable[[str], Recorder] = CudaRecorder
    ) -> Callable[[], Any]:
        """A part of the call, which takes the inputs in turn, as a graph if the call is one and the part can be."""
        if self.launched != "graph":
            return part
        try:
            turns = cycle(captured([part] * SEEN, recorder(device)))
        except NotCaptured:
            return part
        return lambda: next(turns)()


def launch(
    cell: Cell, call: Call, *, before: Record | None = None, recorder: Callable[[str], Recorder] = CudaRecorder
) -> Launch:
    """Capture the call of a cell on a GPU, unless the cell is to be launched by the host.

    Args:
        before: the row of an earlier round, whose way is kept, since the times of all rounds are of one thing.

    Raises:
        AttnbenchError: it was a graph in an earlier round and cannot be one now.
        RuntimeError: the device is lost.
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


def _graphs(cell: Cell, call: Call, recorder: Recorder) -> list[Replay]:
    """A replay for each of the inputs that take turns, held to the call itself.

    Raises:
        NotCaptured: there are none, they give other numbers, or the call takes too long to try.
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
    """Overwrite what the capture may have left in the output, except for parts that the call does not make anew."""
    for one, beside in zip(tensors(output), tensors(other), strict=True):
        storage = one.untyped_storage()
        if one.is_floating_point() and storage.data_ptr() != beside.untyped_storage().data_ptr():
            one.new_empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)  # NaN in any type


def note_work(record: Record, run: Callable[[], Any], watch: Stopwatch, seconds: float) -> None:
    """Fill in what a timed call, which takes ``seconds``, has a GPU do."""
    if isinstance(watch, CudaEvents) and (work := device_work(run, watch.flush, seconds)) is not None:
        record.device_s, record.kernels = work.seconds, round(work.kernels)


def host_share(device_s: float | None, seconds: float | None) -> float | None:
    """The share of a call's time in which none of its kernels ran; None where that is not known."""
    return None if device_s is None or not seconds else max(0.0, 1 - device_s / seconds)
