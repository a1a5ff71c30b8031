"""The figure of decoding has a panel for each part of a generation, and one for several tokens in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures import draw
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.served import draw_served

Words = Callable[[Figure], str]


@pytest.fixture
def frame(run: Any) -> pd.DataFrame:
    rows = []
    for label, growth in (("softmax", 2.0), ("linear", 1.0)):
        for turn, n in enumerate((1024, 4096)):
            at = {"pass": "generate", "seq_len": n, "new_tokens": 32, "time_median_s": 1.0}
            columns = {"first_token_s": 1e-3 * growth**turn, "token_s": 1e-5 * growth**turn, "state_bytes": 1000 * n}
            rows.append(run.row(label, **at, **columns))
            for tokens in (0, 4, 16):
                seconds = 1e-5 * growth * max(1, tokens)
                rows.append(run.row(label, **{**at, "pass": "decode", "new_tokens": tokens, "time_median_s": seconds}))
    return run.table(rows)  # type: ignore[no-any-return]


def test_each_part_has_a_panel_and_a_step_is_drawn_over_its_tokens(frame: pd.DataFrame, words: Words) -> None:
    figure = draw(frame, figures=["served"])["served"]
    panels = [ax for ax in figure.axes if "log2 scale" in ax.get_xlabel()]
    assert [ax.get_xlabel().partition(" (")[0] for ax in panels] == ["tokens in one step", *["n of the prompt"] * 3]
    steps, each, first, state = ([[*map(float, line.get_ydata())] for line in ax.lines] for ax in panels)  # type: ignore[arg-type]
    assert sorted(steps) == [[1e-5, 4e-5, 16e-5], [2e-5, 8e-5, 32e-5]]
    assert sorted(each) == [[1e-5, 1e-5], [1e-5, 2e-5]]
    assert sorted(first) == [[1e-3, 1e-3], [1e-3, 2e-3]]
    assert state == [[1000 * 1024.0, 1000 * 4096.0]] * 2
    said = words(figure)
    for part in ("Least time, one step: linear", "one step, n = 4k", "to the first token", "cache or state"):
        assert part in said


def test_one_length_and_one_number_of_tokens_are_nothing_to_draw(frame: pd.DataFrame) -> None:
    one = frame[(frame["seq_len"] == 1024) & (frame["new_tokens"] != 4) & (frame["new_tokens"] != 16)]
    with pytest.raises(NothingToDraw, match="pass generate at two lengths"):
        draw_served(one)


def test_a_kept_prefix_has_a_panel_over_the_tokens_that_are_new(run: Any) -> None:
    at = {"pass": "generate", "seq_len": 4096, "new_tokens": 32, "time_median_s": 1.0, "token_s": 1e-5}
    rows = [
        run.row("linear", **at, kept_prefix=kept, first_token_s=1e-6 * (4096 - kept), state_bytes=1000)
        for kept in (0, 3072)
    ]
    figure = draw_served(run.table(rows))
    panels = [ax for ax in figure.axes if "log2 scale" in ax.get_xlabel()]
    assert [ax.get_xlabel() for ax in panels] == ["tokens of the prompt that are not kept (log2 scale)"]
    (line,) = panels[0].lines
    assert list(line.get_xdata()) == [1024, 4096]  # type: ignore[arg-type]
    assert list(line.get_ydata()) == pytest.approx([1024e-6, 4096e-6])  # type: ignore[arg-type]


def test_a_setting_of_one_length_has_no_panel(frame: pd.DataFrame, run: Any) -> None:
    at = {"pass": "generate", "seq_len": 1024, "new_tokens": 32, "time_median_s": 1.0, "heads": 5}
    other = run.table([run.row("softmax", **at, first_token_s=1e-3, token_s=1e-5, state_bytes=1000)])
    both = draw_served(pd.concat([frame, other], ignore_index=True))
    assert len(both.axes) == len(draw_served(frame).axes)


def test_times_that_are_short_are_not_all_the_least(frame: pd.DataFrame, words: Words) -> None:
    prompts = frame[frame["pass"] == "generate"]
    assert "Least time, each token that follows: linear\n" in words(draw_served(prompts))


def test_what_stopped_before_the_longest_prompt_is_not_the_least_there(run: Any, words: Words) -> None:
    at = {"pass": "generate", "new_tokens": 32, "time_median_s": 1.0, "token_s": 1e-5, "state_bytes": 1000}
    times = {"linear": {1024: 2e-3, 2048: 2e-3, 4096: 2e-3}, "softmax": {1024: 1e-4, 2048: 2e-4}}
    rows = [run.row(label, seq_len=n, first_token_s=s, **at) for label, of in times.items() for n, s in of.items()]
    rows.append(run.failed("oom", "needs 9 GiB", "softmax", seq_len=4096, **{**at, "time_median_s": None}))
    said = words(draw_served(run.table(rows).assign(token_s=float("nan"))))
    assert "Least time, to the first token: linear\n" in said
