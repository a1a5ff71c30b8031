"""What one length of a comparison may cost, with a worker and a clock that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.compare.length import Length, measure_again, measure_length
from attnbench.harness.outside.isolation import CellFailed
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

NAMES = ("softmax", "sdpa", "linear")


class Slow:
    """A worker on a clock of its own: each variant takes its seconds a call, or hangs, or dies in its turns."""

    traces = ""
    served = 0
    compiled = 0.0

    def __init__(
        self,
        *,
        hangs: tuple[str, ...] = (),
        dies: tuple[str, ...] = (),
        error: float = 0,
        own: float = 0,
        **calls: float,
    ):
        self.now = 0.0
        self.asked: list[tuple[str, tuple[str, ...], float]] = []
        self.errors: list[str] = []
        """Variants whose error was asked for."""
        self._calls, self._hangs, self._dies, self._error, self._own = calls, hangs, dies, error, own

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        cells = [Cell.from_json(cell) for cell in request.get("cells", [request.get("cell")])]
        names = tuple(cell.variant.name for cell in cells)
        self.asked.append((request["do"].rpartition(".")[2], names, timeout))
        self.errors += [
            cell.variant.name for cell in cells if request["do"].endswith("VisitCell") and "error" in cell.measure
        ]
        needs = sum(self._calls.get(name, 0.001) for name in names)
        if set(names) & set(self._hangs):
            needs = 1e9
        if request["do"].endswith("VisitCell"):
            needs = 4 * needs + self._error * ("error" in cells[0].measure)
            needs += self._own * (names[0] == "linear" and "own_error" in cells[0].measure)
        else:
            needs *= 3 + request["fewest"]
        self.now += min(needs, timeout)
        if needs > timeout:
            raise CellFailed(Status.TIMEOUT, "no answer")
        if request["do"].endswith("TakeTurns") and set(names) & set(self._dies):
            raise CellFailed(Status.CRASH, "killed")
        if request["do"].endswith("VisitCell"):
            seconds = self._calls.get(names[0], 0.001)
            return {"record": Record.of(cells[0], Status.OK, time_median_s=seconds, quick=True).to_json()}
        block = [self._calls.get(name, 0.001) for name in names]
        counts = {"disturbed": 0, "taken": 10, "stopped": 0, "others": None}
        return {"ran": list(range(len(names))), "blocks": [block] * 10, "left_out": [], **counts}


def visit(worker: Slow, *, timeout: float = 120.0, error: bool = False, names: tuple[str, ...] = NAMES) -> Length:
    measure = ("time", "memory", "error") if error else ("time", "memory")
    cells = [Cell("s", "w", Spec(name), Shape(seq_len=64), measure=measure) for name in names]
    return measure_length(
        [worker] * len(cells),  # type: ignore[list-item]  # has all of a worker that is used
        cells,
        TimingRules(),
        timeout=timeout,
        known={},
        clock=lambda: worker.now,
    )


def outcome(found: Length) -> dict[str, str]:
    return {NAMES[i]: str(record.status) for i, record in sorted(found.records.items())}


@pytest.mark.parametrize(
    "worker",
    [
        Slow(hangs=NAMES),
        Slow(hangs=("softmax",)),
        Slow(error=1000),
        Slow(error=1000, hangs=("linear",)),
        Slow(dies=NAMES, softmax=2, sdpa=2, linear=2),
        Slow(dies=("sdpa",), softmax=2, sdpa=2, linear=2),
        Slow(softmax=30, sdpa=29, linear=28),
        Slow(softmax=3, sdpa=2, linear=1),
    ],
    ids=["all hang", "one hangs", "errors take long", "both", "all die", "one dies", "all slow", "rather slow"],
)
@pytest.mark.parametrize("timeout", [1.0, 120.0])
def test_one_length_never_takes_longer_than_its_limit_whatever_fails(worker: Slow, timeout: float) -> None:
    worker.now = 0.0
    found = visit(worker, timeout=timeout, error=True)
    assert worker.now <= timeout
    assert len(found.records) == 3


class Waiting(Slow):
    """No call of a first look has a core to itself."""

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        answer = super().ask(request, timeout)
        if request["do"].endswith("VisitCell"):
            answer["record"] |= {"status": "disturbed", "reason": "its threads waited", "time_median_s": None}
        return answer


def test_a_first_look_without_a_clean_sample_leaves_the_time_to_the_turns() -> None:
    found = visit(Waiting())
    assert outcome(found) == dict.fromkeys(NAMES, "ok")
    assert found.times


def test_the_one_that_hangs_is_a_timeout_and_the_others_take_their_turns() -> None:
    found = visit(Slow(hangs=("softmax",)))
    assert outcome(found) == {"softmax": "timeout", "sdpa": "ok", "linear": "ok"}
    assert sorted(found.times[0]) == [1, 2]
    assert found.records[0].reason == "its share of 120 s is too little for a few calls; raise --timeout"


def test_a_formula_of_its_own_that_takes_too_long_takes_no_other_error_away() -> None:
    worker, measure = Slow(own=1000), ("time", "memory", "error", "own_error")
    cells = [Cell("s", "w", Spec(name), Shape(seq_len=64), measure=measure) for name in NAMES]
    found = measure_length(
        [worker] * len(cells),  # type: ignore[list-item]  # has all of a worker that is used
        cells,
        TimingRules(),
        timeout=120.0,
        known={},
        clock=lambda: worker.now,
    )
    assert found.with_error
    assert worker.errors == ["softmax", "sdpa", "linear", "linear"]  # the last one without the own error
    assert set(outcome(found).values()) == {"ok"}
    assert [found.records[i].own_error_note for i in range(2)] == ["", ""]
    assert "its formula takes too long here; a larger --timeout" in found.records[2].own_error_note


def test_errors_that_take_too_long_are_given_up_and_the_times_are_not() -> None:
    found = visit(Slow(error=1000), error=True)
    assert not found.with_error
    assert set(outcome(found).values()) == {"ok"}
    assert sorted(found.times[0]) == [0, 1, 2]


@pytest.mark.parametrize("error", [0.0, 1000.0])
def test_an_error_that_means_nothing_before_fitting_takes_no_time_and_is_still_said_to_be_one(error: float) -> None:
    worker = Slow(error=error)
    found = visit(worker, error=True, names=("linformer", "linear", "memory-compressed"))
    assert worker.errors == ["linear"]
    assert found.with_error is not bool(error)
    assert found.records[0].error_kind == "learned"
    assert found.records[2].error_kind == (None if error else "learned")
    alone = Slow(error=1000)
    assert visit(alone, error=True, names=("linformer", "memory-compressed")).with_error
    assert alone.now < 1
    assert visit(alone, names=("linformer", "memory-compressed")).records[0].error_kind is None


def test_one_that_hangs_leaves_the_others_their_errors() -> None:
    found = visit(Slow(hangs=("softmax",), error=1), error=True)
    assert found.with_error
    assert outcome(found) == {"softmax": "timeout", "sdpa": "ok", "linear": "ok"}


@pytest.mark.parametrize("slower", [0, 1])
def test_of_two_about_equally_slow_both_are_left_out_whichever_noise_made_the_slower(slower: int) -> None:
    seconds = [9.0, 9.0]
    seconds[slower] *= 1.1
    found = visit(Slow(softmax=seconds[0], sdpa=seconds[1], linear=0.01), timeout=180)
    assert outcome(found) == {"softmax": "timeout", "sdpa": "timeout", "linear": "ok"}
    assert "do not fit into its share of the time; raise --timeout" in found.records[slower].reason


def test_one_that_is_slow_is_left_out_only_where_the_others_leave_too_little_time() -> None:
    assert outcome(visit(Slow(softmax=3))) == dict.fromkeys(NAMES, "ok")
    assert outcome(visit(Slow(softmax=12))) == {"softmax": "timeout", "sdpa": "ok", "linear": "ok"}


def test_neither_a_process_that_starts_anew_nor_a_stop_of_this_one_takes_time_from_the_others() -> None:
    class Starting(Slow):
        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            self.now += 1000
            return super().ask(request, timeout)

    found = visit(Starting(hangs=("softmax",)))
    assert outcome(found) == {"softmax": "timeout", "sdpa": "ok", "linear": "ok"}
    assert sorted(found.times[0]) == [1, 2]


def test_whose_turns_together_took_too_long_is_tried_at_the_next_length_and_who_hung_is_not() -> None:
    class Slower(Slow):
        """In turns, by a factor that nobody could foresee."""

        def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
            if request["do"].endswith("TakeTurns"):
                self.now += timeout
                raise CellFailed(Status.TIMEOUT, "no answer")
            return super().ask(request, timeout)

    found = visit(Slower(hangs=("softmax",)))
    assert outcome(found) == dict.fromkeys(NAMES, "timeout")
    assert found.unsure == {1, 2}
    assert found.records[1].reason == "did not finish its turns within 120 s; raise --timeout"


def test_one_that_dies_in_its_turns_is_found_and_the_others_go_on() -> None:
    found = visit(Slow(dies=("sdpa",)))
    assert outcome(found) == {"softmax": "ok", "sdpa": "crash", "linear": "ok"}
    assert sorted(found.times[0]) == [0, 2]


def test_the_one_timed_call_of_the_first_look_does_not_stand_for_a_time() -> None:
    record = visit(Slow()).records[0]
    assert (record.time_median_s, record.quick, record.status) == (None, False, Status.OK)


def test_one_that_dies_in_a_later_process_takes_nothing_of_what_others_measured_away() -> None:
    first, later = Slow(), Slow(dies=("sdpa",))
    found = visit(first)
    cells = [Cell("s", "w", Spec(name), Shape(seq_len=64), measure=("time",)) for name in NAMES]
    measure_again([later] * 3, cells, TimingRules(), found, {0, 1}, timeout=120.0, process=1)  # type: ignore[list-item]  # as above
    assert set(outcome(found).values()) == {"ok"}
    assert [sorted(one) for one in found.times] == [[0, 1, 2], [0]]
    assert [(i, record.status, record.reason) for i, record in found.lost] == [(1, Status.CRASH, "killed")]
    assert {do for do, _, _ in later.asked} == {"TakeTurns"}  # no second look, no second error
    assert [len(one) for one in found.of_both(0, 1)] == [1, 1]
    assert [len(one) for one in found.of_both(0, 2)] == [1, 1]
