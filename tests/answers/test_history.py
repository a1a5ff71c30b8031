"""One measure over many runs: where something changed, what is left out, and how often chance looks like a change."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnbench
from attnbench.answers import history as answers
from attnbench.answers.gate.join import RowPair
from attnbench.answers.gate.verdict import Times, Tolerance, times_of
from attnbench.answers.history import CellHistory, follow, history, read_history
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import Exit, ResultsError, UsageError
from attnbench.measure.status import Status
from attnbench.results.key import key_of
from attnbench.results.measurements import MeasuredRun, Visits, load
from attnbench.results.record import Record
from attnbench.results.store import RECORDS, SAMPLES, TABLE
from attnbench.suite.cell import Cell
from tests.answers.fixture_runs import Row, environment, write_run

ALL: dict[str, Any] = {
    "variants": (),
    "select": None,
    "metric": "time",
    "above": None,
    "relative_to": None,
    "as_measured": False,
}


def folder_of(root: Path, day: int) -> Path:
    return root / "s" / f"202603{day:02}T120000Z-cpu"


def write(root: Path, *days: Sequence[Row], first: int = 1, **more: Any) -> Path:
    """A run a day."""
    for day, rows in enumerate(days, start=first):
        write_run(folder_of(root, day), rows, seed=day, **more)
    return root


def made(*seconds: float, memory: int = 4096, n: int = 64) -> list[list[Row]]:
    """Runs in which softmax takes these times, beside a cell that never changes."""
    return [[Row("softmax", n, one, peak=memory), Row("sdpa", n, 1e-3)] for one in seconds]


def changes(line: CellHistory) -> list[tuple[str, str]]:
    return [(point.run[6:8], point.change.verdict) for point in line.changes if point.change]


def test_a_change_that_lasts_is_told_at_its_run_and_only_there(tmp_path: Path) -> None:
    found = history([write(tmp_path, *made(*[1e-3] * 8, *[1.3e-3] * 4, *[1e-3] * 3))], ALL)
    softmax, sdpa = found.lines
    assert changes(softmax) == [("09", "slower"), ("13", "faster")]
    assert changes(sdpa) == []
    first = softmax.changes[0].change
    assert first
    assert first.ratio == pytest.approx(1.3, rel=0.02)
    assert first.low is not None
    assert 1.05 < first.low < 1.3
    assert found.between is not None
    assert 0 < found.between < 0.02


def test_what_was_said_of_a_run_stays_so_after_later_runs_and_its_value_is_its_own(tmp_path: Path) -> None:
    runs = made(*[1e-3] * 8, *[1.3e-3] * 4)
    write(tmp_path, *runs[:9])
    before = history([tmp_path], ALL)
    write(tmp_path, *runs[9:], first=10)
    after = history([tmp_path], ALL)
    for one, other in zip(before.lines, after.lines, strict=True):
        assert [(point.run, point.value) for point in one.points] == [
            (point.run, point.value) for point in other.points[:9]
        ]
        assert changes(one) == [change for change in changes(other) if change[0] <= "09"]
    alone = history([folder_of(tmp_path, 3), folder_of(tmp_path, 4)], ALL)
    assert alone.lines[0].values == after.lines[0].values[2:4]


def test_a_run_that_was_slow_once_is_a_change_there_and_back(tmp_path: Path) -> None:
    (softmax, _) = history([write(tmp_path, *made(*[1e-3] * 9, 2e-3, *[1e-3] * 3))], ALL).lines
    assert changes(softmax) == [("10", "slower"), ("11", "faster")]


def test_the_first_runs_get_no_verdict_and_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *made(1e-3, 1e-3, 1e-3, 3e-3))
    assert main(["history", str(tmp_path)]) == Exit.OK
    said = capsys.readouterr().out
    assert "0 of 2 cells changed" in said
    assert "no verdict on times yet: that takes 4 runs of three rounds, and one more" in said


def test_a_run_of_two_rounds_gets_no_verdict_on_times_and_it_says_so(tmp_path: Path) -> None:
    write(tmp_path, *made(*[1e-3] * 6))
    assert "no verdict" not in " ".join(history([tmp_path], ALL).foot)
    write(tmp_path, *made(3e-3), first=7, rounds=2)
    assert history([tmp_path], ALL).foot[-1] == "no verdict on 2 times of fewer than 3 rounds, the last 2026-03-07"


def test_cells_without_the_number_that_is_followed_are_counted(tmp_path: Path) -> None:
    write(tmp_path, *([Row(error=0.5), Row("sdpa")] for _ in range(2)))
    assert "1 of 2 cells have no error" in history([tmp_path], {**ALL, "metric": "error"}).foot
    assert "have no" not in " ".join(history([tmp_path], {**ALL, "metric": "memory"}).foot)


def test_memory_and_failures_change_at_the_second_run(tmp_path: Path) -> None:
    days = [*made(1e-3), *made(1e-3, memory=8192), [Row("softmax", 64, status=Status.OOM, reason="no room")]]
    write(tmp_path, *days, *made(1e-3, memory=8192))
    found = history([tmp_path], {**ALL, "metric": "memory"})
    assert changes(found.lines[0]) == [("02", "worse"), ("03", "broken"), ("04", "fixed")]
    assert found.lines[0].values == [4096, 8192, 8192]
    assert changes(history([tmp_path], {**ALL, "metric": "memory", "above": 3.0}).lines[0])[0] == ("03", "broken")


def test_a_run_that_failed_hides_no_change_of_memory(tmp_path: Path) -> None:
    failed = [Row("softmax", 64, status=Status.OOM, reason="no room")]
    write(tmp_path, *made(1e-3), failed, *made(1e-3, 1e-3, memory=8192))
    (softmax,) = history([tmp_path], {**ALL, "metric": "memory", "variants": ("softmax",)}).lines
    assert changes(softmax) == [("02", "broken"), ("03", "worse")]


@pytest.mark.parametrize("status", [Status.OOM, Status.DISTURBED])
def test_a_run_without_a_time_hides_no_change_of_the_next(tmp_path: Path, status: Status) -> None:
    lost = [Row("softmax", 64, status=status, reason="no time"), Row("sdpa", 64)]
    write(tmp_path, *made(*[1e-3] * 8), lost, *made(2e-3))
    (softmax, _) = history([tmp_path], ALL).lines
    assert changes(softmax)[-1] == ("10", "slower")


def test_a_quick_run_hides_no_change_of_the_next_and_is_none(tmp_path: Path) -> None:
    quick = [Row(name, 64, 4e-3, columns={"quick": True}) for name in ("softmax", "sdpa")]
    write(tmp_path, *made(*[1e-3] * 8), quick, *made(2e-3))
    (softmax, sdpa) = history([tmp_path], ALL).lines
    assert (changes(softmax), changes(sdpa), len(softmax.values)) == ([("10", "slower")], [], 10)


def test_what_earlier_runs_took_is_no_verdict_on_a_run_that_was_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[RowPair]()

    def spy(pairs: Sequence[RowPair], **how: Any) -> Times:
        held.extend(pairs)
        return times_of(pairs, **how)

    monkeypatch.setattr(answers, "times_of", spy)
    write(tmp_path, *([Row("softmax", 64, seconds), Row("sdpa")] for seconds in (1e-3, 1e-3, 1e-3, 2e-3, None)))
    history([tmp_path], ALL)
    assert {pair.new.variant for pair in held if pair.new and pair.times} == {"sdpa"}


def test_one_folder_whose_path_is_written_in_two_ways_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *made(*[1e-3] * 3))
    monkeypatch.chdir(tmp_path)
    olds, out = read_history([Path("s")], load(folder_of(tmp_path, 3)))
    assert ([run.name[6:8] for run in olds], out) == (["01", "02"], {})
    found = history([Path("s"), tmp_path], ALL)
    assert (len(found.runs), found.left_out) == (3, {})


def test_runs_that_are_not_comparable_are_named_with_the_reason_and_nothing_is_lost(tmp_path: Path) -> None:
    write(tmp_path, *made(*[1e-3] * 2))
    write(tmp_path, *made(1e-3), first=3, about=environment(torch="2.12.0+cpu"))
    write(tmp_path, *made(1e-3), first=4, about=environment(method=4))
    write(tmp_path, *made(1e-3), first=5, about=environment(cores=4))
    write(tmp_path, *made(*[1e-3] * 2), first=6)
    damaged = folder_of(tmp_path, 1) / "records.jsonl"
    damaged.write_text(damaged.read_text().replace("softmax", "softmix", 1))
    found = history([tmp_path], ALL)
    assert [run.name[6:8] for run in found.runs] == ["02", "06", "07"]
    why = {run[6:8]: said for run, said in found.left_out.items()}
    assert why["03"] == "torch: 2.13 and 2.12"
    assert why["04"].startswith("method_version: ")
    assert why["05"] == "cores: 2 and 4"
    assert "records.jsonl" in why["01"]


def test_a_run_without_a_yardstick_is_left_out_beside_one_that_has_it_or_all_are_as_measured(tmp_path: Path) -> None:
    write(tmp_path, *made(1e-3))
    write(tmp_path, *made(1e-3, 1e-3), first=2, speeds=(1.0, 0.5))
    found = history([tmp_path], ALL)
    assert found.how.startswith("times at the full speed")
    assert [run[6:8] for run in found.left_out] == ["01"]
    assert found.lines[0].values == pytest.approx([1e-3, 1e-3], rel=0.1)
    plain = history([tmp_path], {**ALL, "as_measured": True})
    assert (len(plain.runs), plain.how) == (3, "times as measured")


def test_times_over_another_variant_are_of_one_run_each(tmp_path: Path) -> None:
    days = [[Row("softmax", 64, 2e-3 * slow), Row("sdpa", 64, 1e-3 * slow)] for slow in (1, 1.5, 1, 2, 1, 1, 3)]
    found = history([write(tmp_path, *days)], {**ALL, "relative_to": "sdpa"})
    (line,) = found.lines
    assert line.values == pytest.approx([2.0] * 7, rel=0.05)
    assert (found.unit, changes(line)) == ("sdpa", [])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"variants": ("nobody",)}, "no cell is chosen; a cell is called"),
        ({"variants": ("softmax", "nobody")}, "-v 'nobody': no cell is chosen; a cell is called"),
        ({"select": "n999"}, "no cell is chosen; a cell is called"),
        ({"metric": "memory", "relative_to": "nobody"}, "--on memory: --relative-to and --as-measured are for times"),
        ({"metric": "error", "as_measured": True}, "--on error: --relative-to and --as-measured are for times"),
        ({"relative_to": "nobody"}, "relative-to 'nobody': .* has no time of this variant"),
    ],
)
def test_a_choice_of_nothing_names_a_cell(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    write(tmp_path, *made(1e-3), about=environment(cores=4))
    write(tmp_path, *made(1e-3, 1e-3), first=2)
    with pytest.raises(UsageError, match=said):
        history([tmp_path], {**ALL, **given})


def test_without_a_run_or_a_common_cell_it_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultsError, match="holds no run; give a folder of several runs"):
        history([tmp_path / "empty"], ALL)
    write(tmp_path, *made(1e-3))
    write(tmp_path, *made(1e-3, n=128), first=2)
    with pytest.raises(UsageError, match="no two of 2 runs have a cell in common"):
        history([tmp_path], ALL)
    with pytest.raises(ResultsError, match="mistyped: no such folder; give a folder of several runs"):
        history([tmp_path, tmp_path / "mistyped"], ALL)
    with pytest.raises(ResultsError, match="mistyped: no such folder"):
        read_history([tmp_path / "mistyped"], load(folder_of(tmp_path, 1)))


def test_the_command_prints_changes_and_json_has_every_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *made(*[1e-3] * 8, *[1.3e-3] * 3))
    drawn = tmp_path / "drawn.svg"
    assert main(["history", str(tmp_path), "--plot", str(drawn)]) == Exit.OK
    said = " ".join(capsys.readouterr().out.split())
    assert "time in 11 runs, 2026-03-01 to 2026-03-11; times as measured" in said
    assert re.search(r"2026-03-09 slower 1\.(29|30)\d \(1\.2", said)
    assert "1 of 2 cells changed; joint 95 % over all cells and runs" in said
    assert "sdpa" not in said
    text = drawn.read_text()
    assert "1 change of time in 11 runs" in text
    assert "slower on 2026-03-09" in text
    assert main(["history", str(tmp_path), "-v", "sdpa", "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert {row["label"] for row in found["points"]} == {"sdpa"}
    assert len(found["points"]) == len(found["runs"]) == 11


def test_from_python_it_is_a_table_and_a_figure(tmp_path: Path) -> None:
    found = attnbench.history(write(tmp_path, *made(1e-3, 1e-3)), metric="memory")
    assert len(found.to_frame()) == 4
    assert list(found.figures()) == ["history"]
    with pytest.raises(UsageError, match="unknown argument 'metrics'; did you mean 'metric'"):
        attnbench.history(tmp_path, metrics="time")  # type: ignore[call-arg]  # as a user may write it


def test_faults_of_a_run_outside_its_rows_are_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, *made(1e-3, 1e-3))
    table, samples = folder_of(tmp_path, 1) / TABLE, folder_of(tmp_path, 2) / SAMPLES
    table.write_text(table.read_text().replace(",4096,", ",2048,", 1))
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[1:]))
    said = [
        f"{table}:2: not what the run stored; the rows of {RECORDS} are used",
        f"{samples.parent}: the samples behind 1 of 2 rows are lost",
    ]
    for more in ([], ["--json"], ["--relative-to", "sdpa"]):
        assert main(["history", str(tmp_path), *more]) == Exit.OK
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        assert told == [f"warning: {line}" for line in said]
    with pytest.warns(UserWarning, match="stored|lost") as warned:
        attnbench.history(tmp_path)
    assert [(str(one.message), one.filename) for one in warned] == [(line, __file__) for line in said]


def test_the_gate_takes_the_comparable_runs_before_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, *made(*[1e-3] * 11))
    write(tmp_path, *made(1e-3), first=12, about=environment(cores=4))
    new = folder_of(tmp_path, 10)
    olds, out = read_history([tmp_path], load(new))
    assert [run.name[6:8] for run in olds] == [f"{day:02}" for day in range(1, 10)]
    assert [run[6:8] for run in out] == ["12"]
    assert main(["gate", str(new), "--against-history", str(tmp_path)]) == Exit.OK
    said = capsys.readouterr()
    assert "passed" in said.out
    assert "runs of one program differ by" in said.out
    assert "20260302T120000Z-cpu" in said.out  # the last eight
    assert "20260301T120000Z-cpu" not in said.out
    assert "left out: 20260312T120000Z-cpu: cores: 2 and 4" in said.err
    assert main(["gate", str(folder_of(tmp_path, 1)), "--against-history", str(tmp_path)]) == Exit.USAGE
    assert "no run before" in capsys.readouterr().err
    assert main(["gate", str(new)]) == Exit.USAGE
    assert "gate needs a run, and --against an older one" in capsys.readouterr().err


def drawn(rng: np.random.Generator, count: int, cells: int, spread: tuple[float, float, float]) -> list[MeasuredRun]:
    """Runs of one program: five visits a cell; visits, cells in a run, and runs as a whole differ by ``spread``."""
    rows = [
        Record.of(Cell("s", "w", parse_spec("softmax"), Shape(heads=1, seq_len=n, head_dim=4)), Status.OK)
        for n in range(1, cells + 1)
    ]
    runs = []
    for place in range(count):
        shared, visits = spread[2] * rng.standard_normal(), {}
        for row in rows:
            middle = shared + spread[1] * rng.standard_normal()
            seconds = {turn: math.exp(middle + spread[0] * rng.standard_normal()) for turn in range(5)}
            visits[row.cell_id] = Visits(seconds, np.zeros(2), np.zeros((2, 2)))
        runs.append(MeasuredRun(Path(), str(place), {}, "", 5, {key_of(row): row for row in rows}, {}, visits))
    return runs


@pytest.mark.parametrize("spread", [(0.05, 0.0, 0.0), (0.05, 0.05, 0.0), (0.05, 0.0, 0.05), (0.02, 0.05, 0.1)])
def test_of_runs_of_one_program_few_histories_have_a_change(spread: tuple[float, float, float]) -> None:
    """At most 5 % are promised, whatever differs between runs; the limit of 1 leaves everything to the intervals."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(20):
        lines, _between = follow(drawn(rng, 12, 4, spread), "time", Tolerance(time=1.0))
        alarms += any(line.changes for line in lines)
    assert alarms <= 3  # of 20 with 5 % each, more than 3 come by chance in 1.6 % of all tests


def test_a_graph_after_calls_of_the_host_is_no_change_at_any_run() -> None:
    """It is twenty times as fast, and the other cells show that runs of one program hardly differ."""

    def captured(run: MeasuredRun) -> MeasuredRun:
        (key, row), *_ = run.rows.items()
        visits = run.visits[row.cell_id]
        quick = replace(visits, seconds={turn: one / 20 for turn, one in visits.seconds.items()})
        graph = {key: replace(row, launched="graph")}
        return replace(run, rows={**run.rows, **graph}, visits={**run.visits, row.cell_id: quick})

    runs = drawn(np.random.default_rng(1), 12, 21, (0.01, 0.0, 0.0))
    lines, _between = follow([*runs[:8], *map(captured, runs[8:])], "time", Tolerance())
    assert not any(line.changes for line in lines)
