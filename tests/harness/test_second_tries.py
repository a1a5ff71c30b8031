"""What a failed visit costs: never the numbers of the rounds before it, and no row where it is not the cell's fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from attnbench.harness.outside.isolation import CellFailed
from attnbench.harness.outside.law_requests import examine
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.instant import Listening


@pytest.fixture
def measure(tmp_path: Path, small_suite: Path) -> Callable[..., tuple[dict[str, Record], list[str]]]:
    def go(worker: Any, **options: Any) -> tuple[dict[str, Record], list[str]]:
        watcher = Listening()
        plan = make_plan(small_suite, Options("cpu", out=tmp_path / "out", threads=1, **{"rounds": 3, **options}))
        _, records = execute(plan, watcher, worker)
        return {f"{record.label}/n{record.seq_len}": record for record in records}, watcher.warnings

    return go


Failure = Callable[[Cell], CellFailed | Record]


def once(failure: Failure, label: str, *, round_: int, times: int = 1) -> Any:
    """The answer of a worker that fails so often in one round of one cell."""
    left = [times]

    def answer(cell: Cell, at: int) -> CellFailed | Record | None:
        if (cell.label, at) != (label, round_) or not left[0]:
            return None
        left[0] -= 1
        return failure(cell)

    return answer


def timeout(cell: Cell) -> CellFailed:
    return CellFailed(Status.TIMEOUT, "no answer within 60 s", ["asleep"])


@pytest.mark.parametrize(
    ("waited", "times", "status", "rounds"),
    [(0.2, 1, Status.TIMEOUT, [0]), (0.5, 1, Status.OK, [0, 0, 1, 2]), (0.5, 2, Status.DISTURBED, [0, 0])],
)
def test_a_cell_that_waited_for_a_core_until_its_limit_comes_again_from_its_first_round_and_is_no_timeout(
    instant: Any, measure: Any, waited: float, times: int, status: Status, rounds: list[int]
) -> None:
    starved = lambda cell: CellFailed(Status.TIMEOUT, "no answer within 60 s", waited=waited)  # noqa: E731  # as above
    worker = instant(once(starved, "softmax/n4", round_=0, times=times))
    row = measure(worker)[0]["softmax/n4"]
    assert row.status is status
    assert [round_ for label, round_ in worker.visits if label == "softmax/n4"] == rounds, "others measure time alone"
    kept = "no answer within 60 s, in 50% of which one of its threads waited for a core; close other programs"
    reasons = {Status.TIMEOUT: "no answer within 60 s; raise --cell-timeout", Status.OK: "", Status.DISTURBED: kept}
    assert row.reason.startswith(reasons[status])


def kill(cell: Cell) -> CellFailed:
    return CellFailed(Status.CRASH, "the measuring process was killed by SIGKILL", killed=True)


def oom(cell: Cell) -> Record:
    return Record.of(cell, Status.OOM, "no memory")


@pytest.mark.parametrize("round_", [1, 2])
def test_an_ok_row_keeps_its_numbers_when_a_later_round_fails_and_says_so(
    instant: Any, measure: Any, tmp_path: Path, round_: int
) -> None:
    worker = instant(once(timeout, "softmax/n4", round_=round_))
    rows, warnings = measure(worker)
    row = rows["softmax/n4"]
    lost = f"round {round_ + 1} failed: timeout: no answer within 60 s, raise --cell-timeout"
    assert (row.status, row.time_median_s, row.time_rounds) == (Status.OK, 4 / 7, round_)
    assert row.warnings == lost
    assert [line for line in warnings if line.startswith("softmax/n4: ")] == [
        f"softmax/n4: {lost.replace(',', ';')}; the row keeps the numbers of the rounds before"
    ]
    (file,) = (tmp_path / "out").glob("s/*/failures.jsonl")
    (failure,) = map(json.loads, file.read_text().splitlines())
    assert (failure["status"], failure["stderr"]) == ("timeout", ["asleep"])
    assert [rows[name].time_rounds for name in rows if name != "softmax/n4"] == [3, 3, 3]


def test_a_lost_round_is_tried_again_only_when_asked_for(instant: Any, measure: Any) -> None:
    measure(instant(once(timeout, "softmax/n4", round_=1)))
    again = instant()
    measure(again)
    assert again.visits == []
    rows, _ = measure(again, retry_failed=True)
    assert again.visits == [("softmax/n4", 1), ("softmax/n4", 2)]
    assert (rows["softmax/n4"].time_rounds, rows["softmax/n4"].warnings) == (3, "")


@pytest.mark.parametrize("failure", [kill, oom])
@pytest.mark.parametrize("round_", [0, 2])
def test_a_visit_that_was_killed_or_out_of_memory_is_tried_once_more_in_a_fresh_process(
    instant: Any, measure: Any, failure: Any, round_: int
) -> None:
    worker = instant(once(failure, "softmax/n2", round_=round_))
    rows, _ = measure(worker)
    assert {row.status for row in rows.values()} == {Status.OK}
    assert {row.time_rounds for row in rows.values()} == {3}
    assert not any(row.warnings for row in rows.values())
    assert worker.visits.count(("softmax/n2", round_)) == 2
    assert worker.stops == 1 + 2  # two of the three rounds begin with a fresh process


def test_after_two_kills_a_cell_is_a_crash_and_after_two_shortages_it_stands_for_the_longer_ones(
    instant: Any, measure: Any
) -> None:
    rows, _ = measure(instant(once(kill, "softmax/n2", round_=0, times=2)))
    assert rows["softmax/n2"].status is Status.CRASH
    assert rows["softmax/n2"].reason.endswith("killed by SIGKILL (twice, the second time in a fresh process)")
    assert rows["softmax/n4"].status is Status.OK
    rows, _ = measure(instant(once(oom, "softmax/n2", round_=0, times=2)), fresh=True)
    assert rows["softmax/n2"].reason == "no memory (twice, the second time in a fresh process)"
    assert rows["softmax/n4"].reason == "inferred: oom at n=2 already, so not run"


def test_a_shortage_of_memory_for_many_keys_does_not_stand_for_more_queries_of_fewer_keys(
    instant: Any, small_suite: Path, tmp_path: Path
) -> None:
    matrix = "{variant: softmax, seq_len: [2, 4], kv_len: [8, 64]}"
    small_suite.write_text(f"name: s\nsweeps: [{{name: w, matrix: {matrix}}}]\n")
    plan = make_plan(small_suite, Options("cpu", out=tmp_path / "out", threads=1))
    _, records = execute(plan, worker=instant(lambda cell, at: oom(cell) if cell.shape.M == 64 else None))
    found = {(one.seq_len, one.kv_len): (one.status, one.reason.partition(":")[0]) for one in records}
    assert found == {
        (2, 8): (Status.OK, ""),
        (4, 8): (Status.OK, ""),
        (2, 64): (Status.OOM, "no memory (twice, the second time in a fresh process)"),
        (4, 64): (Status.OOM, "inferred"),
    }


def broken(cell: Cell) -> CellFailed:
    return CellFailed(Status.ERROR, "OSError: too many open files")


def test_what_fails_behind_other_cells_is_tried_again_in_a_process_of_its_own(instant: Any, measure: Any) -> None:
    worker = instant(once(broken, "softmax/n2", round_=0))
    worker.served = 3
    rows, _ = measure(worker)
    assert {row.status for row in rows.values()} == {Status.OK}
    worker = instant(once(broken, "softmax/n2", round_=0))
    rows, _ = measure(worker, fresh=True)
    assert rows["softmax/n2"].reason == "OSError: too many open files"
    assert worker.visits.count(("softmax/n2", 0)) == 1


def late(cell: Cell) -> CellFailed:
    return CellFailed(Status.TIMEOUT, "no answer within 60 s for its timed calls")


def test_a_larger_limit_measures_again_what_took_too_long_and_an_equal_one_does_not(instant: Any, measure: Any) -> None:
    rows, _ = measure(instant(once(late, "softmax/n2", round_=0)), cell_timeout=60.0)
    assert rows["softmax/n2"].reason == "no answer within 60 s for its timed calls; raise --cell-timeout"
    assert rows["softmax/n4"].status is Status.TIMEOUT
    worker = instant()
    assert measure(worker, cell_timeout=60.0)[0] == rows
    assert worker.visits == []
    rows, _ = measure(worker, cell_timeout=61.0)
    assert {row.status for row in rows.values()} == {Status.OK}


def test_a_process_that_the_kernel_kills_for_want_of_memory_has_run_out_of_memory(instant: Any, measure: Any) -> None:
    killed: list[str] = []

    def by_the_kernel(cell: Cell) -> CellFailed:
        killed.append(cell.label)
        return CellFailed(Status.OOM, "the system killed it", killed=True)

    rows, _ = measure(instant(once(by_the_kernel, "softmax/n2", round_=0, times=2)))
    assert (rows["softmax/n2"].status, killed) == (Status.OOM, ["softmax/n2"] * 2)
    assert rows["softmax/n4"].status is Status.OOM


def test_an_answer_whose_time_is_not_that_of_its_samples_is_garbage(instant: Any, measure: Any) -> None:
    class Inventive(instant):  # type: ignore[misc]  # a fixture gives the class
        def ask(self, *args: Any, **options: Any) -> dict[str, Any]:
            answer: dict[str, Any] = super().ask(*args, **options)
            if "record" in answer:
                answer["record"]["time_median_s"] /= 2
            return answer

        def garbage(self) -> CellFailed:
            return CellFailed(Status.CRASH, "garbage")

    rows, _ = measure(Inventive())
    assert {row.status for row in rows.values()} == {Status.CRASH}


def test_other_failures_and_those_of_a_process_of_their_own_are_not_tried_again(instant: Any, measure: Any) -> None:
    worker = instant(once(timeout, "softmax/n2", round_=0))
    measure(worker)
    assert worker.visits.count(("softmax/n2", 0)) == 1
    worker = instant(once(oom, "softmax/n2", round_=0))
    measure(worker, process="as-shipped")
    assert worker.visits.count(("softmax/n2", 0)) == 1


KILLED_ONCE = """
import os, signal
from pathlib import Path
from torch import nn
from attnbench import register

