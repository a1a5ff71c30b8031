"""``attnbench verify`` names the lines that are not as they were written, and passes those that are."""

from __future__ import annotations

import json
import lzma
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.cli.app import main
from attnbench.errors import CorruptResults
from attnbench.results.audit import audit
from attnbench.results.journal import Journal
from attnbench.results.manifest import OPENING, digest, read_manifest, write_manifest
from attnbench.results.merge import merge
from attnbench.results.read import read_results
from attnbench.results.runs import find_runs, suites_of
from attnbench.results.store import ENVIRONMENT, FILES, RECORDS, SAMPLES, SUITE, TABLE, RunFolder
from attnbench.suite.shard import Shard
from tests.answers.machines import files, measuring, state

Lines = list[bytes]


@dataclass
class Runs:
    """Two runs of one suite and their files."""

    mine: Path
    theirs: Path
    kept: dict[str, bytes]

    def restore(self) -> None:
        shutil.rmtree(self.mine)
        self.mine.mkdir()
        for name, content in self.kept.items():
            (self.mine / name).write_bytes(content)

    def change(self, name: str, how: Callable[[Lines], Lines]) -> list[str]:
        """What is found after a change of the lines of a file, without the path."""
        self.restore()
        file = self.mine / name
        file.write_bytes(b"".join(how(file.read_bytes().splitlines(keepends=True))))
        return self.found()

    def found(self) -> list[str]:
        return [line.removeprefix(f"{self.mine}/") for line in audit(self.mine).findings]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        measure = measuring(folder, patch)
        mine, theirs = measure(rounds=1), measure(rounds=1)
    return Runs(mine, theirs, files(mine))


