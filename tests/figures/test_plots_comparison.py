from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures.comparison import draw_comparison
from attnbench.figures.kit.page import NothingToDraw, laid_out
from attnbench.figures.kit.palette import LIGHT

Words = Callable[[Figure], str]
LENGTHS = (1024, 4096, 16384)


def compared(seconds: dict[str, Callable[[int], float | None]]) -> pd.DataFrame:
    """As ``Comparison.to_rows`` gives them: every pair at every length; None for a side that failed."""
    rows = []
    for a, b in combinations(seconds, 2):
        for n in LENGTHS:
            row: dict[str, Any] = {"a": a, "b": b, "seq_len": n, "verdict": "faster"}
            times = seconds[a](n), seconds[b](n)
            for side, time in zip("ab", times, strict=True):
                row |= {f"{side}_status": "ok" if time else "oom", f"{side}_reason": "" if time else "needs 9 GiB"}
                row |= {f"{side}_own_form": "", f"{side}_launched": "", f"{side}_host_share": None}
                ends = (0.9 * time, 1.1 * time) if time else (None, None)
                names = [f"{side}_time_{name}_s" for name in ("median", "ci_low", "ci_high")]
                row |= dict(zip(names, (time, *ends), strict=True))
            ratio = times[0] / times[1] if times[0] and times[1] else None
            ends = (0.8 * ratio, 1.25 * ratio) if ratio else (None, None)
            rows.append(row | dict(zip(["ratio", "ratio_ci_low", "ratio_ci_high"], (ratio, *ends), strict=True)))
    return pd.DataFrame(rows)


def power(factor: float, exponent: float) -> Callable[[int], float]:
    return lambda n: factor * n**exponent


def test_each_variant_has_one_line_against_the_first_and_the_look_of_its_times() -> None:
    seconds = {f"variant-{k}": power(1e-6 * (1 + k), 1.0) for k in range(5)}
    upper, lower, _ = draw_comparison(compared(seconds), crossovers=[]).axes
    drawn = [line for line in lower.lines if len(line.get_xdata()) == 3]
    assert [np.round(line.get_ydata(), 9).tolist() for line in drawn] == [[k] * 3 for k in (2, 3, 4, 5)]
    times = [line for line in upper.lines if len(line.get_xdata()) == 3 and line.get_marker() not in ("_", "|")]
    assert [line.get_color() for line in drawn] == [line.get_color() for line in times[1:]]
    assert "time over that of variant-0" in lower.get_ylabel()


def test_the_interval_of_the_ratio_is_turned_with_it() -> None:
    _, lower, _ = draw_comparison(compared({"a": power(1, 1), "b": power(2, 1)}), crossovers=[]).axes
    heights = lower.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((2 / 1.25, 2 / 0.8))


def test_more_variants_than_colours_still_look_different() -> None:
    seconds = {f"variant-{k}": power(1e-6 * (1 + k), 1.0) for k in range(20)}
    upper, *_ = draw_comparison(compared(seconds), crossovers=[]).axes
    lines = [line for line in upper.lines if len(line.get_xdata()) == 3 and line.get_marker() not in ("_", "|")]
    assert len({(line.get_color(), line.get_marker(), str(line._dash_pattern)) for line in lines}) == 20


def test_a_crossover_with_the_first_is_marked_and_told_and_lengths_are_short(words: Words) -> None:
    frame = compared({"softmax": power(1e-9, 2.0), "linear": power(4e-6, 1.0)})
    crossovers = [{"a": "softmax", "b": "linear", "seq_len": 4000.0, "ci_low": 3900.0, "ci_high": None}]
    figure = draw_comparison(frame, crossovers=crossovers)
    assert "crosses at 4000" in words(figure)
    assert [tick.get_text() for tick in figure.axes[1].get_xticklabels()] == ["1k", "4k", "16k"]
    (level,) = [line for line in figure.axes[1].lines if list(line.get_xdata()) == [4000.0, 4000.0]]
    assert level.get_color() == LIGHT.sequence[1]


