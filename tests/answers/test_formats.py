from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from attnbench.answers.gate.decide import Decision, GateQuestion, decide
from attnbench.answers.gate.decision_table import (
    MOST_CHARACTERS,
    judged,
    table_of,
    to_action,
    to_json,
    to_junit,
    to_markdown,
    to_text,
)
from attnbench.measure.status import Status
from attnbench.results.export.tables import as_text, tables_of
from attnbench.results.measurements import load
from tests.answers.fixture_runs import Row, environment, write_run

HOSTILE = 'a | b <script>alert("x")</script> & `c` \x1b[2J \x00 *d* \ud800'.replace("\ud800", "")


@pytest.fixture
def decision(tmp_path: Path) -> Decision:
    old = [Row(n=n, error=0.5, error_std=0.01) for n in (64, 128, 256, 512)] + [Row("linear"), Row("linear", n=128)]
    new = [
        Row(n=64, seconds=1.3e-3, error=0.8, error_std=0.01),
        Row(n=128, status=Status.CRASH, reason=HOSTILE),
        replace(old[2], seconds=0.5e-3, peak=9000),
        replace(old[3], noise=0.2, drift=0.1),
        Row("linear"),
    ]
    runs = write_run(tmp_path / "new", new, seed=1), write_run(tmp_path / "old", old)
    return decide(load(runs[0]), [load(runs[1])], GateQuestion(strict=False))


def test_json_holds_every_finding_with_its_key_and_numbers(decision: Decision) -> None:
    data = json.loads(json.dumps(to_json(decision), allow_nan=False))
    assert (data["schema"], data["gate"]) == (1, "failed")
    assert data["limits"] == {"time": 1.05, "memory": 1.02, "error": 1.1, "missing": "warn", "strict": False}
    assert data["machine"] == {"class": decision.new.machine_class, "id": "cafe0001"}
    assert len(data["cells"]) == len(decision.findings)
    first = next(cell for cell in data["cells"] if cell["verdict"] == "slower")
    assert {"key", "measure", "old", "new", "ratio", "low", "high", "verdict"} <= set(first)
    assert (first["key"]["variant"], first["key"]["seq_len"], first["key"]["pass"]) == ("softmax", 64, "forward")
    assert first["ratio"] == pytest.approx(1.3, rel=0.05)
    assert sum(data["counts"].values()) == len(data["cells"])


@pytest.mark.parametrize(
    ("question", "gate", "code", "times"),
    [
        (GateQuestion(), "failed", 1, "as measured"),
        (GateQuestion(closes=False), None, 0, "as measured"),
        (GateQuestion(select="linear"), "passed", 0, "as measured"),
        (GateQuestion(relative_to="linear"), "failed", 1, "as measured, ratios over 0.999, the median ratio of linear"),
    ],
)
def test_programs_get_the_line_that_answers_how_it_was_judged_and_the_exit(
    question: GateQuestion, gate: str | None, code: int, times: str, decision: Decision
) -> None:
    found = decide(decision.new, decision.olds, question)
    data = to_json(found)
    assert (data["gate"], data["exit"], data["summary"]) == (gate, code, table_of(found).verdict)
    assert data["summary"].startswith(gate or "differs: ")
    assert data["judged"] == {
        "time": f"slower if the whole joint interval of its ratio is above 1.05; times {times}",
        "memory": "more if its ratio is above 1.02",
        "error": "more if the whole interval of its ratio is above 1.1",
        "status": "broken if it was ok before and is not now",
    }
    told = {one.get("name"): one.get("value") for one in ElementTree.fromstring(to_junit(found)).iter("property")}
    assert told == {
        "summary": data["summary"],
        "head": "; ".join(table_of(found).head),
        "exit": str(code),
        **{f"count.{verdict}": str(count) for verdict, count in data["counts"].items()},
        **{f"limit.{name}": str(value) for name, value in data["limits"].items()},
        **{f"judged.{measure}": said for measure, said in data["judged"].items()},
    }


def test_programs_are_told_of_other_versions_as_people_are(tmp_path: Path) -> None:
    abouts = {"old": environment(python="3.11.7"), "new": environment(python="3.11.9")}
    old, new = (load(write_run(tmp_path / name, [Row()], about=about)) for name, about in abouts.items())
    found = decide(new, [old], GateQuestion())
    said = "other versions now and before: python: 3.11.9 and 3.11.7"
    assert said in to_json(found)["head"]
    assert said in to_junit(found)


def test_how_times_were_judged_is_told_also_at_one_speed_and_of_another_machine(tmp_path: Path) -> None:
    def run(name: str, seed: int, processor: str = "Some Processor") -> Path:
        about = environment(processor=processor)
        return write_run(tmp_path / name, [Row(), Row("linear")], speeds=(1, 0.6), seed=seed, about=about)

    new, old = load(run("new", 1)), load(run("old", 0))
    assert judged(decide(new, [old], GateQuestion()))["time"].endswith("; times at one speed of the machine")
    assert judged(decide(new, [old], GateQuestion(as_measured=True)))["time"].endswith("; times as measured")
    other = load(run("other", 0, "Other"))
    assert judged(decide(new, [other], GateQuestion(other_machine="ratios"))) == {
        "time": "slower if the whole joint interval of its ratio is above 1.05; times each over the time of softmax"
    }


