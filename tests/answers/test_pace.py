"""Times of runs on a machine whose speed changes, held against each other by the yardstick beside each sample."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from attnbench.answers.gate.decide import GateQuestion, decide, read_runs
from attnbench.answers.gate.decision_table import to_text
from attnbench.results.validation import are_samples
from tests.answers.fixture_runs import Row, environment, write_run

ROWS = [Row("softmax" if n <= 4 else "linear", n, seconds=1e-3 * n) for n in range(1, 13)]
SPEEDS = (1.0, 0.8, 0.6)


def two(tmp_path: Path, *, slower: float = 1.0, **how: Any) -> tuple[Path, Path]:
    """Runs of the same programs; in the new one ``linear`` takes ``slower`` times as long."""
    rows = [dataclasses.replace(row, seconds=row.seconds * (slower if row.variant == "linear" else 1)) for row in ROWS]
    given = {"speeds": SPEEDS, **how}
    return write_run(tmp_path / "old", ROWS, seed=1, **given), write_run(tmp_path / "new", rows, seed=2, **given)


def verdicts(old: Path, new: Path, **question: Any) -> dict[str, int]:
    before, now = read_runs([old, new])
    return dict(decide(now, [before], GateQuestion(measures=("time",), **question)).counts())


def test_a_machine_of_changing_speed_makes_no_time_unsure(tmp_path: Path) -> None:
    old, new = two(tmp_path)
    assert verdicts(old, new) == {"same": 12}
    assert verdicts(old, new, as_measured=True) == {"unsure": 12}


def test_a_loss_of_a_fifth_is_found_although_the_speed_changes_by_two_thirds(tmp_path: Path) -> None:
    old, new = two(tmp_path, slower=1.2)
    assert verdicts(old, new) == {"slower": 8, "same": 4}


def test_a_machine_that_is_slow_all_the_time_makes_times_unsure_and_is_no_regression(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", ROWS, seed=1, speeds=[1.0])
    new = write_run(tmp_path / "new", ROWS, seed=2, speeds=[0.7])
    assert verdicts(old, new) == {"unsure": 12}  # nothing shows how much of the slow-down each cell feels
    before, now = read_runs([old, new])
    decision = decide(now, [before], GateQuestion())
    assert list(decision.paces) == [pytest.approx(0.7, rel=1e-3), 1.0]
    assert "times at the machine's full speed, of which it had 70% now and 100% before" in to_text(decision)


def test_a_torch_that_makes_everything_slower_cannot_hide_behind_the_yardstick(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", ROWS, seed=1, speeds=[1.0])
    new = write_run(tmp_path / "new", ROWS, seed=2, speeds=[0.7], about=environment(torch="2.13.1+cpu"))
    assert verdicts(old, new) == {"slower": 12}


def test_times_are_judged_as_measured_where_one_of_the_runs_read_no_yardstick(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", ROWS, seed=1)
    new = write_run(tmp_path / "new", ROWS, seed=2, speeds=[0.7])
    assert verdicts(old, new) == {"slower": 12}
    before, now = read_runs([old, new])
    assert decide(now, [before], GateQuestion()).paces == ()


def test_a_row_whose_samples_are_lost_keeps_no_other_from_one_speed(tmp_path: Path) -> None:
    """One lost line made a gate of equal programs compare eight times as measured."""
    old, new = two(tmp_path)
    file = new / "samples.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    lost = json.loads(first)["cell_id"]
    file.write_text("".join(one for one in others if json.loads(one)["cell_id"] != lost))
    assert verdicts(old, new) == {"unsure": 1, "same": 11}


def test_samples_that_waited_slightly_count_where_none_is_clean(tmp_path: Path) -> None:
    given = {"speeds": SPEEDS, "waited": 0.03}
    assert verdicts(*two(tmp_path, slower=1.2, **given)) == {"slower": 8, "same": 4}


def test_several_older_runs_are_pooled_at_one_speed(tmp_path: Path) -> None:
    old, new = two(tmp_path, slower=1.2)
    older = write_run(tmp_path / "older", ROWS, seed=3, speeds=[0.5])
    now, *before = read_runs([new, old, older])
    decision = decide(now, before, GateQuestion(measures=("time",)))
    assert decision.counts() == {"slower": 8, "same": 4}
    assert decision.rounds == 5


def test_a_program_that_feels_half_of_a_slow_down_is_known_by_its_visits(tmp_path: Path) -> None:
    """Where both runs see the same speeds the slope is fitted, and where they do not it still is no regression."""
    rows = [dataclasses.replace(row, felt=0.5) for row in ROWS]
    old = write_run(tmp_path / "old", rows, seed=1, speeds=SPEEDS)
    new = write_run(tmp_path / "new", rows, seed=2, speeds=(0.8, 0.6))
    before, now = read_runs([old, new])
    found = [one for one in decide(now, [before], GateQuestion(measures=("time",))).findings if one.ratio]
    assert len(found) == 12
    assert all(one.ratio == pytest.approx(1, abs=0.04) for one in found)
    assert {one.verdict for one in found} <= {"same", "unsure"}


@pytest.mark.parametrize("reading", [[1e-4], [1e-4, -1.0], ["a", 1e-4], 1e-4, None])
def test_a_reading_that_no_yardstick_gives_is_no_sample(reading: object) -> None:
    good = {"seconds": 1.0, "calls": 1, "switches": 0, "yardstick": [2e-4, 5e-5]}
    assert are_samples([good])
    assert not are_samples([{**good, "yardstick": reading}])