def test_what_did_not_run_is_told_once_with_its_reason(words: Words) -> None:
    seconds = {"softmax": lambda n: 1e-9 * n * n if n < 16384 else None, "a": power(1e-6, 1), "b": power(2e-6, 1)}
    said = words(draw_comparison(compared(seconds), crossovers=[]))
    assert said.count("softmax: oom at n = 16384 — needs 9 GiB") == 1


def test_where_nothing_ran_there_is_no_chart() -> None:
    with pytest.raises(NothingToDraw, match="a: oom at n = 1024, 4096, 16384 — needs 9 GiB"):
        draw_comparison(compared({"a": lambda n: None, "b": lambda n: None}), crossovers=[])


def test_a_verdict_that_is_withheld_is_told_with_its_reason(words: Words) -> None:
    frame = compared({"linear": power(1e-6, 1), "softmax": power(1e-9, 2)})
    frame["withheld"] = ""
    frame.loc[frame["seq_len"] == 4096, ["verdict", "withheld"]] = ["withheld", "the machine was busy (1.1 of 2 cores)"]
    drawn = words(draw_comparison(frame, crossovers=[]))
    assert "No verdict at n = 4096: the machine was busy (1.1 of 2 cores)." in drawn


def test_where_every_ratio_is_withheld_the_times_are_drawn_and_the_reason_is_told(words: Words) -> None:
    frame = compared({"linear": power(1e-6, 1), "softmax": power(1e-9, 2)})
    frame[["verdict", "withheld"]] = ["withheld", "a verdict needs 3 processes"]
    frame[["ratio", "ratio_ci_low", "ratio_ci_high"]] = None
    figure = draw_comparison(frame, crossovers=[])
    assert "No verdict at n = 1024, 4096, 16384: a verdict needs 3 processes." in words(figure)
    upper, lower, *_ = figure.axes
    assert {tuple(line.get_xdata()) for line in upper.lines} >= {LENGTHS}
    assert not [line for line in lower.lines if len(line.get_xdata()) == 3]


def test_own_forms_carry_the_mark_of_all_figures_wherever_they_are_named(words: Words) -> None:
    frame = compared({"a": power(1e-9, 2.0), "b": lambda n: 4e-6 * n if n < 16384 else None, "c": power(1e-6, 1.0)})
    for side in "ab":
        frame.loc[frame[side] == "b", f"{side}_own_form"] = "a window of its own"
    crossovers = [{"a": "a", "b": "b", "seq_len": 4000.0, "ci_low": 3900.0, "ci_high": None}]
    figure = draw_comparison(frame, crossovers=crossovers)
    said = words(figure).splitlines()
    assert {"a", "b†", "c", "crosses at 4000"} <= {*said}
    assert "b" not in said
    assert any(line.startswith("b†: oom at n = 16384") for line in said)
    assert sum("show NAME" in line for line in said) == 1
    others = frame[(frame["a"] == "a") & (frame["b"] == "c")]
    assert "show NAME" not in words(draw_comparison(others, crossovers=[]))


@pytest.mark.parametrize("count", [2, 4, 10])
def test_in_a_column_every_word_can_be_read(count: int, faults: Callable[[Figure], list[str]]) -> None:
    seconds: dict[str, Callable[[int], float | None]] = {
        f"performer:features={2**k},kernel=relu": power(1e-6 * (1 + k), 1.0) for k in range(count)
    }
    crossovers = [{"a": a, "b": b, "seq_len": 4000.0, "ci_low": 3900.0, "ci_high": None}
                  for a, b in combinations(seconds, 2)]  # fmt: skip
    with laid_out("column"):
        assert faults(draw_comparison(compared(seconds), crossovers=crossovers, about="operator " * 20)) == []


def test_the_first_one_is_named_whole_beside_the_ratios_in_a_column(words: Words) -> None:
    frame = compared({"softmax": power(1e-9, 2.0), "linear": power(4e-6, 1.0)})
    with laid_out("column"):
        figure = draw_comparison(frame, crossovers=[])
    assert "time over that of softmax" in words(figure)
    assert {"1/4", "1", "4"} <= {tick.get_text() for tick in figure.axes[1].get_yticklabels()}


