"""Which cells of two runs are said to differ, on runs of which it is known."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnbench.answers.claims.claim_points import select
from attnbench.answers.gate.decide import Decision, GateQuestion, decide, read_runs
from attnbench.answers.gate.decision_table import table_of
from attnbench.answers.gate.phrases import address
from attnbench.answers.gate.verdict import Ruling, Tolerance
from attnbench.answers.match.budget import MeasuredSetting
from attnbench.errors import Exit, ResultsError, UsageError
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.run_identity import identity
from attnbench.measure.status import UNFINISHED, Status
from attnbench.results.manifest import FRESH
from attnbench.results.measurements import load
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite import describe
from tests.answers.fixture_runs import Row, environment, write_run

ROWS = [Row(variant, n) for variant in ("softmax", "linear", "performer:features=16") for n in (64, 128, 256)]


PLAIN = GateQuestion()


def decided(old: Path, new: Path, question: GateQuestion = PLAIN, *more: Path) -> Decision:
    first, *others = map(load, [new, old, *more])  # copies too, which commands refuse
    return decide(first, others, question)


def verdicts(decision: Decision, measure: str = "time") -> dict[tuple[str, int], str]:
    rows = [one for one in decision.findings if one.measure == measure]
    return {(one.pair.shown.label, one.pair.shown.seq_len): one.verdict for one in rows}


def only(decision: Decision, measure: str) -> Ruling:
    (found,) = [one for one in decision.findings if one.measure == measure]
    return found


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write_run(tmp_path / "old", ROWS)


def test_a_run_against_a_copy_of_itself_is_the_same_in_everything(old: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(old, tmp_path / "copy")
    decision = decided(old, copy)
    assert decision.counts() == {"same": 3 * len(ROWS)}
    assert (decision.common, decision.times, decision.passed) == (1.0, len(ROWS), True)


def test_the_order_of_samples_in_a_run_changes_nothing(old: Path, tmp_path: Path) -> None:
    permuted = RunFolder.create(tmp_path / "permuted", environment=environment(), suite_text="name: s\n")
    known = RunFolder(old)
    for cell_id, rounds in known.samples().items():
        for round_, taken in rounds.items():
            line = {"cell_id": cell_id, "round": round_, "samples": taken[::-1]}
            permuted.append("samples.jsonl", [line])
    for record in known.records().values():
        permuted.add(record)
    decision = decided(old, permuted.path)
    assert decision.counts() == {"same": 3 * len(ROWS)}
    pooled = decided(old, shutil.copytree(old, tmp_path / "copy"), GateQuestion(), permuted.path)
    assert pooled.counts() == {"same": 3 * len(ROWS)}
    assert pooled.rounds == 5


def test_two_runs_of_the_same_programs_differ_in_nothing(old: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", ROWS, seed=1)
    decision = decided(old, again)
    assert decision.counts() == {"same": 3 * len(ROWS)}
    assert decision.common == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "slower"), (0.7, "faster")])
def test_one_variant_that_takes_another_time_is_found_and_no_other(
    old: Path, tmp_path: Path, factor: float, verdict: str
) -> None:
    changed = [replace(row, seconds=1e-3 * factor) if row.variant == "linear" else row for row in ROWS]
    decision = decided(old, write_run(tmp_path / "new", changed, seed=1))
    assert {name for name, said in verdicts(decision).items() if said == verdict} == {
        ("linear", n) for n in (64, 128, 256)
    }
    assert decision.counts() == {verdict: 3, "same": 3 * len(ROWS) - 3}
    assert decision.passed is (verdict == "faster")
    assert len(decision.failures) == (3 if verdict == "slower" else 0)
    ratios = [one.ratio for one in decision.findings if one.verdict == verdict]
    assert ratios == pytest.approx([factor] * 3, rel=0.03)
    assert all(one.low < one.ratio < one.high for one in decision.findings[:3])  # type: ignore[operator]


def test_a_graph_is_never_held_against_a_call_of_the_host(tmp_path: Path) -> None:
    """Older rows, which do not say how they were launched, were launched by the host."""

    def run(name: str, seconds: float, **columns: Any) -> Path:
        return write_run(tmp_path / name, [Row("linear", seconds=seconds, columns=columns)])

    older, graph = run("older", 1e-3), run("graph", 5e-4, launched="graph")
    eager = run("eager", 1e-3, launched="eager", launch_note="it asks")
    found = only(decided(older, graph), "time")
    assert (found.verdict, found.at_risk, found.ratio) == ("unsure", False, None)
    assert found.note == "eager before, graph now: times of two things"
    assert decided(graph, eager).passed
    assert only(decided(older, eager), "time").verdict == "same"
    for olds in ((older, graph), (graph, older)):
        among = only(decided(olds[0], eager, PLAIN, olds[1]), "time")
        assert (among.verdict, len(among.pair.old_visits)) == ("same", 1)


def test_the_one_call_of_a_quick_run_is_never_held_against_the_median_of_many(tmp_path: Path) -> None:
    def run(name: str, seconds: float, **more: Any) -> Path:
        return write_run(tmp_path / name, [Row(seconds=seconds, columns=more)], seed=len(name))

    old, again, quick = run("old", 1e-3), run("again", 1e-3), run("quick", 1.5e-3, quick=True)
    found = only(decided(old, quick), "time")
    assert (found.verdict, found.ratio, found.note) == (
        "unsure",
        None,
        "eager before, --quick now: times of two things",
    )
    assert only(decided(quick, run("quick again", 1.5e-3, quick=True)), "time").verdict == "same"
    for olds in ((old, quick), (quick, old)):
        among = only(decided(olds[0], again, PLAIN, olds[1]), "time")
        assert (among.verdict, len(among.pair.old_visits)) == ("same", 1)


def test_a_verdict_on_a_time_that_is_the_hosts_says_so(tmp_path: Path) -> None:
    def run(name: str, seconds: float) -> Path:
        columns = {"launched": "eager", "device_s": 2.5e-4, "host_share": 1 - 2.5e-4 / seconds}
        return write_run(tmp_path / name, [Row("linear", visits=(seconds,) * 5, columns=columns)])

    found = only(decided(run("before", 1e-3), run("now", 2e-3)), "time")
    assert found.verdict == "slower"
    said = "eager: {} % of linear's time is the host"
    assert found.note == f"{said.format(75)}; {said.format(88)}"


def test_the_limit_decides_and_not_the_middle(old: Path, tmp_path: Path) -> None:
    """A time 6 % longer with an interval from 4 to 8 % is no failure at 5 %, and one at 3 %."""
    new = write_run(tmp_path / "new", [replace(row, seconds=1.06e-3, noise=0.02, drift=0.01) for row in ROWS], seed=1)
    at_5 = decided(old, new, GateQuestion(limits=Tolerance(time=1.05)))
    assert "unsure" in at_5.counts()
    for one in at_5.findings:
        if one.verdict == "unsure":
            assert one.low <= 1.05 < one.high  # type: ignore[operator]
            assert one.at_risk
            assert one.more_rounds is not None
            assert one.more_rounds >= 1
    at_1 = decided(old, new, GateQuestion(limits=Tolerance(time=1.0)))
    assert set(verdicts(at_1).values()) == {"slower"}
    assert not decided(old, new, GateQuestion(limits=Tolerance(time=1.05), strict=True)).passed


def around(middle: float, spread: float) -> tuple[float, ...]:
    """Five visits whose geometric mean is ``middle``."""
    return tuple(middle * (1 + spread) ** step for step in (-2, -1, 0, 1, 2))


def test_what_may_be_faster_and_cannot_be_slower_is_no_risk(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(visits=around(1.0, 0.01))])
    new = write_run(tmp_path / "new", [Row(visits=around(0.95, 0.01))])
    one = only(decided(old, new, GateQuestion(strict=True)), "time")
    assert (one.verdict, one.at_risk) == ("unsure", False)
    assert decided(old, new, GateQuestion(strict=True)).passed


def test_more_rounds_than_are_worth_it_are_not_counted(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(visits=around(1.0, 0.1))])
    new = write_run(tmp_path / "new", [Row(visits=around(1.049, 0.1))])
    assert only(decided(old, new), "time").more_rounds == 50


def test_the_number_of_rounds_that_is_asked_for_goes_with_the_square_of_the_width(tmp_path: Path) -> None:
    """Beyond the 2 % that no round takes away, half the width is to become the distance to the limit."""
    old = write_run(tmp_path / "old", [Row(visits=around(1.0, 0.08))])
    new = write_run(tmp_path / "new", [Row(visits=around(1.2, 0.08))])
    one = only(decided(old, new), "time")
    assert one.low
    half = math.log(1.2 / one.low) - math.log(1.02)
    gap = math.log(1.2 / 1.05) - math.log(1.02)
    assert one.more_rounds == round(5 * ((half / gap) ** 2 - 1)) > 0


def test_one_round_fails_no_gate_and_what_looks_slower_is_told(tmp_path: Path) -> None:
    """Two cells take half as long again: one round cannot tell, and the line that answers does not say passed."""
    rows = [replace(row, seconds=1.5e-3) if row.variant == "linear" and row.n < 256 else row for row in ROWS]
    old, new = write_run(tmp_path / "old", ROWS, rounds=1), write_run(tmp_path / "new", rows, rounds=1, seed=1)
    decision = decided(old, new)
    assert (decision.exit_code, decision.known, decision.undecided) == (Exit.OK, 0, True)
    said = table_of(decision).verdict
    start, _, rest = said.partition("1.5")
    assert start == "not known: 1 round cannot tell whether a time is worse; 9 unsure; 2 cells look slower (up to "
    assert rest.endswith(" times), not beyond doubt: measure with more --rounds, or give --strict")
    assert decided(old, new, GateQuestion(strict=True)).exit_code == Exit.FAILED


def test_intervals_of_many_cells_hold_together_and_are_wider(tmp_path: Path) -> None:
    """The interval of one cell among forty is wider than alone, for the same spread of visits."""
    old = [Row(n=n, visits=around(1.0, 0.02)) for n in range(1, 41)]
    new = [Row(n=n, visits=around(1.0, 0.02)) for n in range(1, 41)]
    many = decided(write_run(tmp_path / "old", old), write_run(tmp_path / "new", new), GateQuestion(measures=("time",)))
    few = decided(
        write_run(tmp_path / "old4", old[:4]), write_run(tmp_path / "new4", new[:4]), GateQuestion(measures=("time",))
    )
    assert (many.known, few.known) == (40, 4)
    assert many.findings[0].high > few.findings[0].high * 1.01  # type: ignore[operator]
    assert "0 of 40 comparisons slower; joint 95 % at each end of an interval" in table_of(many).foot


def test_how_runs_differ_is_learnt_from_several_old_runs_and_else_unknown(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> Path:
        place = np.random.default_rng(seed).normal(0, 0.02, 40)
        return write_run(
            tmp_path / name,
            [Row(n=n, seconds=1e-3 * math.exp(place[n - 1]), noise=0.0) for n in range(1, 41)],
            seed=seed,
        )

    new, old, older = (run(name, seed) for seed, name in enumerate(("new", "old", "older")))
    alone, both = decided(old, new), decided(old, new, GateQuestion(), older)
    assert alone.between is None
    assert "too few older runs: how runs differ is unknown, intervals 2% wider at each end" in table_of(alone).foot
    assert both.between == pytest.approx(0.02, rel=0.35)
    assert any(line.startswith("runs of one program differ by ") for line in table_of(both).foot)


def test_a_ratio_is_that_of_the_times_beside_it(old: Path, tmp_path: Path) -> None:
    slow = write_run(tmp_path / "new", ROWS, seed=1, speeds=(1.0, 0.5))
    paced = write_run(tmp_path / "paced", ROWS, seed=2, speeds=(1.0, 0.5))
    for before in (old, paced):
        times = [one for one in decided(before, slow).findings if one.measure == "time"]
        assert [one.ratio for one in times] == pytest.approx([one.new / one.old for one in times])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (4096, 4096, "same"),
        (4096, 4170, "same"),
        (4096, 4200, "worse"),
        (4096, 4000, "better"),
        (0, 0, "same"),
        (0, 1, "worse"),
    ],
)
def test_memory_is_exact_so_that_the_limit_alone_decides(tmp_path: Path, before: int, now: int, verdict: str) -> None:
    old = write_run(tmp_path / "old", [Row(peak=before)])
    new = write_run(tmp_path / "new", [Row(peak=now)])
    decision = decided(old, new)
    assert only(decision, "memory").verdict == verdict
    assert decision.passed is (verdict != "worse")


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ((0.5, 0.3), (0.5, 0.3), "same"),  # the same draws
        ((0.5, 0.005), (0.51, 0.005), "same"),
        ((0.5, 0.01), (0.6, 0.01), "worse"),
        ((0.6, 0.01), (0.5, 0.01), "better"),
        ((0.5, 0.2), (0.7, 0.2), "unsure"),  # other draws that spread too much
        ((3e-7, 0.0), (9e-7, 0.0), "same"),  # rounding
        ((1e-5, 0.0), (2e-5, 0.0), "worse"),
    ],
)
def test_an_error_is_worse_only_beyond_the_spread_of_its_draws_and_beyond_rounding(
    tmp_path: Path, before: tuple[float, float], now: tuple[float, float], verdict: str
) -> None:
    old = write_run(tmp_path / "old", [Row(error=before[0], error_std=before[1])])
    new = write_run(tmp_path / "new", [Row(error=now[0], error_std=now[1])])
    assert only(decided(old, new), "error").verdict == verdict


@pytest.mark.parametrize("draws", [2, 5, 15])
def test_gate_match_and_claims_give_an_error_one_interval(draws: int, tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(error=0.8)])
    new = write_run(tmp_path / "new", [Row(error=0.5, error_std=0.02, columns={"error_draws": draws})])
    (row,) = RunFolder(new).records().values()
    setting, ruling = MeasuredSetting.of(row.to_json()), only(decided(old, new), "error")
    (claimed,) = select(read_results(new), "rel_error", "softmax")
    assert (setting.error_low, setting.error_high) == pytest.approx((claimed.low, claimed.high))
    assert (ruling.low, ruling.high) == pytest.approx((claimed.low / 0.8, claimed.high / 0.8))


@pytest.mark.parametrize(
    ("now", "verdict"),
    [((0.5, 0.45, 0.55), "same"), ((0.4, 0.35, 0.449), "worse"), ((0.6, 0.551, 0.65), "better")],
)
def test_a_score_is_another_one_only_where_the_intervals_have_nothing_in_common(
    tmp_path: Path, now: tuple[float, float, float], verdict: str
) -> None:
    def run(name: str, score: float, low: float, high: float) -> Path:
        columns = {"score": score, "score_low": low, "score_high": high, "protocol": "fixed", "steps": 3}
        return write_run(tmp_path / name, [Row(seconds=None, peak=None, columns=columns)])

    old, new = run("old", 0.5, 0.45, 0.55), run("new", *now)
    assert only(decided(old, new, GateQuestion(measures=("score",))), "score").verdict == verdict
    assert [one.measure for one in decided(old, new).findings] == ["status"]


@pytest.mark.parametrize("status", [status for status in Status if status not in ("ok", *UNFINISHED)])
def test_what_ran_before_and_fails_now_is_broken_and_the_other_way_round_fixed(tmp_path: Path, status: Status) -> None:
    fine = write_run(tmp_path / "fine", [Row(), Row(n=128)])
    bad = write_run(tmp_path / "bad", [Row(), Row(n=128, status=status, reason="what happened")])
    broken, fixed = decided(fine, bad), decided(bad, fine)
    assert verdicts(broken, "status") == {("softmax", 64): "same", ("softmax", 128): "broken"}
    assert verdicts(fixed, "status") == {("softmax", 64): "same", ("softmax", 128): "fixed"}
    assert (broken.passed, fixed.passed) == (False, True)
    assert broken.findings[0].note == f"{status}: what happened"
    assert decided(bad, shutil.copytree(bad, tmp_path / "copy")).passed
    assert decided(fine, bad, GateQuestion(measures=("time",))).passed


def test_a_cell_that_was_interrupted_is_neither_broken_nor_fixed(tmp_path: Path) -> None:
    fine = write_run(tmp_path / "fine", [Row(), Row(n=128)])
    bad = write_run(tmp_path / "bad", [Row(), Row(n=128, status=Status.INTERRUPTED, reason="what happened")])
    for old, new, verdict in ((fine, bad, "missing"), (bad, fine, "new")):
        found = decided(old, new)
        assert verdicts(found, "status") == {("softmax", 64): "same", ("softmax", 128): verdict}
        assert found.passed


def test_a_time_that_a_busy_machine_withheld_is_open_and_the_rest_of_its_row_is_judged(tmp_path: Path) -> None:
    fine = write_run(tmp_path / "fine", [Row(), Row(n=128)])
    busy = Row(n=128, status=Status.DISTURBED, reason="it waited", columns={"peak_bytes": 8192})
    bad = write_run(tmp_path / "bad", [Row(), busy])
    for old, new, when, memory in ((fine, bad, "now", "worse"), (bad, fine, "before", "better")):
        found = decided(old, new)
        assert verdicts(found, "status") == {("softmax", 64): "same", ("softmax", 128): "same"}
        assert verdicts(found, "memory")["softmax", 128] == memory
        (time,) = [one for one in found.findings if one.measure == "time" and one.pair.shown.seq_len == 128]
        assert (time.verdict, time.ratio, time.at_risk) == ("unsure", None, True)
        assert time.note == f"withheld: the machine was busy {when}; the same command measures it anew"
        assert any(time.note in line for line in table_of(found).foot)
        assert found.fails(time) is False
        assert decided(old, new, GateQuestion(measures=("time",))).passed
        assert not decided(old, new, GateQuestion(measures=("time",), strict=True)).passed


SCORED = {"score": 0.5, "score_low": 0.45, "score_high": 0.55, "protocol": "fixed", "steps": 3}


@pytest.mark.parametrize(
    ("now", "unjudged", "said"),
    [
        (Row(status=Status.DISTURBED, columns=SCORED | {"peak_bytes": 4096, "rel_error": 0.5}), "time", "1 unsure"),
        (Row(seconds=None, error=0.5, columns=SCORED), "time", "1 with time missing"),
        (Row(peak=None, error=0.5, columns=SCORED), "memory", "1 with memory missing"),
        (Row(columns=SCORED), "error", "1 with error missing"),
        (Row(error=0.5, columns=SCORED | {"score": None}), "score", "1 with score missing"),
        (Row(error=0.5, columns=SCORED | {"score_low": None, "score_high": None}), "score", "1 with unsure score"),
    ],
)
def test_a_measure_of_which_no_number_is_left_is_not_known_and_its_old_number_is_named(
    tmp_path: Path, now: Row, unjudged: str, said: str
) -> None:
    old, new = write_run(tmp_path / "old", [Row(error=0.5, columns=SCORED)]), write_run(tmp_path / "new", [now])
    question = GateQuestion(measures=("time", "memory", "error", "score", "status"))
    decision = decided(old, new, question)
    assert (decision.exit_code, decision.undecided, decision.unjudged) == (Exit.OK, True, (unjudged,))
    assert table_of(decision).verdict == f"not known: no {unjudged} of both runs could be compared; {said}"
    (row,) = table_of(decision).rows
    assert row[-1] == said.removeprefix("1 ").removeprefix("with ")
    assert decided(old, new, replace(question, missing="fail")).passed is ("missing" not in said)
    assert decided(old, new, replace(question, strict=True)).passed is ("unsure" not in said)
    backwards = decided(new, old, question)  # a number that is new has nothing to be held against
    assert backwards.undecided is (backwards.counts().get("unsure", 0) > 0)


def test_one_number_that_is_left_is_judged_and_the_others_are_counted(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(error=0.5), Row(n=128, error=0.5)])
    new = write_run(tmp_path / "new", [Row(error=0.5), Row(n=128)], seed=1)
    decision = decided(old, new)
    assert (decision.undecided, table_of(decision).verdict) == (
        False,
        "passed: nothing is worse beyond doubt; 1 with error missing",
    )
    ignored = decided(old, new, GateQuestion(missing="ignore"))
    assert table_of(ignored).verdict == "passed: nothing is worse beyond doubt"


def test_what_neither_run_has_is_not_known_if_it_was_asked_for_by_name(old: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", ROWS, seed=1)
    assert not decided(old, new).undecided  # no row has an error, and --on does not name it alone
    for measures in (("score",), ("time", "score")):
        decision = decided(old, new, GateQuestion(measures=measures))
        assert table_of(decision).verdict == "not known: no score of both runs could be compared"
        assert (decision.exit_code, decision.unjudged) == (Exit.OK, ("score",))
    slow = write_run(tmp_path / "slow", [Row(seconds=2e-3)])
    said = table_of(decided(old, slow, GateQuestion(measures=("time", "score"), select="softmax and n64"))).verdict
    assert said == "failed: 1 slower; no score of both runs could be compared"


def test_a_cell_that_fails_now_lost_its_time_if_the_status_is_not_asked_for(tmp_path: Path) -> None:
    fine = write_run(tmp_path / "fine", [Row(), Row(n=128)])
    bad = write_run(tmp_path / "bad", [Row(), Row(n=128, status=Status.OOM, reason="no room")])
    decision = decided(fine, bad, GateQuestion(measures=("time",)))
    (lost,) = [one for one in decision.findings if one.verdict == "missing"]
    assert (lost.measure, lost.note, decision.passed) == ("time", "oom: no room", True)


@pytest.mark.parametrize(("missing", "passed", "told"), [("warn", True, 1), ("fail", False, 1), ("ignore", True, 0)])
def test_a_cell_that_is_gone_is_told_and_fails_if_that_is_wanted(
    tmp_path: Path, missing: Any, passed: bool, told: int
) -> None:
    old = write_run(tmp_path / "old", [Row(), Row(n=128)])
    new = write_run(tmp_path / "new", [Row(), Row(n=256)])
    decision = decided(old, new, GateQuestion(missing=missing))
    assert decision.passed is passed
    assert decision.counts().get("missing", 0) == told
    assert verdicts(decision, "status")[("softmax", 256)] == "new"


def test_quick_runs_are_unsure_for_lack_of_an_interval(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row()], rounds=1, samples=1)
    new = write_run(tmp_path / "new", [Row(seconds=2e-3)], rounds=1, samples=1)
    one = only(decided(old, new), "time")
    assert (one.verdict, one.at_risk, one.low, one.more_rounds) == ("unsure", True, None, None)
    assert one.ratio == pytest.approx(2, rel=0.1)


def test_fewer_than_five_rounds_are_noticed_in_either_run(tmp_path: Path) -> None:
    five, two = write_run(tmp_path / "five", ROWS), write_run(tmp_path / "two", ROWS, rounds=2)
    assert (decided(five, two).rounds, decided(two, five).few) == (2, len(ROWS))
    assert not decided(five, write_run(tmp_path / "again", ROWS)).few
    lost = [replace(ROWS[0], visits=(1e-3,)), *ROWS[1:]]
    one = decided(five, write_run(tmp_path / "lost", lost))
    assert (one.few, one.rounds, one.times) == (1, 1, len(ROWS))


def test_several_old_runs_count_as_one_with_the_rounds_of_all(tmp_path: Path) -> None:
    """An unlucky old run is outweighed: alone it would make its cell slower."""
    lucky = write_run(tmp_path / "lucky", [Row(seconds=0.85e-3)], rounds=3)
    usual = write_run(tmp_path / "usual", [Row(), Row(n=128)], rounds=6, seed=1)
    new = write_run(tmp_path / "new", [Row(), Row(n=128)], rounds=9, seed=2)
    assert only(decided(lucky, new), "time").verdict == "slower"
    decision = decided(lucky, new, GateQuestion(), usual)
    assert verdicts(decision) == {("softmax", 64): "unsure", ("softmax", 128): "same"}
    found = next(one for one in decision.findings if one.measure == "time" and one.pair.shown.seq_len == 64)
    assert found.pair.rounds == 9
    assert found.old == pytest.approx(math.sqrt(0.85) * 1e-3, rel=0.02)


def test_what_ratios_are_divided_by_is_not_surer_than_its_own_times(tmp_path: Path) -> None:
    """One cell of softmax that varies by a tenth from visit to visit makes all that is divided by it unsure."""
    old = write_run(tmp_path / "old", [Row(visits=around(1.0, 0.1)), Row("linear", visits=around(1.0, 0.001))])
    new = write_run(tmp_path / "new", [Row(visits=around(1.0, 0.1)), Row("linear", visits=around(1.2, 0.001))])
    assert verdicts(decided(old, new))[("linear", 64)] == "slower"
    assert verdicts(decided(old, new, GateQuestion(relative_to="softmax")))[("linear", 64)] == "unsure"


def test_relative_to_a_variant_takes_away_what_the_whole_machine_lost(old: Path, tmp_path: Path) -> None:
    slow = [replace(row, seconds=1e-3 * (1.3 if row.variant == "linear" else 1.1)) for row in ROWS]
    new = write_run(tmp_path / "new", slow, seed=1)
    assert decided(old, new).counts()["slower"] == len(ROWS)
    decision = decided(old, new, GateQuestion(relative_to="softmax"))
    assert decision.counts()["slower"] == 3
    assert decision.drift == pytest.approx(1.1, rel=0.02)
    assert decision.common == pytest.approx(1.1, rel=0.02)  # it is never hidden
    with pytest.raises(UsageError, match=r"--relative-to 'sofmax': no variant .* did you mean 'softmax'"):
        decided(old, new, GateQuestion(relative_to="sofmax"))


def test_on_another_machine_only_ratios_to_a_variant_are_judged(old: Path, tmp_path: Path) -> None:
    there = environment(processor="Other", threads=2)
    new = write_run(tmp_path / "new", [replace(row, seconds=3e-3, peak=9999) for row in ROWS], seed=1, about=there)
    with pytest.raises(
        UsageError, match="differ in processor: Other and Some Processor; threads: 2 and 1: measure both"
    ):
        decided(old, new)
    decision = decided(old, new, GateQuestion(other_machine="ratios"))
    assert decision.counts() == {"same": 6}
    assert decision.unit == "softmax"
    slow = [replace(row, seconds=6e-3 if row.variant == "linear" else 3e-3) for row in ROWS]
    slower = decided(old, write_run(tmp_path / "slow", slow, about=there), GateQuestion(other_machine="ratios"))
    assert {one.pair.shown.variant for one in slower.failures} == {"linear"}
    assert [one.ratio for one in slower.failures] == pytest.approx([2, 2, 2], rel=0.05)
    with pytest.raises(UsageError, match=r"--relative-to 'gla': .* has no time of this variant"):
        decided(old, new, GateQuestion(other_machine="ratios", relative_to="gla"))


def test_a_run_without_a_time_beside_the_divisor_is_named(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row()])
    new = write_run(tmp_path / "new", [Row()], about=environment(processor="Other"))
    with pytest.raises(UsageError, match=rf"--relative-to 'softmax': {new} has no other time in its circumstances"):
        decided(old, new, GateQuestion(other_machine="ratios"))


def test_the_divisor_need_not_be_among_the_cells_that_are_selected(old: Path, tmp_path: Path) -> None:
    slow = [replace(row, seconds=1.1e-3) for row in ROWS]
    new = write_run(tmp_path / "new", slow, seed=1)
    decision = decided(old, new, GateQuestion(measures=("time",), relative_to="softmax", select="linear"))
    assert decision.drift == pytest.approx(1.1, rel=0.02)
    assert (decision.counts(), decision.known) == ({"same": 3}, 6)  # the intervals are those of all six ratios
    among = decided(old, new, GateQuestion(measures=("time",), relative_to="softmax", select="linear or softmax"))
    assert {one.pair.key: one.low for one in decision.findings}.items() <= {
        one.pair.key: one.low for one in among.findings
    }.items()


def test_a_divisor_without_an_interval_decides_neither_the_drift_nor_blames_the_cells(tmp_path: Path) -> None:
    """A cell of softmax with one visit, twice as slow by chance, moves no ratio of the others."""

    def run(name: str, chance: float, *visits: float) -> Path:
        rows = [Row(n=n, visits=(chance,)) for n in (64, 128)] + [Row("linear", visits=around(1.0, 0.001))]
        return write_run(tmp_path / name, [*rows, *([Row(n=256, visits=visits)] if visits else [])])

    both = run("old", 1.0, *around(1.0, 0.001)), run("new", 2.0, *around(1.0, 0.001))
    decision = decided(*both, GateQuestion(measures=("time",), relative_to="softmax"))
    assert decision.drift == pytest.approx(1.0, rel=0.01)
    assert verdicts(decision)[("linear", 64)] == "same"
    alone = decided(run("old-1", 1.0), run("new-1", 2.0), GateQuestion(measures=("time",), relative_to="softmax"))
    (linear,) = [one for one in alone.findings if one.pair.shown.variant == "linear"]
    assert linear.note == "no interval: it takes 3 rounds of the unchanged variant in each run"


def test_a_divisor_that_varies_beyond_all_numbers_withholds_every_verdict(tmp_path: Path) -> None:
    rows = [Row(visits=(1e-12, 3e9, 1e-12)), Row("linear", visits=(1.0, 1.001, 0.999))]
    old, new = (write_run(tmp_path / name, rows) for name in ("old", "new"))
    decision = decided(old, new, GateQuestion(measures=("time",), relative_to="softmax"))
    assert set(verdicts(decision).values()) == {"unsure"}
    assert all(0 < one.low < one.ratio < one.high < math.inf for one in decision.findings)  # type: ignore[operator]


def test_another_choice_of_library_is_told_with_its_own_remedy(old: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", ROWS, about=environment(window_products="oneDNN"))
    with pytest.raises(UsageError) as refused:
        decided(old, new)
    said = "window_products: oneDNN and default: a probe chose otherwise; measure the new run again with --fresh --like"
    assert f"{said} {old}, or give --other-machine ratios" in str(refused.value)
    elsewhere = write_run(tmp_path / "elsewhere", ROWS, about=environment(window_products="oneDNN", cores=4))
    with pytest.raises(UsageError, match="measure both on one machine"):
        decided(old, elsewhere)


def test_each_kind_of_fact_has_its_remedy_if_several_differ(tmp_path: Path) -> None:
    there = environment(window_products="oneDNN", threads=2) | {"variables": {"MKL_CBWR": "AVX2"}}
    old = write_run(tmp_path / "old", ROWS, about=environment() | {"variables": {}})
    new = write_run(tmp_path / "new", ROWS, about=there)
    said = f"with --threads 1 and --fresh --like {old} and these variables as they were, or give --other-machine ratios"
    with pytest.raises(UsageError, match=f"a probe chose otherwise; measure the new run again {said}"):
        decided(old, new)
    newer = write_run(tmp_path / "newer", ROWS, about=environment(torch="2.9.1", threads=2))
    with pytest.raises(UsageError, match="with one version of torch, and measure the new run again with --threads 1"):
        decided(old, newer)


def test_numbers_of_two_methods_are_never_compared(old: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", ROWS, about=environment(method=4))
    for other_machine in ("refuse", "ratios"):
        with pytest.raises(UsageError, match="differ in method_version: 4 and 5: numbers of two methods"):
            decided(old, new, GateQuestion(other_machine=other_machine))  # type: ignore[arg-type]


def test_one_run_twice_and_runs_of_other_things_are_refused(old: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is given twice; give each run once"):
        read_runs([old, tmp_path / "x" / ".." / "old"] if (tmp_path / "x").mkdir() is None else [])
    other = write_run(tmp_path / "other", [Row("gla", n=4096)])
    with pytest.raises(ResultsError, match="have no cell in common; compare runs of the same suite"):
        decided(old, other)
    longer = write_run(tmp_path / "longer", [Row(causal=True)])
    with pytest.raises(ResultsError, match=r"have no cell in common: they differ in causal$"):
        decided(old, longer)


def test_a_selection_takes_cells_by_the_words_of_run(old: Path, tmp_path: Path) -> None:
    new = write_run(tmp_path / "new", ROWS, seed=1)
    decision = decided(old, new, GateQuestion(select="linear and not n64"))
    assert set(verdicts(decision)) == {("linear", 128), ("linear", 256)}
    with pytest.raises(UsageError, match=r"-k 'gla': no cell matches; a cell is called w/softmax/n64/operator/forward"):
        decided(old, new, GateQuestion(select="gla"))
    with pytest.raises(UsageError, match="not words with and"):
        decided(old, new, GateQuestion(select="linear and"))


@pytest.mark.parametrize(
    "cell",
    [
        Row().cell("s"),
        Row("performer:features=16", causal=True, level="layer", pass_="decode").cell("s"),
        replace(Row().cell("s"), compile=True, padding=0.5),
        replace(Row().cell("s"), shape=replace(Row().cell("s").shape, kv_len=32, bias="none")),
    ],
    ids=lambda cell: describe.address(cell),
)
def test_an_expression_sees_in_a_row_what_it_sees_in_its_cell(cell: Any) -> None:
    row = Record.of(cell, Status.OK, inputs=cell.inputs.label)
    assert address(row) == describe.address(cell)


def test_a_variant_with_a_new_option_is_held_against_itself_before_and_that_is_said(tmp_path: Path) -> None:
    def run(name: str, seconds: float, **options: object) -> Path:
        row = Row("performer", seconds=seconds, columns={"options": json.dumps(options)})
        return write_run(tmp_path / name, [row], seed=len(name))

    old = run("old", 1e-3, features=256)
    decision = decided(old, run("new", 1.3e-3, features=128, form="auto"))
    assert decision.counts() == {"slower": 1, "same": 2}
    assert decision.failures[0].note == "before: features=256, no form"


def test_older_runs_with_other_options_of_one_label_are_all_its_older_runs(tmp_path: Path) -> None:
    def run(name: str, **options: object) -> Path:
        row = Row("performer", columns={"options": json.dumps(options)})
        return write_run(tmp_path / name, [row], seed=len(name))

    before, since, new = run("old", features=256), run("older", features=128), run("newest", features=128)
    for olds in ((before, since), (since, before), (run("oldest", features=64), before)):
        decision = decided(olds[0], new, GateQuestion(measures=("time",)), olds[1])
        assert decision.counts() == {"same": 1}
        assert len(decision.findings[0].pair.old_visits) == 2


def test_the_worst_comes_first(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(), Row(n=128), Row(n=256), Row(n=512), Row(n=1024)])
    changed = [Row(seconds=1.2e-3), Row(n=128, seconds=2e-3), Row(n=256, status=Status.OOM), Row(n=512, seconds=5e-4)]
    decision = decided(old, write_run(tmp_path / "new", changed, seed=1))
    told = [(one.verdict, one.pair.shown.seq_len) for one in decision.findings if one.verdict != "same"]
    assert told == [("broken", 256), ("slower", 128), ("slower", 64), ("missing", 1024), ("faster", 512)]


def test_a_run_loaded_by_itself_can_be_decided_on_as_well(old: Path) -> None:
    """From Python nothing keeps a run from being held against itself."""
    assert decide(load(old), [load(old)], GateQuestion()).counts() == {"same": 3 * len(ROWS)}


def test_a_run_that_may_have_measured_all_rounds_in_one_process_is_named(old: Path, tmp_path: Path) -> None:
    def head(before: Path, now: Path) -> str:
        return " ".join(table_of(decided(before, now)).head)

    apart = write_run(tmp_path / "apart", ROWS, about=environment() | {FRESH: "round"})
    doubt = "old may have measured all rounds in one process"
    assert doubt in head(old, apart)
    assert doubt in head(apart, old)
    assert "in one process" not in head(old, shutil.copytree(old, tmp_path / "copy"))
    assert "in one process" not in head(apart, shutil.copytree(apart, tmp_path / "apart again"))


def test_a_run_says_with_what_a_fresh_process_begins(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("name: s\nsweeps: [{name: w, matrix: {variant: softmax, seq_len: 2}}]\n")
    assert identity(make_plan(tmp_path / "s.yaml", Options("cpu")), "id")[FRESH] == "round"
