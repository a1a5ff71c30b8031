"""``attnbench.swap``: the command as a function."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import attnbench
from attnbench.cli.app import main
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Exit, UsageError
from tests.models.pretrained import models
from tests.models.pretrained.test_swap import forget

pytestmark = pytest.mark.usefixtures("forks")
QUICK = {"length": 24, "windows": 6, "device": "cpu", "threads": 1, "progress": False}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnbench.models.pretrained.models.OwnEncoder", models.tiny)
    forget()


def test_it_gives_the_rows_of_the_command_which_finds_them_again(capsys: pytest.CaptureFixture[str]) -> None:
    found = attnbench.swap("listops", "local:window=8", layers="all,each", steps=[0, 2], **QUICK)
    frame = found.to_frame()
    labels = [label for label in ("none", "mean-value", "local:window=8") for _ in range(2)]
    assert list(frame.loc[frame["replaced"] == "all", "label"]) == ["sdpa", *labels]
    assert (frame["status"] == "ok").all()
    assert capsys.readouterr() == ("", "")
    words = ["swap", "listops", "-v", "local:window=8", "--layers", "all,each", "--steps", "0,2", "--csv", "rows.csv"]
    few = ["--length", "24", "--windows", "6", "--device", "cpu", "--threads", "1"]
    assert main([*words, *few]) == Exit.OK
    assert f"resuming {found.folder}: " in capsys.readouterr().err
    with Path("rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(frame.columns)
    assert [float(row["loss"]) for row in rows] == pytest.approx(list(frame["loss"]))


def test_it_shows_a_table_and_draws_the_figure_of_the_command() -> None:
    found = attnbench.swap("listops", "local:window=8", layers="each", **QUICK)
    assert repr(found).splitlines()[0].split()[:3] == ["label", "replaced", "tuned"]
    assert found._repr_html_().count("<tr") == 1 + len(found.rows)
    figures = found.figures()
    assert isinstance(figures["swap"], Figure)
    assert "<img" in figures._repr_html_()


def test_steps_may_be_one_number_a_list_or_text() -> None:
    rows = [attnbench.swap("listops", "identity", steps=steps, **QUICK).rows for steps in (2, [2], "2")]
    assert rows[0] == rows[1] == rows[2]
    assert {row.tuned for row in rows[0] if row.sweep != "exact"} == {2}


def test_a_session_only_class_and_no_variant_at_all_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="swap needs a variant; for example: "):
        attnbench.swap("listops", **QUICK)
    monkeypatch.setattr(VARIANTS.get("identity").make, "__module__", "__main__")
    with pytest.raises(UsageError, match="'identity' exists in this session only, and its rows are kept"):
        attnbench.swap("listops", "identity", **QUICK)
