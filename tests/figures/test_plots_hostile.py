"""Names out of a table are text in a figure, whatever stands in them, and figures are written where they belong."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.cli.app import main
from attnbench.errors import CannotCreate, Exit
from attnbench.figures import draw_all
from attnbench.figures.kit.style import save
from attnbench.figures.tradeoff import draw_tradeoff

NAMES = ["<script>alert(1)</script>", "]]>&lt;<!--", "$x^2$ \\frac", "[red]x[/red]", "\x1b[2J\x00\x07", '" onload="x']


def frames(run: Any) -> pd.DataFrame:
    rows = [r for r in run.lra_rows((64, 128)) if r["variant"] in ("softmax", "sdpa", "local", "linear", "performer")]
    performer, linformer = run.performer_rows((16, 64), (1, 2)), run.linformer_rows((128, 256), (512, 1024))
    return pd.concat([run.table(rows), run.table(performer), run.table(linformer)], ignore_index=True)


def shapes(path: Path) -> set[str]:
    return {f"{node.tag} {sorted(node.attrib)}" for node in ET.parse(path).iter()}


def test_names_with_tags_formulas_and_control_characters_are_text_in_every_figure(tmp_path: Path, run: Any) -> None:
    tame = frames(run)
    odd = tame.copy()
    for column in ("label", "variant", "family", "reason", "cost", "kernel", "machine_id", "process", "started_at"):
        words = list(dict.fromkeys(tame[column].astype(str)))
        table = {word: f"{NAMES[i % len(NAMES)]}{i}" for i, word in enumerate(words)}
        odd[column] = tame[column].astype(str).map(table)
    odd["suite"] = tame["suite"].map(lambda suite: f"<{suite}>")
    drawn = draw_all(odd, tmp_path / "odd", ["svg"])
    assert len(drawn) >= 5
    known = set().union(*(shapes(path) for path in draw_all(tame, tmp_path / "tame", ["svg"])))
    text = ""
    for path in drawn:
        assert not shapes(path) - known  # neither an element nor an attribute that a tame name would not give
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", path.read_text(encoding="utf-8"))
        text += "".join(ET.parse(path).getroot().itertext())
    for name in ("<script>alert(1)</script>", "$x^2$ \\frac", "[red]x[/red]"):
        assert name in text


def test_suites_that_differ_in_upper_and_lower_case_or_in_strange_signs_keep_their_own_files(
    tmp_path: Path, run: Any
) -> None:
    rows = [row for row in run.lra_rows((64, 128)) if row["variant"] in ("softmax", "local")]
    suites = ["a b", "A_B", "a_b", "../a", "con", "x" * 300, "x" * 301, ".."]
    both = pd.concat([run.table(rows).assign(suite=suite) for suite in suites], ignore_index=True)
    paths = draw_all(both, tmp_path / "plots", ["svg"], figures=["scaling"])
    assert len({path.name.casefold() for path in paths}) == len(suites)
    assert {path.parent for path in paths} == {tmp_path / "plots"}
    assert [path.name for path in paths][:3] == ["a_b-scaling.svg", "A_B-2-scaling.svg", "a_b-3-scaling.svg"]
    assert list(tmp_path.iterdir()) == [tmp_path / "plots"]


def test_a_figure_is_not_written_through_a_link(
    tmp_path: Path, run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = run.table([row for row in run.lra_rows((64, 128)) if row["variant"] in ("softmax", "local")])
    Path("mine").write_text("mine")
    Path("tradeoff.svg").symlink_to("mine")
    with pytest.raises(CannotCreate, match=r"tradeoff\.svg is a link, and nothing is written through one"):
        save(draw_tradeoff(frame), "tradeoff", ["svg"])
    assert Path("mine").read_text() == "mine"
    os.mkfifo("pipe.svg")
    with pytest.raises(CannotCreate, match=r"cannot write pipe\.svg: nobody reads from this pipe"):
        save(draw_tradeoff(frame), "pipe", ["svg"])
    assert Path("pipe.svg").is_fifo()
    Path("elsewhere").mkdir()
    Path("run").mkdir()
    frame.to_csv("run/results.csv", index=False)
    Path("run/plots").symlink_to(Path("elsewhere").resolve())
    assert main(["plot", "run"]) == Exit.CANNOT_CREATE
    assert "run/plots is a link" in capsys.readouterr().err
    assert list(Path("elsewhere").iterdir()) == []
