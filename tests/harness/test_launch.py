"""Which calls are timed as CUDA graphs, on a device that is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.traits import Traits
from attnbench.contract.variant import VARIANTS, register
from attnbench.errors import AttnbenchError, UsageError
from attnbench.harness.inside.call import Call, prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.inside.launch import Launch, host_share, launch
from attnbench.harness.inside.turns import SEEN
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.cuda_graph import Replay
from attnbench.measure.machine import refuse_graph
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell


def cell(variant: str = "softmax", **changes: Any) -> Cell:
    shape = Shape(heads=2, seq_len=64, head_dim=8)
    return replace(Cell("s", "w", Spec(variant), shape, measure=("time",)), **changes)


class Recorder:
    """Captures by making the call, and replays by making it again into the same tensors.

    Args:
        again: what a replay does with the call and what the capture gave; None to compute.
    """

    def __init__(self, again: Callable[[Callable[[], Any], Any], Any] | None = None) -> None:
        self._again = again or self._compute

    def warm(self, call: Callable[[], Any]) -> None:
        call()

    def capture(self, call: Callable[[], Any]) -> Replay:
        output = call()
        return Replay(lambda: self._again(call, output), output)

    def recover(self) -> None:
        pass

    @staticmethod
    @torch.inference_mode()
    def _compute(call: Callable[[], Any], output: Any) -> None:
        with torch.inference_mode(mode=False), torch.enable_grad():
            new = call()
        for old, one in zip(*([x] if isinstance(x, Tensor) else x for x in (output, new)), strict=True):
            old.copy_(one)


def launched(asked: Cell, recorder: Any = None, before: Record | None = None) -> tuple[Call, Launch]:
    """How a cell is launched that is measured on the CPU and says that it is on a GPU."""
    call = prepare(asked)
    return call, launch(replace(asked, device="cuda"), call, before=before, recorder=lambda device: recorder)


@pytest.mark.parametrize("pass_", ["forward", "training", "decode"])
def test_a_call_is_a_graph_by_default_whose_replays_take_the_inputs_in_turn(pass_: Any) -> None:
    call, timed = launched(cell("linear", pass_=pass_), Recorder())
    assert (timed.launched, timed.note) == ("graph", "")
    for number in (0, 1, 0):
        found, wanted = timed.run(), call.on(number)()
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("pass_", ["backward", "stepwise", "generate"])
def test_other_passes_are_launched_by_the_host_and_say_why(pass_: Any) -> None:
    call, timed = launched(cell("linear", pass_=pass_, new_tokens=2 * (pass_ == "generate")))
    assert timed.launched == "eager"
    assert timed.note.startswith(("stepwise", "generate", "the backward pass"))
    assert timed.run is call.run


def test_eager_is_eager_without_a_word_and_a_cpu_has_no_choice() -> None:
    assert launched(cell(launch="eager"))[1].launched == "eager"
    assert launched(cell(launch="eager"))[1].note == ""
    call = prepare(cell())
    assert launch(cell(), call) == Launch(call.run, "", "")


class Broken(Recorder):
    def capture(self, call: Callable[[], Any]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing\nand so on")


@pytest.mark.parametrize("way", ["auto", "graph"])
def test_what_cannot_be_captured_is_launched_by_the_host_with_a_note_of_one_line(way: Any) -> None:
    asked = cell()
    call = prepare(asked)
    timed = launch(replace(asked, device="cuda", launch=way), call, recorder=lambda device: Broken())
    assert (timed.launched, timed.run) == ("eager", call.run)
    assert timed.note.startswith("operation not permitted when stream is capturing")
    assert "\n" not in timed.note


def test_a_replay_that_does_nothing_is_no_graph_though_the_capture_left_the_right_numbers() -> None:
    timed = launched(cell(), Recorder(lambda call, output: None))[1]
    assert (timed.launched, timed.note) == ("eager", "a replay gives other numbers than the call")


def test_a_call_that_draws_anew_each_time_is_launched_by_the_host() -> None:
    asked = cell()
    call = replace(prepare(asked), on=lambda number: lambda: torch.randn(1, 2, 64, 8))
    timed = launch(replace(asked, device="cuda"), call, recorder=lambda device: Recorder())
    assert timed.launched == "eager"
    assert timed.note.startswith("its numbers change from call to call")


def test_a_call_that_returns_its_input_is_captured_and_the_input_stays_as_it_is() -> None:
    call, timed = launched(cell("identity"), Recorder(lambda call, output: None))
    assert timed.launched == "graph"
    assert bool(call.on(0)().isfinite().all())


def test_later_rounds_are_launched_as_the_first_one_was() -> None:
    by_host = Record.of(cell(), Status.OK, launched="eager", launch_note="it may not")
    assert launched(cell(), Recorder(), by_host)[1].note == "it may not"
    with pytest.raises(AttnbenchError, match="was a CUDA graph in the first round, and is none now: operation not"):
        launched(cell(), Broken(), Record.of(cell(), Status.OK, launched="graph"))


def test_a_part_of_a_call_is_a_graph_where_the_call_is_one_and_can_be() -> None:
    turns = count()
    part = lambda: torch.tensor(next(turns) % SEEN)  # noqa: E731  # as a choice takes its inputs in turn
    graph = Launch(part, "graph")
    again = graph.of_part(part, "cuda", lambda device: Recorder(lambda call, output: None))
    assert [int(again()) for _ in range(4)] == [0, 1, 0, 1]
    assert graph.of_part(part, "cuda", lambda device: Broken()) is part
    assert Launch(part, "eager").of_part(part, "cuda") is part


def test_the_share_of_the_host_is_the_time_without_a_kernel() -> None:
    assert host_share(1.0, 8.0) == 0.875
    assert host_share(1.1, 1.0) == 0.0  # two kernels at once
    assert host_share(None, 1.0) is None
    assert host_share(1.0, None) is None


def test_graphs_on_a_cpu_are_refused_in_one_line_and_are_a_row_of_a_suite() -> None:
    with pytest.raises(UsageError, match=r"^--launch graph: cpu has no CUDA graphs; .* --device cuda$"):
        refuse_graph("graph", "cpu")
    refuse_graph("graph", "cuda:1")
    refuse_graph("auto", "mps")
    record = run_cell(VisitCell(cell(launch="graph"), TimingRules(quick=True)))[0]
    assert record.status is Status.UNSUPPORTED
    assert record.reason.startswith("launch: cpu has no CUDA graphs")


def test_a_row_of_a_cpu_says_nothing_of_launches() -> None:
    record = run_cell(VisitCell(cell(), TimingRules(quick=True)))[0]
    assert (record.launch, record.launched, record.launch_note) == ("auto", "", "")
    assert (record.device_s, record.kernels, record.host_share) == (None, None, None)


@pytest.fixture
def _asking() -> Iterator[None]:
    """A variant that asks the device for a number in each call, for which a capture has no answer."""

    @register("asking", family="reference", source="here", formula="v", cost="O(1)", traits=Traits(target="other"))
    class Asking(nn.Module):
        """Values, or their doubles."""

        def __init__(self, shape: Shape) -> None:
            super().__init__()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            return 2 * v if q.abs().sum().item() < 0 else v + 0

    yield
    del VARIANTS._entries["asking"]


def on_gpu(variant: str, **changes: Any) -> Record:
    asked = replace(cell(variant, **changes), device="cuda", shape=Shape(heads=2, seq_len=512, head_dim=32))
    return run_cell(VisitCell(asked, TimingRules(quick=True)))[0]


@pytest.mark.cuda
@pytest.mark.usefixtures("_asking")
def test_on_a_gpu_the_cell_after_one_that_cannot_be_captured_is_measured_as_a_graph() -> None:
    asking = on_gpu("asking")
    assert (asking.status, asking.launched) == (Status.OK, "eager"), asking.reason
    assert "capturing" in asking.launch_note
    assert "test_launch.py" in asking.launch_note
    after = on_gpu("linear")
    assert (after.status, after.launched, after.launch_note) == (Status.OK, "graph", ""), after.reason


@pytest.mark.cuda
@pytest.mark.parametrize("pass_", ["forward", "training", "decode"])
def test_on_a_gpu_a_graph_has_the_kernels_of_the_call_and_waits_less_for_the_host(pass_: Any) -> None:
    rows = [on_gpu("linear", launch=how, pass_=pass_) for how in ("graph", "eager")]
    assert [(row.status, row.launched) for row in rows] == [(Status.OK, "graph"), (Status.OK, "eager")], rows
    graph, eager = rows
    assert graph.host_share is not None
    assert eager.host_share is not None
    assert graph.host_share < eager.host_share
    assert graph.kernels
    assert graph.kernels == pytest.approx(eager.kernels, abs=2)


def test_a_call_that_takes_long_is_not_made_again_and_again_to_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 90.0, 96.0])  # the first may compile
    monkeypatch.setattr("attnbench.harness.inside.launch.perf_counter", ticks.__next__)
    assert launched(cell(), Recorder())[1].note == "a call takes 6 s, which is too long to capture it"


def test_what_is_timed_of_a_cell_are_its_graphs_and_what_is_checked_is_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay takes no time to start, so that a call of unseen inputs would seem to compute what graphs remember."""
    replays = list[int]()

    def made_up(asked: Cell, call: Call, *, before: Record | None = None) -> Launch:
        outputs = [call.on(number)() for number in range(SEEN)]
        return Launch(lambda: outputs[(replays.append(1), len(replays) - 1)[1] % SEEN], "graph", "")

    monkeypatch.setattr("attnbench.harness.inside.execute.launch", made_up)
    asked = replace(cell(), shape=Shape(heads=4, seq_len=512, head_dim=32))
    record, samples = run_cell(VisitCell(asked, TimingRules(min_time=0.01, max_time=0.05)))
    assert (record.status, record.launched) == (Status.OK, "graph"), record.reason
    assert samples is not None
    assert len(replays) > 100
    assert record.time_median_s is not None
    assert record.time_median_s < 1e-4
