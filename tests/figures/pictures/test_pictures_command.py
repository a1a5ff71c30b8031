"""``attnbench plot PICTURE``: told from runs, written with its numbers, and strict about its options."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from attnbench.cli.app import main
from attnbench.figures.pictures import PICTURES, draw, positions


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_picture_is_written_with_the_numbers_that_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "pattern", "local:window=1", "--n", "5", "--no-causal", "--format", "svg"]) == 0
    assert {path.name for path in Path("plots").iterdir()} == {"pattern.svg", "pattern.txt", "pattern.csv"}
    table = pd.read_csv("plots/pattern.csv")
    assert list(table["causal"]) == [False] * 5
    assert (table["key_4"] > 0).tolist() == [False, False, False, True, True]
    out = capsys.readouterr().out
    assert "plots/pattern.svg" in out
    assert "plots/pattern.csv" in out


def test_title_style_width_and_folder_are_those_of_all_figures() -> None:
    looks = ["--title", "Mine", "--style", "dark", "--width", "column"]
    assert main(["plot", "positions", *looks, "--out", "there", "--format", "svg"]) == 0
    svg = Path("there/positions.svg").read_text(encoding="utf-8")
    assert ">Mine<" in svg
    assert "#14171c" in svg


@pytest.mark.parametrize("width", ["page", "column"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("weights", {"n": 32}),
        ("positions", {}),
        ("spectrum", {"n": 32, "inputs": "listops"}),
        ("spectrum", {"n": 32, "inputs": "gaussian"}),
    ],
)
def test_every_word_can_be_read(
    name: str, options: dict[str, Any], width: str, faults: Callable[[Figure], list[str]]
) -> None:
    assert faults(draw(name, width=width, **options).figure) == []


def test_a_folder_with_the_name_of_a_picture_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pattern").mkdir()
    assert main(["plot", "pattern"]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["patern", "local"], "patern: no such file or folder, and no picture; did you mean 'pattern'?"),
        (["pattern", "locl"], "unknown variant 'locl'; did you mean 'local'?"),
        (["pattern", "--dtype", "float32"], "the picture pattern has no option --dtype; it has --n, --causal"),
        (["positions", "--x", "time_median_s"], "the picture positions has no option --x; it has --n, --head-dim"),
        (["positions", "local"], "the picture positions takes no variants; remove local"),
        (["taxonomy", "--n", "4"], "the picture taxonomy has no option --n; it has no options"),
        (["results", "--layer", "2"], "--layer belongs to a picture that needs no run"),
        (["results", "--plugin", "x.py"], "--plugin belongs to a picture that needs no run"),
        (["weights", "--inputs", "gausian"], "unknown input 'gausian'; did you mean 'gaussian'?"),
        (["pattern", "local", "--plugin", "nothere.py"], "nothere.py"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(Path.cwd().iterdir()) == []


def test_the_help_names_every_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(re.search(rf"\b{name}\b", said) for name in PICTURES)


def test_the_same_picture_twice_gives_the_same_bytes() -> None:
    for folder in ("one", "two"):
        assert main(["plot", "weights", "local:window=2", "--n", "16", "--format", "svg", "--out", folder]) == 0
    assert Path("one/weights.svg").read_bytes() == Path("two/weights.svg").read_bytes()
    assert Path("one/weights.csv").read_bytes() == Path("two/weights.csv").read_bytes()


def test_a_link_in_the_place_of_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("plots").mkdir()
    Path("plots/positions.csv").symlink_to("elsewhere")
    assert main(["plot", "positions", "--format", "svg"]) == 73
    assert "positions.csv is a link" in capsys.readouterr().err


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_has_a_sentence_on_what_it_shows(name: str) -> None:
    assert len(PICTURES[name]) > 20


@pytest.mark.parametrize("options", [{"name": "pattern", "n": 16}, {"name": "taxonomy"}], ids=str)
def test_a_picture_of_all_variants_has_numbers_behind_it(options: dict[str, Any]) -> None:
    """The others are drawn, and asked for their numbers, where they are compared with those in the documentation."""
    assert len(draw(**options).numbers) > 0


def test_a_picture_is_computed_by_one_thread_and_leaves_the_others_to_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    sinusoids = positions.sinusoids
    monkeypatch.setattr(positions, "sinusoids", lambda *at: seen.append(torch.get_num_threads()) or sinusoids(*at))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        draw("positions", n=8)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(threads)