def test_a_ratio_to_nothing_is_null_and_not_infinite(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old", [Row(peak=0)]), write_run(tmp_path / "new", [Row(peak=8)])
    found = decide(load(new), [load(old)], GateQuestion(measures=("memory",)))
    assert to_json(found)["cells"][0]["ratio"] is None
    json.dumps(to_json(found), allow_nan=False)
    assert "∞" in to_text(found)


def test_junit_has_one_case_for_each_cell_of_which_the_failed_and_the_open_ones_say_so(decision: Decision) -> None:
    root = ElementTree.fromstring(to_junit(decision))
    (suite,) = root
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert {case.get("classname") for case in cases.values()} == {"s.w"}
    assert set(cases) == {f"softmax n={n}" for n in (64, 128, 256, 512)} | {"linear n=64", "linear n=128"}
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "6",
        "3",
        "0",
        "2",
    )
    (failure,) = cases["softmax n=64"]
    assert failure.tag == "failure"
    assert failure.get("type") == "slower"
    assert str(failure.get("message")).startswith("slower: 1.3")
    assert "more error: 0.8, was 0.5, ratio 1.600" in str(failure.text)
    assert str(cases["softmax n=128"][0].get("message")).startswith("broken: crash, was ok; crash: a | b <script>")
    assert cases["softmax n=512"][0].tag == cases["linear n=128"][0].tag == "skipped"
    assert len(cases["linear n=64"]) == 0


def test_markdown_leaves_foreign_text_without_any_meaning(decision: Decision) -> None:
    text = to_markdown(decision)
    assert "<script>" not in text
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {7}
    assert text.startswith(
        "### attnbench: failed: 1 broken, 1 slower, 1 with more memory, 1 with more error; 1 missing, 1 unsure\n"
    )


def test_markdown_of_thousands_of_cells_fits_a_comment_and_says_how_many_are_cut(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(n=n, seconds=None, peak=100) for n in range(1, 1501)])
    new = write_run(tmp_path / "new", [Row(n=n, seconds=None, peak=200) for n in range(1, 1501)])
    text = to_markdown(decide(load(new), [load(old)], GateQuestion()))
    assert len(text) <= MOST_CHARACTERS
    shown = sum(line.startswith("| softmax") for line in text.splitlines())
    assert f"… and {1500 - shown} more lines" in text
    assert shown > 500


def test_the_table_leaves_out_what_is_unchanged_and_counts_it(decision: Decision) -> None:
    table = table_of(decision)
    verdicts = [row[-1] for row in table.rows]
    assert verdicts[:4] == ["broken", "slower", "more memory", "more error"]
    assert set(verdicts[4:]) <= {"missing", "faster"} | {one for one in verdicts if one.startswith("unsure (+")}
    assert any(line.startswith("unchanged: ") for line in table.foot)
    assert any(line.startswith("all cells together: ") and line.endswith("(median of 4)") for line in table.foot)
    assert table.verdict == "failed: 1 broken, 1 slower, 1 with more memory, 1 with more error; 1 missing, 1 unsure"
    assert all(line.isprintable() for line in to_text(decision).splitlines())