def test_a_run_is_as_it_was_written(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.restore()
    assert (audit(runs.mine).findings, audit(runs.mine).notes) == ([], [])
    assert main(["verify", str(runs.mine)]) == 0
    line = capsys.readouterr().out
    assert re.fullmatch(rf"{runs.mine}: 8 rows as written by attnbench \S+ on \d\d\d\d-\d\d-\d\d\n", line)
    assert files(runs.mine) == runs.kept


def test_samples_that_a_cut_short_run_has_no_row_of_yet_are_as_it_wrote_them(runs: Runs) -> None:
    runs.restore()
    folder = RunFolder(runs.mine)
    with folder.lock():
        folder.append(SAMPLES, [{"cell_id": "ab", "round": 0, "samples": []}])
    found = audit(runs.mine)
    assert found.findings == []
    assert "it was not complete" in found.notes[0]


def edit(at: int) -> Callable[[Lines], Lines]:
    return lambda lines: [
        *lines[:at],
        lines[at].replace(b'"rounds": 1', b'"rounds": 2').replace(b"0.", b"1.", 1),
        *lines[at + 1 :],
    ]


def drop(*at: int) -> Callable[[Lines], Lines]:
    return lambda lines: [line for place, line in enumerate(lines) if place not in at]


def swap(a: int, b: int) -> Callable[[Lines], Lines]:
    return lambda lines: [lines[{a: b, b: a}.get(place, place)] for place in range(len(lines))]


def insert(at: int, line: bytes) -> Callable[[Lines], Lines]:
    return lambda lines: [*lines[:at], line, *lines[at:]]


@pytest.mark.parametrize("name", [RECORDS, SAMPLES])
@pytest.mark.parametrize(
    ("how", "what"),
    [
        (edit(2), [3]),
        (drop(3), ["1 line lost"]),
        (drop(0), ["1 line lost"]),
        (drop(3, 4), ["2 lines lost"]),
        (drop(7), ["1 line lost"]),
        (drop(6, 7), ["2 lines lost"]),
        (swap(2, 3), ["its lines are others, or in another order"]),
        (lambda lines: [*lines[:5], lines[2], *lines[6:]], ["its lines are others, or in another order"]),
        (insert(3, b"{}\n"), [4, "1 line added after the run was complete"]),
        (insert(8, b"{}\n"), [9, "1 line added after the run was complete"]),
        (lambda lines: [*lines, lines[2]], ["1 line added after the run was complete"]),
        (lambda lines: [*lines[:5], lines[2], *lines[5:]], ["1 line added after the run was complete"]),
        (lambda lines: [*lines[:7], lines[7][:-9]], ["8: cut short", "1 line lost"]),
    ],
    ids=[
        *("edit", "drop", "first", "two", "last", "tail", "swap", "instead"),
        *("insert", "append", "repeat-end", "repeat", "torn"),
    ],
)
def test_each_line_that_was_changed_is_named_and_others_are_counted(
    runs: Runs, name: str, how: Callable[[Lines], Lines], what: list[str | int]
) -> None:
    found = [line for line in runs.change(name, how) if re.match(rf"{re.escape(name)}:(\d| \d+ lines? | its )", line)]
    changed = "this line was changed"
    numbered = [f"{line}: {changed}" if isinstance(line, int) else line for line in what]
    assert found == [
        f"{name}:{line}" if line[:2] in "1:2:3:4:5:6:7:8:9:" else f"{name}: {line}; restore it" for line in numbered
    ]


def test_a_row_copied_from_another_run_is_named(runs: Runs) -> None:
    foreign = (runs.theirs / RECORDS).read_bytes().splitlines(keepends=True)[4]
    for at in (4, 8):
        assert f"{RECORDS}: 1 line added after the run was complete; restore it" in runs.change(
            RECORDS, insert(at, foreign)
        )


def test_an_edited_environment_or_suite_is_named(runs: Runs) -> None:
    assert runs.change(ENVIRONMENT, lambda lines: [line.replace(b"AMD", b"IBM") for line in lines]) == [
        f"{ENVIRONMENT}: it was changed after the run; restore it or start with --fresh"
    ]
    assert runs.change(SUITE, lambda lines: [*lines, b"# quick\n"])[0].startswith(f"{SUITE} is not the suite")


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write facts as somebody does who knows how the file is sealed."""
    facts = read_manifest(folder / ENVIRONMENT)
    change(facts)
    write_manifest(folder / ENVIRONMENT, facts)


def chained(facts: dict[str, Any], name: str, lines: Lines) -> Lines:
    """The lines as schema 2 has them, each with a checksum of itself and of the line before it."""
    before, found = facts[OPENING] + name, []
    for line in lines:
        row = json.loads(line)
        del row["seal"]
        before = digest(before + json.dumps(row, sort_keys=True)[:-1])
        found.append(json.dumps(row | {"seal": before}).encode() + b"\n")
    return found


@pytest.mark.parametrize(
    ("how", "what"), [(lambda lines: lines, []), (edit(2), [3]), (drop(0), [1]), (swap(2, 3), [3, 4, 5])]
)
def test_a_run_of_schema_2_is_held_to_its_chain(runs: Runs, how: Callable[[Lines], Lines], what: list[int]) -> None:
    runs.restore()
    reseal(runs.mine, lambda facts: facts.update({OPENING: "0" * 16}) or facts.pop("ends"))
    (facts, file) = read_manifest(runs.mine / ENVIRONMENT), runs.mine / SAMPLES
    file.write_bytes(b"".join(how(chained(facts, SAMPLES, file.read_bytes().splitlines(keepends=True)))))
    found = [line for line in runs.found() if line.startswith(f"{SAMPLES}:")]
    assert found == [f"{SAMPLES}:{line}: this line was changed" for line in what]


def test_a_line_of_the_table_that_no_row_gives_and_a_row_that_it_lacks_are_named(runs: Runs) -> None:
    found = runs.change(TABLE, lambda lines: [*lines[:3], lines[3].replace(b",ok,", b",oom,"), *lines[4:]])
    assert found[0] == f"{TABLE}:4: no row of {RECORDS} gives this line"
    (lost,) = runs.change(TABLE, drop(3))
    assert re.fullmatch(rf"{TABLE}: \S+ n=\d+ \(cell \w+\) is lost", lost)
    assert runs.change(TABLE, lambda lines: [b"\xff\x00\n"]) == [f"{TABLE}:1: not a table of rows"]
    runs.restore()
    (runs.mine / TABLE).unlink()
    assert runs.found() == [f"{TABLE}: it is lost; attnbench run writes it anew from {RECORDS}"]


@pytest.mark.parametrize("column", ["time_median_s", "label", "heads"])
def test_a_column_that_was_taken_out_of_the_table_is_told_and_one_that_says_nothing_is_not(
    runs: Runs, column: str
) -> None:
    runs.restore()
    rows = pd.read_csv(runs.mine / TABLE, dtype=str, keep_default_na=False)
    rows.drop(columns=column).to_csv(runs.mine / TABLE, index=False)
    assert runs.found()[0] == f"{TABLE}:2: no row of {RECORDS} gives this line"
    runs.restore()
    rows = pd.read_csv(runs.mine / TABLE, dtype=str, keep_default_na=False)
    rows.drop(columns="energy_j").to_csv(runs.mine / TABLE, index=False)
    assert runs.found() == []


def test_a_file_that_is_gone_is_named(runs: Runs) -> None:
    for name in (RECORDS, SAMPLES):
        runs.restore()
        (runs.mine / name).write_bytes(b"")
        assert runs.found()[0] == f"{name}: 8 lines lost; restore it"


def test_somebody_who_computes_all_seals_anew_is_not_found_out_while_the_run_is_not_complete(runs: Runs) -> None:
    """What the documentation says that it cannot do."""
    runs.restore()
    reseal(runs.mine, lambda facts: facts.pop("ends"))
    rows = [row | {"reason": "forged"} for row in RunFolder(runs.mine).rows(RECORDS)]
    (runs.mine / RECORDS).unlink()
    journal = Journal(runs.mine / RECORDS)
    journal.append([{name: value for name, value in row.items() if name != "seal"} for row in rows])
    journal.close()
    RunFolder(runs.mine).write_csv(list(RunFolder(runs.mine).records().values()))
    assert runs.found() == []


def test_the_command_prints_each_finding_and_ends_with_65(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.change(RECORDS, edit(3))
    assert main(["verify", str(runs.theirs), str(runs.mine)]) == 65
    said = capsys.readouterr()
    assert f"{runs.theirs}: 8 rows as written by" in said.out
    assert f"{runs.mine / RECORDS}:4: this line was changed" in said.out
    assert said.err == f"error: {runs.mine}: 1 thing is not as attnbench wrote it\n"
    assert main(["verify", "--json", str(runs.mine)]) == 65
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["rows"], len(found["findings"])) == (0, 1)
    assert main(["verify", str(runs.mine / "nothing")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_plot_warns_of_lines_that_are_lost_at_an_end_and_refuses_other_damage(runs: Runs) -> None:
    runs.restore()
    said: list[str] = []
    assert (len(read_results(runs.mine, warn=said.append)), said) == (8, [])
    runs.change(RECORDS, drop(7))
    assert len(read_results(runs.mine, warn=said.append)) == 7
    assert f"{runs.mine / RECORDS}: 1 line lost; restore it" in said
    runs.change(RECORDS, edit(3))
    with pytest.raises(CorruptResults, match=r"records\.jsonl:4"):
        read_results(runs.mine, warn=said.append)


def pack(run: Path) -> None:
    """Compress every file of a run that may be, as ``xz`` does."""
    for name in (*FILES, TABLE):
        if (run / name).exists():
            (run / f"{name}.xz").write_bytes(lzma.compress((run / name).read_bytes()))
            (run / name).unlink()


def test_a_compressed_run_is_read_as_it_was(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.restore()
    rows, samples = read_results(runs.mine), RunFolder(runs.mine).samples()
    pack(runs.mine)
    before = files(runs.mine)
    assert not {RECORDS, SAMPLES, TABLE} & before.keys()
    for named in (runs.mine, runs.mine / TABLE, runs.mine / f"{TABLE}.xz"):
        pd.testing.assert_frame_equal(read_results(named, warn=pytest.fail), rows)
    assert RunFolder(runs.mine).samples() == samples
    assert [run.path for run in find_runs(runs.mine.parent)] == [runs.mine]
    assert suites_of([runs.mine]) == suites_of([runs.theirs])
    assert (audit(runs.mine).findings, audit(runs.mine).notes, audit(runs.mine).rows) == ([], [], 8)
    assert main(["gate", str(runs.mine), "--against", str(runs.theirs)]) == 0
    assert files(runs.mine) == before, "no reader writes to a run"
    capsys.readouterr()


def test_what_is_wrong_with_a_compressed_file_is_told(runs: Runs) -> None:
    for name in (RECORDS, SAMPLES, TABLE):
        runs.restore()
        pack(runs.mine)
        file = runs.mine / f"{name}.xz"
        whole = file.read_bytes()
        file.write_bytes(whole[:-20])
        told = f"{TABLE}:1: not a table of rows" if name == TABLE else f"{name}:1: {name}.xz is damaged: "
        assert runs.found()[0].startswith(told)
        lines = lzma.decompress(whole).splitlines(keepends=True)
        file.write_bytes(lzma.compress(b"".join(lines[:-1])))
        assert runs.found(), name


def test_a_compressed_run_goes_on_as_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = measuring(tmp_path, monkeypatch)
    first = measure(fails=lambda cell: cell.variant.name == "linear")
    names = files(first).keys()
    pack(first)
    assert measure(retry_failed=True, out=first.parents[1]) == first
    assert files(first).keys() == names, "nothing compressed is left beside the files"
    assert (audit(first).findings, audit(first).notes, audit(first).rows) == ([], [], 8)


def test_a_run_that_goes_on_is_whole_again_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = measuring(tmp_path, monkeypatch)
    first = measure(fails=lambda cell: cell.variant.name == "linear")
    assert audit(first).findings == []
    again = measure(retry_failed=True, out=first.parents[1])
    assert again == first
    assert (audit(first).findings, audit(first).notes, audit(first).rows) == ([], [], 8)


def test_a_merged_run_is_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = measuring(tmp_path, monkeypatch)
    merge([measure(shard=Shard(0, 2)), measure(state(1), shard=Shard(1, 2))], tmp_path / "all")
    assert (audit(tmp_path / "all").findings, audit(tmp_path / "all").notes) == ([], [])
    file = tmp_path / "all" / RECORDS
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))
    assert f"{file}: 1 line lost; restore it" in audit(tmp_path / "all").findings


@pytest.mark.parametrize("name", ["peers-cpu", "headline-cpu", "catalogue-h200"])
def test_a_committed_run_of_an_older_attnbench_is_as_it_was_written(name: str) -> None:
    found = audit(Path(__file__).parents[2] / "results" / "reference" / name)
    assert found.findings == []
    assert found.rows > 0
    assert len(found.notes) == 1