def test_the_notes_say_how_a_gpu_was_launched_and_how_much_of_a_time_is_the_host(words: Words) -> None:
    frame = compared({"sdpa": power(1, 1), "performer": power(2, 1), "mesa": power(2, 1)})
    for side in "ab":
        frame[f"{side}_launched"] = np.where(frame[side] == "mesa", "eager", "graph")
        share = {"sdpa": 0.1, "performer": 0.3, "mesa": 0.88}
        frame[f"{side}_host_share"] = frame[side].map(share) - 0.05 * (frame["seq_len"] > 1024)
    said = words(draw_comparison(frame, crossovers=[]))
    assert "Launch graph: sdpa, performer." in said
    assert "Launch eager: mesa." in said
    assert "eager: 88 % of mesa's time is the host at n = 1024." in said
    assert "graph: 30 % of performer's time is the host at n = 1024." in said
    assert "of sdpa's time" not in said
    assert "aunch" not in words(draw_comparison(compared({"a": power(1, 1), "b": power(2, 1)}), crossovers=[]))


def test_the_title_says_nothing_of_a_variant_that_never_ran(words: Words) -> None:
    seconds: dict[str, Callable[[int], float | None]] = {
        "softmax": power(1e-9, 2), "never": lambda n: None, "linear": power(1e-6, 1)
    }  # fmt: skip
    said = words(draw_comparison(compared(seconds), crossovers=[])).splitlines()
    assert "softmax is faster than linear" in said
    assert any(line.startswith("never: oom at n = 1024, 4096, 16384") for line in said)


@pytest.mark.parametrize("width", ["page", "column"])
def test_the_names_of_many_variants_stay_on_the_page(width: str, faults: Callable[[Figure], list[str]]) -> None:
    rows = compared({f"variant-{k}": power(1e-6 * (1 + k), 1.0) for k in range(60)})
    with laid_out(width):
        assert faults(draw_comparison(rows[rows["a"] == "variant-0"], crossovers=[])) == []


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (("softmax", "linear"), "softmax is overtaken from n = 4000 on by linear"),
        (("linear", "softmax"), "linear is from n = 4000 on faster than softmax"),
    ],
)
def test_the_title_says_which_of_the_two_is_faster_beyond_the_crossover(
    order: tuple[str, str], said: str, words: Words
) -> None:
    seconds = {"softmax": power(1e-9, 2.0), "linear": power(4e-6, 1.0)}
    frame = compared({name: seconds[name] for name in order})
    frame["verdict"] = np.where(frame["ratio"].astype(float) < 1, "faster", "slower")
    crossovers = [{"a": order[0], "b": order[1], "seq_len": 4000.0, "ci_low": 1024, "ci_high": 4096}]
    assert said in words(draw_comparison(frame, crossovers=crossovers)).splitlines()


def test_each_reason_stands_at_its_own_lengths_and_variants(words: Words) -> None:
    frame = compared({"a": power(1, 1), "b": power(2, 1), "c": power(3, 1)})
    frame["withheld"] = ""
    for rows, reason in (
        (frame["seq_len"] == 1024, "the machine was busy"),
        ((frame["seq_len"] == 4096) & (frame["b"] == "c"), "two orders contradict each other"),
    ):
        frame.loc[rows, ["verdict", "withheld"]] = ["withheld", reason]
    said = words(draw_comparison(frame, crossovers=[]))
    assert "No verdict at n = 1024: the machine was busy." in said
    assert "No verdict on c at n = 4096: two orders contradict each other." in said


def test_one_of_several_reasons_is_an_example(words: Words) -> None:
    frame = compared({"softmax": lambda n: None if n > 1024 else 1.0, "linear": power(1e-6, 1)})
    frame.loc[frame["seq_len"] == 16384, "a_reason"] = "needs 99 GiB"
    assert "softmax: oom at n = 4096, 16384 — e.g. needs 9 GiB" in words(draw_comparison(frame, crossovers=[]))
