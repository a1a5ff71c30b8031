"""What does not compute in each timed call is an error and never a time."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.contract.plugins.discovery import load
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import BrokenContract
from attnbench.harness.inside import execute, pairs
from attnbench.harness.inside.call import Call, prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.inside.fresh_inputs import hold_to, hold_to_unseen, look
from attnbench.harness.inside.pairs import measure_pairs
from attnbench.harness.inside.turns import SEEN, UNSEEN, MemoryWindows
from attnbench.harness.outside.visit import HoldSetting
from attnbench.harness.wire.protocol import TakeTurns, VisitCell
from attnbench.laws import check_variant, first_fault, setting_of
from attnbench.measure.status import Status
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, Level, Pass

QUICK = TimingRules(quick=True)
SHORT = TimingRules(min_time=0.02, max_time=0.1, warmup_time=0.02)

PLUGIN = str(Path(__file__).with_name("cheats.py"))


@pytest.fixture(scope="module", autouse=True)
def _cheats() -> None:
    load(PLUGIN)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    """As in a process of its own."""
    cheats = sys.modules[VARIANTS.get("cheat-honest").make.__module__]
    cheats.EVERYWHERE.clear()
    cheats.LAST.clear()
    cheats.COUNTED[0] = 0
    cheats.StaleGradient.kept = None


def measure(variant: str, rules: TimingRules, *, pass_: Pass = "forward", level: Level = "operator") -> Record:
    shape = Shape(heads=2, seq_len=384, head_dim=32)
    cell = Cell("s", "w", parse_spec(variant), shape, pass_=pass_, level=level)
    return run_cell(VisitCell(cell, rules))[0]


def test_a_cheat_that_knows_the_objects_that_it_is_given_is_an_error() -> None:
    record = measure("cheat-id", SHORT)
    assert (record.status, record.time_median_s) == (Status.ERROR, None)


@pytest.mark.parametrize("rules", [QUICK, SHORT], ids=["quick", "full"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pointer", "it keeps results: inputs that it has not seen take"),
        ("value", "it keeps results: inputs that it has not seen take"),
        ("count", "it "),  # whatever is found first
        ("count-of-all", "it "),
        ("garbage", "it "),
        ("buffer", "it "),
        ("lazy", "it breaks the contract: it returns a Later, not a torch.Tensor"),
        ("thread", "it gives other numbers while it is timed: it does not compute in each call"),
        ("zeros", "it gives other numbers while it is timed: it does not compute in each call"),
    ],
)
def test_a_cheat_is_an_error_with_the_way_in_which_it_cheats(name: str, reason: str, rules: TimingRules) -> None:
    record = measure(f"cheat-{name}", rules)
    assert (record.status, record.time_median_s) == (Status.ERROR, None)
    assert record.reason.startswith(reason)


@pytest.mark.parametrize("before", [0, 1])
def test_a_cheat_that_computes_in_every_second_call_is_found_whichever_call_one_looks_at(before: int) -> None:
    cell = Cell("s", "w", parse_spec("cheat-buffer"), Shape(heads=2, seq_len=64, head_dim=8))
    call = prepare(cell)
    looks = [look(call.on(number)()) for number in range(SEEN)]
    for _ in range(before):
        call.run()

    def look_on() -> None:
        number, unseen, _ = hold_to_unseen(cell, call, WallClock(), 1e-4, looks)
        hold_to(unseen, prepare(cell).on(number), cell)

    with pytest.raises(BrokenContract, match="while it is timed: it does not compute in each call"):
        look_on()


@pytest.mark.parametrize(
    "name", ["id", "pointer", "value", "count", "count-of-all", "garbage", "buffer", "lazy", "thread", "zeros"]
)
def test_a_cheat_that_takes_turns_is_left_out_with_its_reason_and_the_other_has_its_times(name: str) -> None:
    shape = Shape(heads=2, seq_len=384, head_dim=32)
    cells = [Cell("s", "w", parse_spec(f"cheat-{one}"), shape) for one in (name, "honest")]
    found = measure_pairs(cells, SHORT, fewest=6)
    ((place, status, reason),) = found.left_out
    assert (place, status, reason[:3]) == (0, "error", "it ")
    assert found.ran == [1]
    assert {len(block) for block in found.blocks} == {1}


def test_what_computes_another_formula_is_stopped_by_its_laws_before_its_turns() -> None:
    _, fault = first_fault(setting_of(parse_spec("cheat-other"), causal=False), lambda done, of: None)
    assert fault is not None
    assert fault.law == "formula"


@pytest.mark.usefixtures("forks")
def test_a_cheat_that_a_user_compares_gets_no_ratio_and_its_reason_is_told() -> None:
    what = ["cheat-honest", "cheat-pointer", "--n", "384", "--heads", "2", "--no-error", "--min-time", "0.02"]
    command = [
        sys.executable,
        "-m",
        "attnbench",
        "compare",
        *what,
        "--threads",
        "1",
        "--plugin",
        PLUGIN,
        "--json",
        "--unchecked",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["a_status"], row["b_status"], row["ratio"]) == ("ok", "error", None), done.stderr
    assert row["b_reason"].startswith("it keeps results")


class BusyMachine:
    """A clock on which a call of a millisecond takes thirty as often as not, since other programs have the cores."""

    def __init__(self, seed: int) -> None:
        self._draw, self.working = random.Random(seed), True

    def cost(self) -> float:
        return 1e-7

    def meets(self, number: int) -> None:
        """A call on the inputs of this number."""

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        self.working = False
        for _ in range(calls):
            call()
        quick = 1e-3 if self.working else 1e-6
        return calls * quick * (30 if self._draw.random() < 0.7 else 1), 0


def held(watch: BusyMachine, seed: int, *, keeps: bool) -> str | None:
    """What is said of a program which takes its time on each input, or only on those that it has not seen."""

    def on(number: int) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            watch.working |= number >= SEEN or not keeps
            watch.meets(number)
            return torch.full((4,), float(number))

        return call

    call = Call(run=on(0), on=on, input_bytes=0, param_bytes=0)
    cell = Cell("s", "w", parse_spec("softmax"), Shape(seq_len=8), seed=seed)
    seen = [look(on(i)()) for i in range(SEEN)]
    return hold_to_unseen(cell, call, watch, 1e-3 if not keeps else 1e-6, seen)[2]


def accused(seed: int, *, keeps: bool) -> bool:
    """Whether it is on a busy machine."""
    try:
        held(BusyMachine(seed), seed, keeps=keeps)
    except BrokenContract:
        return True
    return False


class Paged(BusyMachine):
    """A quiet machine on which each call on new inputs gets some pages of memory, for 30 microseconds."""

    def __init__(self, call: float, new: float) -> None:
        super().__init__(0)
        self._call, self._new, self.fresh = call, new, False

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        self.fresh = False
        for _ in range(calls):
            call()
        return calls * (self._new if self.fresh else self._call), 0

    def meets(self, number: int) -> None:
        self.fresh |= number >= SEEN


def test_pages_of_memory_are_no_kept_results() -> None:
    assert held(Paged(10e-6, 40e-6), 0, keeps=False) is None
    with pytest.raises(BrokenContract, match=r"take 4\.0 times as long as others"):
        held(Paged(1e-3, 4e-3), 0, keeps=False)


class Unlucky(BusyMachine):
    """The other programs have the cores whenever inputs are new, and every second time otherwise."""

    new, known = False, 0

    def time(self, call: Callable[[], object], calls: int) -> tuple[float, int]:
        self.new = False
        for _ in range(calls):
            call()
        self.known += not self.new
        return calls * 1e-3 * (30 if self.new or self.known % 2 == 0 else 1), 0

    def meets(self, number: int) -> None:
        self.new |= number >= SEEN


def test_who_could_not_be_cleared_on_a_busy_machine_is_said_to_be_unchecked() -> None:
    told = "too busy to tell whether it keeps results; measure it again on a quiet machine"
    assert {held(Unlucky(seed), seed, keeps=False) for seed in range(20)} == {told}
    assert held(BusyMachine(0), 0, keeps=False) is None


def test_a_variant_alone_that_keeps_results_leaves_its_reason_and_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def accuse(*_: object) -> None:
        raise BrokenContract("it keeps results")

    monkeypatch.setattr(pairs, "hold_to_unseen", accuse)
    request = TakeTurns([Cell("s", "w", parse_spec("cheat-honest"), Shape(seq_len=8))], QUICK, 2)
    found = request.answered(asdict(measure_pairs(request.cells, QUICK, fewest=2)))
    assert (found.ran, found.blocks, [why for _, _, why in found.left_out]) == ([], [], ["it keeps results"])


def test_a_row_that_could_not_be_cleared_carries_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "too busy to tell whether it keeps results; measure it again on a quiet machine"
    asked = lambda cell, call, *_: (SEEN, look(call.on(SEEN)()), told)  # noqa: E731  # as hold_to_unseen answers
    monkeypatch.setattr(execute, "hold_to_unseen", asked)
    monkeypatch.setattr(pairs, "hold_to_unseen", asked)
    assert told in measure("cheat-honest", QUICK).warnings
    cells = [Cell("s", "w", parse_spec("cheat-honest"), Shape(seq_len=8)) for _ in range(2)]
    assert measure_pairs(cells, QUICK, fewest=2).warnings == [(0, told), (1, told)]


def test_on_a_busy_machine_nobody_is_accused_of_keeping_results_but_who_does() -> None:
    assert not any(accused(seed, keeps=False) for seed in range(50))
    assert all(accused(seed, keeps=True) for seed in range(15))


@pytest.mark.parametrize("pass_", ["training", "backward"])
def test_a_cheat_in_the_gradient_is_an_error(pass_: Pass) -> None:
    record = measure("cheat-backward", SHORT, pass_=pass_)
    assert (record.status, record.time_median_s) == (Status.ERROR, None)


@pytest.mark.parametrize("level", ["operator", "layer"])
@pytest.mark.parametrize("pass_", ["forward", "training", "backward"])
def test_what_computes_is_ok_without_a_word(pass_: Pass, level: Level) -> None:
    record = measure("cheat-honest", QUICK, pass_=pass_, level=level)
    assert (record.status, record.reason) == (Status.OK, "")
    assert "call to call" not in record.warnings


def test_who_computes_something_else_than_its_formula_is_refused_before_it_is_measured() -> None:
    request = HoldSetting(Cell("s", "w", parse_spec("cheat-other"), Shape(heads=2, seq_len=384, head_dim=32)))
    verdict = request.answered({"found": request.found(lambda *_: None)})
    assert (verdict.status, verdict.laws) == (Status.ERROR, "formula")


@pytest.mark.parametrize("level", ["operator", "layer"])
def test_who_rounds_otherwise_than_the_formula_is_ok(level: Level) -> None:
    record = measure("cheat-rounded", QUICK, level=level)
    assert (record.status, record.reason) == (Status.OK, "")


def test_who_computes_in_float32_whatever_it_is_given_is_held_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(Softmax):
        def forward(self, *inputs: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(*(x.float() for x in inputs), key_mask=key_mask).to(inputs[0].dtype)

    whole = VARIANTS.get("softmax")
    monkeypatch.setitem(VARIANTS._entries, "softmax", replace(whole, make=Single))
    cell = Cell("s", "w", parse_spec("softmax"), Shape(heads=2, seq_len=384, head_dim=32))
    assert not check_variant("softmax", laws=["formula"]).held
    found = HoldSetting(cell).found(lambda *_: None)
    assert found["fault"] is None, found["fault"]
    assert found["tried"] > 50


def test_what_draws_in_each_call_is_measured_and_said_to_be_unchecked() -> None:
    record = measure("cheat-dice", QUICK)
    assert record.status is Status.OK
    assert "its numbers change from call to call" in record.warnings


@pytest.mark.usefixtures("forks")
def test_a_cheat_that_a_user_runs_is_a_row_with_its_reason(tmp_path: Path) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "name: s\nmin_time: 0.02\nsweeps: [{name: w, matrix: {variant: [cheat-honest, cheat-pointer],"
        " seq_len: 384, heads: 2, head_dim: 32}}]\n"
    )
    command = [sys.executable, "-m", "attnbench", "run", str(suite), "--plugin", PLUGIN, "--out", str(tmp_path / "out")]
    command.append("--unchecked")  # it would be found by its laws as well
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (table,) = (tmp_path / "out").rglob("results.csv")
    with table.open(newline="") as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert (rows["cheat-honest"]["status"], rows["cheat-pointer"]["status"]) == ("ok", "error"), done.stderr
    assert rows["cheat-pointer"]["reason"].startswith("it keeps results")
    assert not rows["cheat-pointer"]["time_median_s"]


def windows(x: torch.Tensor, tokens: int = -2) -> MemoryWindows:
    return MemoryWindows.into(
        x, lambda count: torch.randn(count, generator=torch.Generator().manual_seed(1)), tokens=tokens
    )


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("heads_inside", [False, True])
def test_inputs_that_take_turns_differ_everywhere_and_share_their_memory(n: int, heads_inside: bool) -> None:
    x = torch.randn(2, 3, n, 8)
    if heads_inside:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    made = windows(x)
    assert torch.equal(made.at(0), x)
    each = [made.at(number) for number in range(SEEN + UNSEEN)]
    for one in each:
        assert (one.shape, one.stride()) == (x.shape, x.stride() if n > 1 else one.stride())
        assert one.untyped_storage().data_ptr() == made.memory.untyped_storage().data_ptr()
        assert (one.data_ptr() - each[0].data_ptr()) % 64 == 0
    for i, one in enumerate(each):
        assert all(bool((one != other).all()) for other in each[:i])


def test_turns_add_little_memory_where_memory_counts() -> None:
    x = torch.randn(1, 4, 8192, 16)
    assert windows(x).memory.nbytes < 1.05 * x.nbytes
    assert windows(x).memory.nbytes == pytest.approx(x.nbytes * (1 + 1 / 8 / 4), rel=0.001)


@pytest.mark.parametrize("pass_", ["forward", "training", "backward", "decode"])
@pytest.mark.parametrize("level", ["operator", "layer", "model"])
def test_calls_take_turns_and_the_same_number_gives_the_same(pass_: Pass, level: Level) -> None:
    if (level, pass_) == ("model", "decode"):
        return
    shape = Shape(heads=2, seq_len=24, head_dim=4)
    cell = Cell("s", "w", parse_spec("softmax"), shape, level=level, pass_=pass_)
    call = prepare(cell)
    got = [look(call.run()) for _ in range(4)]
    for number, one in enumerate(got):
        assert torch.equal(one, look(call.on(number % SEEN)()))
    unseen = [look(call.on(number)()) for number in range(SEEN, SEEN + 3)]
    every = [*got[:SEEN], *unseen]
    assert not any(torch.equal(one, other) for i, one in enumerate(every) for other in every[:i])


def test_what_one_looks_at_are_the_same_few_numbers_of_each_tensor() -> None:
    x, y = torch.randn(100, 100), torch.arange(3.0)
    seen = look((x, None, y))
    assert torch.equal(seen, look((x.clone(), None, y.clone())))
    assert len(seen) == 2 * 1024
    assert set(seen[1024:].tolist()) <= {0.0, 1.0, 2.0}
    assert not torch.equal(seen, look((x + 1, None, y)))


def test_a_look_needs_neither_a_copy_of_the_output_nor_the_modules_of_a_compiler() -> None:
    x = torch.randn(7, 30, 11)
    assert torch.equal(look(x.transpose(0, 2)), look(x.transpose(0, 2).contiguous()))
    fresh = "import sys, torch, attnbench.harness.inside.fresh_inputs as f; f.look(torch.ones(4, 6).t())"
    subprocess.run([sys.executable, "-c", f"{fresh}; assert 'sympy' not in sys.modules"], check=True)