@register("killed-once", family="reference", source="-", formula="-", cost="-")
class KilledOnce(nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        mark = Path(__file__).with_name("killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return v + 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a guard passes the signal on")
@pytest.mark.usefixtures("forks")
def test_a_measuring_process_that_somebody_kills_once_costs_no_row(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KILLED_ONCE)
    (tmp_path / "s.yaml").write_text("name: s\nsweeps: [{name: w, matrix: {variant: [killed-once], seq_len: 8}}]\n")
    command = [sys.executable, "-m", "attnbench", "run", "s.yaml", "--plugin", "mine.py", "--threads", "1", "--quick"]
    done = subprocess.run([*command, "--device", "cpu", "--unchecked"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    (file,) = tmp_path.glob("results/s/*/records.jsonl")
    (row,) = map(json.loads, file.read_text().splitlines())
    assert (row["status"], row["warnings"]) == ("ok", "")
    environment = json.loads(file.with_name("environment.json").read_text())
    assert set(environment["plugins"]) >= {"mine.py"}


def waiting(cell: Cell) -> Record:
    reason = "its threads waited for a core in 6 of 6 samples, for 9 s in 5 s"
    return Record.of(cell, Status.DISTURBED, reason, peak_bytes=64, time_rounds=1)


def test_a_cell_that_waited_for_a_core_is_measured_anew_at_the_end_of_the_run(instant: Any, measure: Any) -> None:
    worker = instant(once(waiting, "softmax/n4", round_=0))
    rows, warnings = measure(worker)
    assert (rows["softmax/n4"].status, rows["softmax/n4"].time_rounds) == (Status.OK, 3)
    assert worker.visits.count(("softmax/n4", 0)) == 1  # a later round had its core

    def first(cell: Cell, round_: int) -> Record | None:
        is_it = cell.label == "softmax/n4" and worker.visits.count((cell.label, round_)) == 1
        return waiting(cell) if is_it else None

    worker = instant(first)
    rows, warnings = measure(worker, fresh=True)
    assert worker.visits[-3:] == [("softmax/n4", round_) for round_ in range(3)]
    assert [line for line in warnings if "waited" in line] == [
        "1 cell waited for a core in nearly all samples: measured once more, at the end"
    ]


def test_a_cell_that_waits_again_is_disturbed_has_no_time_and_the_same_command_measures_it(
    instant: Any, measure: Any, tmp_path: Path
) -> None:
    waits = lambda cell, round_: waiting(cell) if cell.label == "softmax/n4" else None  # noqa: E731  # for one answer
    rows, warnings = measure(instant(waits))
    row = rows["softmax/n4"]
    assert (row.status, row.time_median_s, row.peak_bytes) == (Status.DISTURBED, None, 64)
    assert "6 of 6 samples" in row.reason
    assert sum("measured once more" in line for line in warnings) == 1
    assert not list((tmp_path / "out").glob("s/*/failures.jsonl"))  # the cell did not fail
    again = instant()
    rows, _ = measure(again)
    assert again.visits == [("softmax/n4", round_) for round_ in range(3)]
    assert {row.status for row in rows.values()} == {Status.OK}


def test_a_law_that_waited_for_a_core_until_its_limit_is_not_broken() -> None:
    class Starved:
        def ask(self, *_: Any, **__: Any) -> None:
            raise CellFailed(Status.TIMEOUT, "no answer within 9 s", waited=0.5)

    (finding,) = examine(cast(Any, Starved()), "softmax", ["batch"], timeout=9.0).findings
    assert (finding.held, finding.fault) == (True, "")
    assert finding.skipped == "no answer within 9 s, in 50% of which one of its threads waited for a core"
