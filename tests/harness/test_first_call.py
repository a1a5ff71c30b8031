"""The first call of a cell has a time limit of its own if it may compile: no row and no longer length is lost to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.contract.plugins.discovery import load
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError
from attnbench.harness.compare.length import measure_length
from attnbench.harness.inside import execute as visits
from attnbench.harness.inside import pairs
from attnbench.harness.inside.call import may_compile
from attnbench.harness.inside.worker import Served
from attnbench.harness.outside import isolation
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.repeat import command_of
from attnbench.harness.runner import execute
from attnbench.harness.score.score import Scored
from attnbench.harness.wire.process import environment_for
from attnbench.harness.wire.protocol import Train, VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.results.sources import Watch
from attnbench.suite.cell import Cell, Training
from tests.harness.test_isolation import GUARDED, stand_in
from tests.harness.test_length import NAMES, Slow, outcome
from tests.instant import Listening

LATE = "no answer within 600 s for its first calls, which may compile; raise --first-call-timeout"

PLUGIN = str(Path(__file__).with_name("bad_variants.py"))


@pytest.fixture
def measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: None
) -> Callable[..., tuple[list[Record], list[str]]]:
    """Measures a variant whose first call for a length takes 1.6 s in each process, as if kernels were compiled."""
    monkeypatch.setattr(visits, "may_compile", lambda cell: True)
    monkeypatch.setattr(isolation, "SOON", 0.4)
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    suite = tmp_path / "s.yaml"
    suite.write_text("name: s\nsweeps: [{name: w, measure: [time], matrix: {variant: bad-first, seq_len: [8, 16]}}]\n")
    load(PLUGIN)

    def go(**options: Any) -> tuple[list[Record], list[str]]:
        given = {"plugins": (PLUGIN,), "threads": 1, "unchecked": True, "min_time": 0.001, "cell_timeout": 1.0}
        watcher = Listening()
        _, records = execute(make_plan(suite, Options("cpu", out=tmp_path / "out", **{**given, **options})), watcher)
        return sorted(records, key=lambda one: one.seq_len), watcher.parts

    return go


def test_a_first_call_may_take_longer_than_a_cell_in_each_process_and_progress_says_that_it_compiles(
    measure: Any,
) -> None:
    records, parts = measure(rounds=2)
    assert [(one.status, one.time_rounds) for one in records] == [(Status.OK, 2)] * 2
    each = ["its first calls", "its first calls, compiling", "its timed calls", "the checks of its timed calls"]
    assert parts == each * 4


def test_a_first_call_that_takes_too_long_ends_says_which_option_to_raise_and_stands_for_no_longer_length(
    measure: Any,
) -> None:
    short = "no answer within 1 s for its first calls, which may compile; raise --first-call-timeout"
    records, _ = measure(quick=True, first_call_timeout=1.0)
    assert [(one.status, one.reason) for one in records] == [(Status.TIMEOUT, short)] * 2
    records, parts = measure(quick=True, first_call_timeout=1.0, cell_timeout=30.0)
    assert [one.status for one in records] == [Status.TIMEOUT] * 2
    assert parts == []  # neither limit is larger for what they waited for
    records, _ = measure(quick=True, first_call_timeout=20.0)
    assert [one.status for one in records] == [Status.OK] * 2


def test_each_limit_measures_again_what_it_stopped_itself(instant: Any, tmp_path: Path, small_suite: Path) -> None:
    def run(worker: Any, **options: Any) -> dict[str, str]:
        _, records = execute(
            make_plan(small_suite, Options("cpu", out=tmp_path, threads=1, rounds=1, **options)), None, worker
        )
        return {f"{one.label}/n{one.seq_len}": str(one.status) for one in records}

    def late(cell: Cell, round_: int) -> CellFailed | None:
        reasons = {"softmax": LATE, "linear": "no answer within 60 s for its timed calls"}
        return CellFailed(Status.TIMEOUT, reasons[cell.variant.name]) if cell.shape.N == 2 else None

    assert run(instant(late)) == {
        "softmax/n2": "timeout",
        "softmax/n4": "ok",
        "linear/n2": "timeout",
        "linear/n4": "timeout",
    }
    worker = instant()
    run(worker, cell_timeout=60.0, first_call_timeout=600.0)
    assert worker.visits == []
    run(worker, first_call_timeout=601.0)
    assert worker.visits == [("softmax/n2", 0)]
    run(worker, cell_timeout=61.0)
    assert sorted(worker.visits[1:]) == [("linear/n2", 0), ("linear/n4", 0)]


PART = 'time.sleep({}); print(\'{{"progress": {{"at": "{}"{}}}}}\', flush=True)\n'


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_the_limit_of_a_request_leaves_first_calls_out_which_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, each: bool, ends: bool
) -> None:
    life = 'import sys, time\nsys.stdin.readline()\nprint("{}", flush=True)\nsys.stdin.readline()\n'
    life += PART.format(0, "its first calls", ', "first": true') + PART.format(2.0 if ends else 60, "its turns", "")
    stand_in(tmp_path, monkeypatch, GUARDED + life + 'print("{}", flush=True)\nsys.stdin.readline()')
    monkeypatch.setattr(isolation, "_SLICE", 0.2)
    monkeypatch.setattr(isolation, "SOON", 0.5)
    parts: list[str] = []
    told = (lambda progress: parts.append(progress["at"])) if each else None
    with Worker(Settings(first_call_timeout=8.0 if ends else 1.5)) as worker:
        worker.start()
        if ends:
            assert worker.ask({}, 1.5, told=told) == {}
            assert worker.compiled >= 1.9
        else:
            with pytest.raises(CellFailed) as failed:
                worker.ask({}, 30.0, told=told)
            assert (failed.value.status, failed.value.late) == (Status.TIMEOUT, False)
            assert failed.value.reason == LATE.replace("600", "1.5")
            assert worker.compiled >= 1.4
    assert parts == ["its first calls", "its first calls, compiling", *["its turns"] * ends] * each


class Compiling(Slow):
    """A worker that compiles for minutes at first."""

    def __init__(self, *, late: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._late = late

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        self.compiled = 300.0 if request["do"].endswith("VisitCell") else 0.0
        self.now += self.compiled
        if request["do"].endswith("VisitCell") and request["cell"]["variant"]["name"] in self._late:
            raise CellFailed(Status.TIMEOUT, LATE)
        return super().ask(request, timeout)


def test_first_calls_take_nothing_of_the_time_for_a_length_and_no_error_is_given_up_for_one() -> None:
    def visit(worker: Compiling) -> Any:
        cells = [Cell("s", "w", Spec(name), Shape(seq_len=64), measure=("time", "error")) for name in NAMES]
        given: dict[str, Any] = {"timeout": 60.0, "known": {}, "clock": lambda: worker.now}
        return measure_length([worker] * 3, cells, TimingRules(), **given)  # type: ignore[list-item]  # all that is used

    found = visit(Compiling())
    assert outcome(found) == dict.fromkeys(NAMES, "ok")
    found = visit(Compiling(late=("sdpa",)))
    assert outcome(found) == {"softmax": "ok", "sdpa": "timeout", "linear": "ok"}
    assert found.records[1].reason == LATE
    assert found.unsure == {1}  # so that longer lengths are tried
    assert found.with_error


def test_turns_tell_of_the_first_calls_of_each_cell_that_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("s", "w", Spec(name), Shape(seq_len=8, heads=1, head_dim=4)) for name in ("softmax", "linear")]
    rules = TimingRules(quick=True, warmup_time=0.0, warmup_calls=1)
    told: list[tuple[str, bool]] = []

    def begins(part: str, *, first: bool = False) -> None:
        told.append((part, first))

    pairs.measure_pairs(cells, rules, 1, begins=begins)
    assert told == []
    monkeypatch.setattr(pairs, "may_compile", lambda cell: cell.variant.name == "linear")
    pairs.measure_pairs(cells, rules, 1, begins=begins)
    assert told == [("the first calls of linear", True), ("the turns", False)]


def test_a_training_may_compile_until_its_first_step_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def score(cell: Cell, *, tell: Callable[[int, int], None], **_: Any) -> Scored:
        tell(0, 40)
        tell(7, 40)
        return Scored({}, [], [])

    monkeypatch.setattr("attnbench.harness.score.score.score", score)
    monkeypatch.setattr("attnbench.harness.inside.worker.keep_freed_memory", lambda: True)
    served = Served({"alone": True}, {"memory_limit_bytes": None}, [], Watch({}, [], listens=False))
    cell = Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8), training=Training(steps=40, learning_rate=0.01))
    told: list[tuple[int, int, str, bool]] = []

    def tell(done: int, of: int, at: str, *, first: bool) -> None:
        told.append((done, of, at, first))

    served._train(Train(cell, tmp_path, quick=True), tell)
    assert told == [(0, 40, "", False), (7, 40, "", False)]
    told.clear()
    served._train(Train(replace(cell, device="cuda"), tmp_path, quick=True), tell)
    assert told == [(0, 40, "its first step", True)] * 2 + [(7, 40, "", False)]


def test_a_first_call_may_compile_on_a_gpu_and_where_torch_compiles() -> None:
    cell = Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8))
    assert not may_compile(cell)
    assert may_compile(replace(cell, device="cuda:1"))
    assert may_compile(replace(cell, compile=True))
    assert may_compile(replace(cell, variant=parse_spec("flex")))


def test_only_the_first_call_of_an_error_may_compile_and_not_the_exact_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("s", "w", parse_spec("performer"), Shape(seq_len=8, heads=1, head_dim=4), measure=("error",))
    monkeypatch.setattr(visits, "may_compile", lambda cell: True)
    told: list[tuple[str, bool]] = []
    visit = VisitCell(replace(cell, error_draws=3), TimingRules(quick=True))
    visits.run_cell(visit, begins=lambda part, first=False: told.append((part, first)))
    assert told[:3] == [("its error", False), ("its error", True), ("its error", False)]
    assert [first for _, first in told].count(True) == 1


def test_triton_keeps_what_it_tuned_for_the_next_process_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert environment_for(1)["TRITON_CACHE_AUTOTUNING"] == "1"
    assert environment_for(1)["TRITON_CACHE_DIR"] == "/somewhere"
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "0")
    assert environment_for(1)["TRITON_CACHE_AUTOTUNING"] == "0"


def test_a_run_is_repeated_with_its_limit(small_suite: Path) -> None:
    assert "--first-call-timeout" not in command_of(make_plan(small_suite, Options("cpu", threads=1)))
    plan = make_plan(small_suite, Options("cpu", threads=1, first_call_timeout=900.0))
    assert plan.settings.first_call_timeout == 900.0
    assert "--first-call-timeout 900.0" in command_of(plan)


def test_a_lost_device_costs_its_own_row_and_the_next_cell_has_a_new_process(
    instant: Any, tmp_path: Path, small_suite: Path
) -> None:
    def lost(cell: Cell, round_: int) -> CellFailed | None:
        return CellFailed(Status.CRASH, "the device was lost: CUDA error") if cell.variant.name == "linear" else None

    worker = instant(lost)
    _, records = execute(make_plan(small_suite, Options("cpu", out=tmp_path, threads=1, rounds=1)), None, worker)
    got = {(one.variant, one.seq_len): (one.status, one.reason) for one in records}
    for n in (2, 4):  # a crash stands for no longer length
        assert got["linear", n] == (Status.CRASH, "the device was lost: CUDA error")
        assert got["softmax", n] == (Status.OK, "")


def test_without_a_driver_a_gpu_is_no_device_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_suite: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"^no device 'cuda' on this machine; there is cpu$"):
        make_plan(small_suite, Options("cuda", out=tmp_path))


@pytest.mark.cuda
def test_on_a_gpu_a_first_call_may_take_longer_than_a_cell(tmp_path: Path) -> None:
    load(PLUGIN)
    suite = tmp_path / "s.yaml"
    suite.write_text("name: s\nsweeps: [{name: w, matrix: {variant: bad-first, seq_len: 8}}]\n")
    options = Options("cuda", out=tmp_path / "out", plugins=(PLUGIN,), quick=True, unchecked=True, cell_timeout=1.0)
    _, (record,) = execute(make_plan(suite, options))
    assert (record.status, record.reason) == (Status.OK, "")
