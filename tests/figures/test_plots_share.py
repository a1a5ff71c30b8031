"""Attention's part of the time is what a layer takes beyond the same without attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures import draw
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.share import TimeShare, draw_share, shares_of
from attnbench.results.frame.settings import settings, timed

Words = Callable[[Figure], str]
LENGTHS = (64, 256, 1024, 4096)
REST = 1e-6
"""Seconds of everything but attention, for each token."""


def rows(run: Any, label: str, seconds: Callable[[int], float], **columns: Any) -> list[dict[str, Any]]:
    return [run.row(label, seq_len=n, time_median_s=seconds(n), **columns) for n in LENGTHS]


def layers(run: Any) -> pd.DataFrame:
    """A layer in which softmax takes as long as all else at n = 1000, and the linear one is always a third of all."""
    at = {"level": "layer", "sweep": "layers"}
    return run.table(
        [
            *rows(run, "identity", lambda n: REST * n, **at),
            *rows(run, "softmax", lambda n: REST * n * (1 + n / 1000), **at),
            *rows(run, "linear", lambda n: REST * n * 1.5, **at),
        ]
    )


def found(frame: pd.DataFrame) -> dict[str, TimeShare]:
    every = timed(frame)
    (setting,) = settings(every[every["level"] != "operator"])
    return {one.label: one for one in shares_of(setting.rows, every)[0]}


def test_the_part_is_what_is_left_beyond_identity(run: Any) -> None:
    shares = found(layers(run))
    assert set(shares) == {"softmax", "linear"}
    assert shares["softmax"].part == pytest.approx([n / 1000 / (1 + n / 1000) for n in LENGTHS])
    assert shares["linear"].part == pytest.approx([1 / 3] * 4)
    assert (shares["softmax"].low < shares["softmax"].part).all()
    assert (shares["softmax"].part < shares["softmax"].high).all()


def test_without_identity_the_operators_alone_are_the_part_once_for_each_layer(run: Any) -> None:
    frame = run.table(
        [
            *rows(run, "softmax", lambda n: 1e-9 * n * n),
            *rows(run, "softmax", lambda n: 7.0, causal=True),
            *rows(run, "softmax", lambda n: 4e-9 * n * n + 2e-6 * n, level="model", sweep="models", layers=2.0),
        ]
    )
    share = found(frame)["softmax"]
    assert share.part == pytest.approx([2e-9 * n * n / (4e-9 * n * n + 2e-6 * n) for n in LENGTHS])
    assert math.isinf(share.half())


@pytest.mark.parametrize(
    ("part", "half"),
    [
        ([0.2, 0.4, 0.6, 0.8], 512.0),
        ([0.6, 0.7, 0.8, 0.9], 0.0),
        ([0.1, 0.2, 0.3, 0.4], math.inf),
        ([0.6, 0.4, 0.6, 0.8], 512.0),
    ],
)
def test_the_half_lies_between_the_lengths_where_it_is_crossed_for_good(part: list[float], half: float) -> None:
    ends = np.asarray(part)
    assert TimeShare("x", "exact", LENGTHS, ends, ends, ends).half() == pytest.approx(half)


def test_the_figure_names_the_length_from_which_attention_is_more_than_half(run: Any, words: Words) -> None:
    frame = layers(run)
    said = words(draw_share(frame))
    half = found(frame)["softmax"].half()
    assert 900 < half < 1024
    assert f"softmax: half at {half:.0f}" in said
    assert "linear: under half to 4k" in said
    assert "beyond the same one with identity" in said


@pytest.mark.parametrize("width", ["page", "column"])
def test_every_word_can_be_read(run: Any, width: str, faults: Callable[[Figure], list[str]]) -> None:
    figures = draw(layers(run), figures=["share"], width=width) | draw(
        run.table(run.lra_rows()), figures=["share"], width=width
    )
    for figure in figures.values():
        assert faults(figure) == []


def test_operators_alone_have_no_part_and_other_circumstances_do_not_count(run: Any) -> None:
    frame = layers(run)
    operators = run.table(rows(run, "softmax", lambda n: 1e-9 * n * n))
    elsewhere = frame.assign(dtype=np.where(frame["label"] == "identity", "bfloat16", "float32"))
    for other in (operators, elsewhere, frame[frame["seq_len"] == 64]):
        with pytest.raises(NothingToDraw, match="needs times of a layer or model at two lengths"):
            draw_share(other)
    assert draw_share(frame).axes


def test_a_half_at_a_shorter_length_says_nothing_of_the_longest(run: Any, words: Words) -> None:
    frame = layers(run)
    assert "over half of the time at n = 4k with softmax\n" in words(draw_share(frame))
    stopped = frame[(frame["label"] != "softmax") | (frame["seq_len"] < 4096)]
    assert "over half of the time at n = 4k with no variant\n" in words(draw_share(stopped))
