"""Tables of trainings that nobody should write, and the command that draws them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.figures import draw
from attnbench.figures.kit.palette import STYLES, drawn_in
from attnbench.measure.status import Status
from tests.figures.training_rows import CHANCE, TRUTH, curve, frame_of, run_of, step, suite_rows, training

NAMES = ["<script>alert(1)</script>", "$x^2$ \\frac", "\x1b[2J\x07", "w" * 90, "softmax:a=1", "identity:b=2"]


@pytest.mark.parametrize("width", ["page", "column"])
def test_odd_names_are_text_and_lie_on_nothing(tmp_path: Path, width: str, faults: Any) -> None:
    rows = [
        replace(row, label=NAMES[i % 6], variant=NAMES[i % 6].partition(":")[0], task=NAMES[i % 4] + "-task")
        for i, row in enumerate(suite_rows(["linear"] * 6, ["digits"], seeds=2))
    ]
    drawn = draw(frame_of(rows, tmp_path), figures=["scores"], width=width)
    assert faults(drawn["scores"]) == []


def test_any_mixture_of_outcomes_gives_a_figure_or_one_line(tmp_path: Path, faults: Any) -> None:
    rng = random.Random(5)
    for turn in range(4):
        rows = []
        for _ in range(rng.randint(1, 25)):
            status = rng.choice([Status.OK, Status.OK, Status.OK, *Status])
            columns = {
                "val_score": rng.choice([None, 0.0, 0.5, 1.0]),
                "state_bytes": rng.choice([None, 1, 4096, 10**12]),
            }
            how = {"seed": rng.randint(0, 3), "task": rng.choice(list(CHANCE)), "rate": rng.choice([2e-3, 8e-3])}
            how |= {"layers": rng.choice([2, 4]), "protocol": rng.choice(["fixed", "sweep"])}
            score = rng.choice([0.0, 1.0, rng.random()]) if status is Status.OK else None
            rows.append(
                training(
                    rng.choice(list(TRUTH)), score, status, "why", columns=columns if score is not None else {}, **how
                )
            )
        rows.append(training("softmax", 0.5, columns={"state_bytes": 64}))
        frame = run_of({row.cell_id: row for row in rows}.values(), tmp_path / str(turn))
        for name, figure in draw(frame, width="page" if turn % 2 else "column").items():
            assert faults(figure) == [], name


def test_numbers_that_are_none_do_not_count(tmp_path: Path) -> None:
    rows = suite_rows(["softmax", "linear"], ["digits"], seeds=2)
    frame = frame_of(rows, tmp_path)
    frame.loc[frame["label"] == "linear", ["score", "score_low", "val_score"]] = float("inf")
    figure = draw(frame, figures=["scores"])["scores"]
    (ax,) = [ax for ax in figure.axes if ax.get_xlabel() == "score"]
    assert len([line for line in ax.lines if line.get_marker() == "o"]) == 1


@pytest.mark.parametrize("style", list(STYLES))
def test_each_style_draws_softmax_in_its_own_ink(tmp_path: Path, style: str) -> None:
    figure = draw(frame_of(suite_rows(["softmax"], ["digits"]), tmp_path), figures=["scores"], style=style)["scores"]
    with drawn_in(style):
        dots = [line for ax in figure.axes for line in ax.lines if line.get_marker() == "o"]
        assert [dot.get_markeredgecolor() for dot in dots] == [STYLES[style].families["exact"]]


def test_the_command_draws_speed_and_scores_of_a_run_by_itself(tmp_path: Path, capsys: Any) -> None:
    rows = suite_rows(["softmax", "linear"], ["digits"], seeds=2)
    run_of([*rows, *(step(label, 0.1, 1e6, task="digits") for label in ("softmax", "linear"))], tmp_path / "run")
    assert main(["plot", str(tmp_path / "run"), "--format", "svg"]) == Exit.OK
    drawn = {path.name for path in (tmp_path / "run" / "plots").iterdir()}
    assert drawn == {"tradeoff.svg", "scores.svg", "curves.svg"}
    assert ">score<" in (tmp_path / "run" / "plots" / "tradeoff.svg").read_text()
    assert "recall (needs scores of 3 labels" in "".join(capsys.readouterr()).replace("\n", " ")


def test_the_command_takes_the_score_as_its_vertical_axis_and_what_was_published(tmp_path: Path) -> None:
    rows = suite_rows(["softmax", "linear"], ["digits"], seeds=2)
    run_of([*rows, *(step(label, 0.1, 1e6, task=None) for label in ("softmax", "linear"))], tmp_path / "run")
    wanted = ["--figure", "tradeoff", "--figure", "scores", "--y", "score", "--overlay", "published", "--format", "svg"]
    assert main(["plot", str(tmp_path / "run"), *wanted]) == Exit.OK
    plots = tmp_path / "run" / "plots"
    assert "NOT ONE MODEL" in (plots / "tradeoff.svg").read_text()
    assert "Xiong et al. 2021" in (plots / "scores.svg").read_text()


def test_a_curve_of_one_point_is_drawn(tmp_path: Path) -> None:
    frame = run_of([training("softmax", 0.5)], tmp_path / "run")
    assert curve(training("softmax", 0.5))["points"][0]["step"] == 67
    assert "curves" in draw(frame)
