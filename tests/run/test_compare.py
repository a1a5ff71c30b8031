"""Rows and verdicts from answers of a worker that is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import attnbench.attention
import attnbench.inputs  # noqa: F401  # fills the table of inputs
from attnbench.cell import Cell
from attnbench.cli.app import main
from attnbench.errors import UsageError
from attnbench.measure.time import TimingRules
from attnbench.record import Record
from attnbench.run import compare as module
from attnbench.run.compare import Comparison, compare
from attnbench.run.isolation import CellFailed, Settings
from attnbench.shape import Shape
from attnbench.spec import Spec
from attnbench.status import Status

LENGTHS = (512, 1024, 2048, 4096)
SLOPE = {"softmax": 2.0, "linear": 1.0, "sdpa": 2.0}
MIRROR = {"faster": "slower", "slower": "faster", "same": "same", "inconclusive": "inconclusive"}


class MadeUp:
    """A worker in which time is a power of n: the same samples of a variant in whatever order it is asked for."""

    noise_floor: ClassVar[float | None] = 0.0
    failing: ClassVar[CellFailed | None] = None

    def __init__(self, settings: Settings) -> None:
        self.state = {"noise_floor": self.noise_floor}

    def __enter__(self) -> MadeUp:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> dict[str, Any]:
        return self.state

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        cells = [Cell.from_json(cell) for cell in request["cells"]]
        if self.failing and len(cells) > 1:
            raise self.failing
        columns = []
        for cell in cells:
            rng = np.random.default_rng([cell.shape.N, *cell.variant.name.encode()])
            columns.append((cell.shape.N / 1500) ** SLOPE[cell.variant.name] * rng.lognormal(0, 0.02, 30))
        return {
            "records": [Record.of(cell, Status.OK).to_json() for cell in cells],
            "ran": list(range(len(cells))),
            "blocks": np.stack(columns, axis=1).tolist(),
        }


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Worker", MadeUp)


def of(*names: str, **more: Any) -> Comparison:
    cells = [Cell("s", "w", Spec(name), Shape(heads=1, seq_len=8, head_dim=4)) for name in names]
    return compare(cells, LENGTHS, Settings(), TimingRules(), **more)


def test_a_against_b_and_b_against_a_mirror_each_other_on_the_same_samples() -> None:
    one, other = of("softmax", "linear"), of("linear", "softmax")
    rows = zip(one.rows["softmax", "linear"], other.rows["linear", "softmax"], strict=True)
    for here, there in rows:
        assert here.ratio is not None
        assert there.ratio is not None
        assert here.ratio.estimate * there.ratio.estimate == pytest.approx(1, abs=1e-12)
        assert here.ratio.low * there.ratio.high == pytest.approx(1, abs=1e-12)  # type: ignore[operator]  # 30 pairs
        assert here.ratio.high * there.ratio.low == pytest.approx(1, abs=1e-12)  # type: ignore[operator]  # as above
        assert MIRROR[here.verdict] == there.verdict
        assert (here.a.time, here.b.time) == (there.b.time, there.a.time)
    assert [row.verdict for row in one.rows["softmax", "linear"]] == ["faster", "faster", "slower", "slower"]
    a, b = one.crossovers["softmax", "linear"], other.crossovers["linear", "softmax"]
    assert a.n == pytest.approx(1500, rel=0.02)
    assert (a.n, a.low, a.high) == pytest.approx((b.n, b.low, b.high), rel=1e-12)
    assert a.note == b.note


@pytest.mark.parametrize(("more", "code"), [(["--csv"], 73), (["--json", "--csv"], 73), (["--plot"], 74)])
def test_what_was_measured_is_shown_though_the_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], code: int
) -> None:
    class Described(MadeUp):
        def start(self) -> dict[str, Any]:
            return {**self.state, "process": "tuned", "process_notes": []}

    monkeypatch.setattr(module, "Worker", Described)
    taken = tmp_path / "taken.svg"
    taken.mkdir()
    assert main(["compare", "softmax", "linear", "--n", "512..1024", "--device", "cpu", *more, str(taken)]) == code
    said = capsys.readouterr()
    assert "faster" in said.out
    assert str(taken) in said.err
    assert "Is a directory" in said.err


def test_the_noise_floor_of_the_machine_decides_which_verdicts_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "noise_floor", 0.6)
    verdicts = [row.verdict for row in of("softmax", "linear").rows["softmax", "linear"]]
    assert verdicts == ["faster", "inconclusive", "inconclusive", "slower"]
    monkeypatch.setattr(MadeUp, "noise_floor", None)
    assert "inconclusive" not in [row.verdict for row in of("softmax", "linear").rows["softmax", "linear"]]


def test_a_variant_against_itself_is_compared_only_where_that_is_meant() -> None:
    with pytest.raises(UsageError, match="two or more different"):
        of("softmax", "softmax")
    rows = of("softmax", "softmax", against_itself=True).rows["softmax", "softmax"]
    assert [row.verdict for row in rows] == ["same"] * 4


def test_what_fails_only_together_is_said_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUp, "failing", CellFailed(Status.ERROR, "ClockError: the clock gave 0.0 s"))
    for row in of("softmax", "linear").rows["softmax", "linear"]:
        assert (row.a.record.status, row.ratio) == (Status.ERROR, None)
        assert row.a.record.reason == "ClockError: the clock gave 0.0 s"
        assert row.verdict == "softmax error"


def test_of_those_that_take_too_long_together_the_slowest_is_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(MadeUp):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            cells = [Cell.from_json(cell) for cell in request["cells"]]
            if len(cells) == 3 and cells[0].shape.N >= 2048:
                raise CellFailed(Status.TIMEOUT, "no answer")
            return super().ask(request, timeout)

    monkeypatch.setattr(module, "Worker", Slow)
    monkeypatch.setitem(SLOPE, "sdpa", 1.9)
    result = of("linear", "softmax", "sdpa", timeout=7)
    *_, first, longer = result.rows["linear", "softmax"]
    assert first.b.record.reason == "the slowest of those not finished together within 7 s; raise --timeout"
    assert longer.b.record.reason == "inferred: timeout at n=2048 already, so not run"
    assert [row.verdict for row in (first, longer)] == ["softmax timeout"] * 2
    assert all(row.ratio for row in result.rows["linear", "sdpa"])


def test_errors_are_not_measured_where_the_exact_answer_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_ERROR", 1024**2)
    asked = []

    class Seen(MadeUp):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            cells = [Cell.from_json(cell) for cell in request["cells"]]
            asked.extend((cell.shape.N, cell.measure) for cell in cells)
            return super().ask(request, timeout)

    monkeypatch.setattr(module, "Worker", Seen)
    shape = Shape(heads=1, seq_len=8, head_dim=4)
    cells = [Cell("s", "w", Spec(name), shape, measure=("time", "error")) for name in ("softmax", "linear")]
    assert compare(cells, LENGTHS, Settings(), TimingRules()).without_error == [2048, 4096]
    assert {n for n, measure in asked if measure == ("time", "error")} == {512, 1024}
    assert {n for n, measure in asked if measure == ("time",)} == {2048, 4096}


def test_what_takes_too_long_with_its_error_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(MadeUp):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            cells = [Cell.from_json(cell) for cell in request["cells"]]
            if cells[0].shape.N >= 2048 and "error" in cells[0].measure:
                raise CellFailed(Status.TIMEOUT, "no answer")
            return super().ask(request, timeout)

    monkeypatch.setattr(module, "Worker", Slow)
    shape = Shape(heads=1, seq_len=8, head_dim=4)
    cells = [Cell("s", "w", Spec(name), shape, measure=("time", "error")) for name in ("softmax", "linear")]
    result = compare(cells, LENGTHS, Settings(), TimingRules())
    assert result.without_error == [2048, 4096]
    assert all(row.ratio for row in result.rows["softmax", "linear"])


@pytest.mark.parametrize("status", [Status.OOM, Status.TIMEOUT])
def test_a_longer_length_of_what_ran_out_is_not_tried_and_says_so(
    monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    asked = []

    class Small(MadeUp):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            cells = [Cell.from_json(cell) for cell in request["cells"]]
            asked.extend((cell.variant.name, cell.shape.N) for cell in cells)
            if any(cell.variant.name == "softmax" and cell.shape.N >= 1024 for cell in cells):
                raise CellFailed(status, "too much")
            return super().ask(request, timeout)

    monkeypatch.setattr(module, "Worker", Small)
    result = of("softmax", "linear")
    rows = result.rows["softmax", "linear"]
    assert [row.a.record.status for row in rows] == [Status.OK, status, status, status]
    assert [row.a.record.reason for row in rows][2:] == [f"inferred: {status} at n=1024 already, so not run"] * 2
    assert [row.b.record.status for row in rows] == [Status.OK] * 4
    assert {n for name, n in asked if name == "softmax"} == {512, 1024}
    assert all(row.b.time for row in rows)