def test_too_few_rounds_stand_in_the_first_line_of_every_form_for_people(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old", [Row()], rounds=2), write_run(tmp_path / "new", [Row()], seed=1)
    found = decide(load(new), [load(old)], GateQuestion())
    for text in (to_text(found), to_markdown(found)):
        assert text.splitlines()[0].startswith("only 2 rounds: too few")


def test_cells_that_are_new_are_counted_and_a_few_with_few_rounds_are_told(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old", [Row(), Row(n=128)])
    lost = Row(visits=(1e-3, 1e-3))
    new = write_run(tmp_path / "new", [lost, Row(n=128), Row(n=256), Row(n=512)])
    table = table_of(decide(load(new), [load(old)], GateQuestion()))
    assert table.head[0].startswith("only 2 rounds of 1 among 2 timed cells: too few")
    assert "new: 2 cells that no older run has" in table.foot
    assert table.rows == ()


def test_an_action_gets_name_unit_and_value_of_each_number_of_the_new_run(decision: Decision) -> None:
    data = to_action(decision)
    assert all(set(one) == {"name", "unit", "value", "range", "extra"} for one in data)
    assert len({one["name"] for one in data}) == len(data)
    times = {one["name"]: one for one in data if one["unit"] == "s"}
    assert set(times) == {f"{cell} time" for cell in ("softmax n=64", "softmax n=256", "softmax n=512", "linear n=64")}
    assert times["softmax n=64 time"]["value"] == pytest.approx(1.3e-3, rel=0.05)
    assert times["softmax n=64 time"]["range"].startswith("±")
    assert {one["unit"] for one in data} == {"s", "bytes", "relative error"}


def test_what_is_unsure_has_a_line_only_where_it_seems_worse_and_is_counted_otherwise(tmp_path: Path) -> None:
    def run(name: str, *medians: float) -> Path:
        rows = [
            Row(n=n, visits=tuple(middle * factor for factor in (0.8, 0.9, 1.0, 1 / 0.9, 1.25)))
            for n, middle in zip((64, 128, 256), medians, strict=True)
        ]
        return write_run(tmp_path / name, rows)

    old, new = run("old", 1.0, 1.0, 1.0), run("new", 1.2, 1.0, 0.9)
    found = decide(load(new), [load(old)], GateQuestion(measures=("time",)))
    table = table_of(found)
    assert [row[0] for row in table.rows] == ["softmax n=64"]
    assert table.foot[0].startswith("unsure: 3; to settle half of them takes ")
    highs = sorted(math.ceil(100 * (one.high or 0)) / 100 for one in found.findings)
    assert f"nothing is slower than x{highs[2]:.2f}, half of the times not than x{highs[1]:.2f}" in table.foot
    assert table.verdict.startswith("passed: nothing is worse beyond doubt; 3 unsure; 1 cell looks slower (up to 1.20 ")
    one_visit = write_run(tmp_path / "one", [Row("linear", visits=(1.0,)), *(Row(n=n) for n in (64, 128, 256))])
    with_less = decide(load(one_visit), [load(one_visit)], GateQuestion(measures=("time",)))
    assert any(line.startswith("nothing with an interval is slower than ") for line in table_of(with_less).foot)
    slower = run("slower", 3.0, 1.0, 0.9)
    besides = table_of(decide(load(slower), [load(old)], GateQuestion(measures=("time",))))
    assert any(line.startswith("nothing else is slower than ") for line in besides.foot)
    strict = table_of(decide(load(new), [load(old)], GateQuestion(measures=("time",), strict=True)))
    assert [row[0] for row in strict.rows] == ["softmax n=64", "softmax n=256", "softmax n=128"]
    assert strict.verdict == "failed: 3 unsure"


def test_an_action_gets_the_runs_own_numbers_whatever_it_is_held_against(tmp_path: Path) -> None:
    """Readings of the yardstick move judged times to one speed, which depends on the older run."""
    new = load(write_run(tmp_path / "new", [Row(), Row(n=128)], speeds=(1, 0.6)))
    olds = [
        load(write_run(tmp_path / f"old{seed}", [Row(), Row(n=128)], speeds=(1, 0.5), seed=seed)) for seed in (1, 2)
    ]
    own = {one["name"]: one["value"] for one in to_action(decide(new, [olds[0]], GateQuestion(measures=("time",))))}
    assert own == {f"softmax n={row.seq_len} time": row.time_median_s for row in new.rows.values()}
    again = to_action(decide(new, [olds[1]], GateQuestion(measures=("time",))))
    assert own == {one["name"]: one["value"] for one in again}


def test_foreign_text_calls_nobody_and_links_nowhere_in_markdown(tmp_path: Path) -> None:
    bad = "@everyone see http://evil.example, HTTPS://evil.example or www.evil.example"
    old, new = (write_run(tmp_path / name, [Row(), Row(n=128)]) for name in ("old", "new"))
    write_run(tmp_path / "broken", [Row(status=Status.ERROR, reason=bad), Row(n=128)])
    text = to_markdown(decide(load(tmp_path / "broken"), [load(old)], GateQuestion()))
    assert "everyone" in text
    tables = as_text(tables_of([replace(load(new).rows[key], label=bad) for key in load(new).rows])[0], "markdown")
    assert "everyone" in tables
    for shown in (text, tables):
        assert not re.search(r"@\w|https?://|www\.", shown, re.IGNORECASE)


def test_axes_are_named_only_where_it_takes_them_to_tell_cells_apart(tmp_path: Path) -> None:
    rows = [Row(), Row(causal=True), Row(pass_="training")]
    old, new = write_run(tmp_path / "old", rows), write_run(tmp_path / "new", rows)
    names = {one["name"] for one in to_action(decide(load(new), [load(old)], GateQuestion(measures=("time",))))}
    assert names == {"softmax n=64 forward time", "softmax n=64 forward causal time", "softmax n=64 training time"}
    both = [Row(level="layer", causal=True), Row(n=128)]  # another level, but also another length
    runs = write_run(tmp_path / "c", both), write_run(tmp_path / "d", both)
    found = decide(load(runs[0]), [load(runs[1])], GateQuestion(measures=("time",)))
    assert {one["name"] for one in to_action(found)} == {"softmax n=64 time", "softmax n=128 time"}
