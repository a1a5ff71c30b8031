"""Whatever a command is told to write, no run loses a file by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from tests.answers.fixture_runs import Row, write_run
from tests.answers.machines import files

ROWS = [Row("softmax", error=1e-7), Row("linear", error=0.1)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        write_run(tmp_path / name, ROWS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ("gate new --against old --out .", Exit.CANNOT_CREATE, "cannot write .: Is a directory; name a file in it"),
        ("match --from old --error 0.5 --csv old", Exit.CANNOT_CREATE, "cannot write old: Is a directory"),
        ("export old --parquet a --samples ./a", Exit.USAGE, "a is named for two outputs"),
        ("match --from old --error 0.5 --csv a.svg --plot a.svg", Exit.USAGE, "a.svg is named for two outputs"),
        (
            "match --from old --error 0.5 --csv a.txt --plot a.svg",
            Exit.USAGE,
            "figure may replace a.txt; choose another",
        ),
        ("match --from old --error 0.5 --plot kept.svg", Exit.USAGE, "notes of the figure may replace kept.txt"),
        (
            "capture listops --text kept.txt --out ./kept.txt",
            Exit.USAGE,
            "kept.txt is read by this command",
        ),
        ("capture kept --out kept/config.json", Exit.USAGE, "kept/config.json is read by this command"),
        ("swap listops -v linear --text kept.txt --csv kept.txt", Exit.USAGE, "kept.txt is read by this command"),
        ("match --from kept.txt --error 0.5 --csv kept.txt", Exit.USAGE, "kept.txt is read by this command"),
        ("show local --picture kept.png", Exit.USAGE, "--picture kept.png: notes of the figure may replace kept.txt"),
    ],
)
def test_an_output_that_would_be_lost_is_refused_before_anything_is_done(
    words: str, code: Exit, why: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "kept.txt").write_text("as it was")
    (runs / "kept").mkdir()
    (runs / "kept" / "config.json").write_text("as it was")
    before = files(runs)
    assert main(words.split()) == code
    said = capsys.readouterr()
    assert (said.out, why in said.err, said.err.count("\n")) == ("", True, 1)
    assert files(runs) == before


@pytest.mark.parametrize(
    "words",
    [
        "gate new --against old --format json --out old/records.jsonl",
        "gate new --against old --format junit --out new/results.csv",
        "gate new --against old --out elsewhere",
        "diff old new --format markdown --out old/environment.json",
        "report old --out old/records.jsonl",
        "report old --out new/environment.json",
        "report old --out elsewhere",
        "export old --parquet old/samples.jsonl",
        "export old --samples new/samples.jsonl",
        "export old --format markdown --out old/suite.yaml",
        "match --from old --error 0.5 --csv old/results.csv",
        "match --from old --error 0.5 --csv elsewhere",
    ],
)
def test_no_output_takes_the_place_of_a_file_of_a_run_or_goes_through_a_link(
    words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "kept").write_text("as it was")
    (runs / "elsewhere").symlink_to(runs / "kept")
    before = files(runs)
    assert main(words.split()) == Exit.CANNOT_CREATE
    said = capsys.readouterr()
    assert said.out == ""
    assert "belongs to the run in" in said.err or "is a link" in said.err
    assert said.err.count("\n") == 1
    assert files(runs) == before


def test_the_figures_of_several_suites_stand_in_folders_of_their_own(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suite in ("a", "b"):
        write_run(runs / "results" / suite / "run", [Row(n=64), Row(n=128)], suite=suite)
    assert main(["plot", "results", "--format", "svg", "--out", "figures"]) == Exit.OK
    drawn = [Path(line.strip()) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert {file.parent for file in drawn} == {Path("figures/a/run"), Path("figures/b/run")}
    assert len(set(drawn)) == len(drawn)
    assert all(file.is_file() for file in drawn)
