from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnbench.errors import UsageError
from attnbench.figures import draw
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.scaling import applies, draw_scaling
from attnbench.figures.series import half_of_power, power_of_n
from attnbench.results.frame.words import in_words

Words = Callable[[Figure], str]


def timed(run: Any, label: str, lengths: tuple[int, ...], power: float, **columns: Any) -> list[dict[str, Any]]:
    return [
        run.row(label, seq_len=n, time_median_s=1e-6 * n**power, peak_bytes=100.0 * n**power, **columns)
        for n in lengths
    ]


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0, 0.0])
def test_the_fitted_power_is_that_of_a_power_law(power: float) -> None:
    n = np.array([4096, 1024, 2048])
    assert power_of_n(n, 3e-5 * n.astype(float) ** power) == pytest.approx(power, abs=1e-12)


def test_the_fit_takes_the_longest_three_lengths() -> None:
    n = np.array([64, 128, 1024, 2048, 4096])
    time = np.where(n < 1000, 1.0, n.astype(float) ** 2)
    assert power_of_n(n, time) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("n", "time"),
    [([], []), ([64], [1.0]), ([64, 128], [1.0, 2.0]), ([64, 128, 256], [1.0, 2.0, math.nan]), ([1, 2, 4], [0, 1, 2])],
)
def test_fewer_than_three_positive_times_have_no_power(n: list[float], time: list[float]) -> None:
    assert math.isnan(power_of_n(n, time))


def test_fitted_and_claimed_powers_stand_beside_each_other(run: Any, words: Words) -> None:
    rows = timed(run, "softmax", (512, 1024, 2048), 2.0) + timed(run, "linear", (512, 1024, 2048), 1.6)
    figure = draw_scaling(run.table(rows))
    said = words(figure).splitlines()
    assert sum(line.startswith("2.00 ") and line.endswith(" / 2") for line in said) == 2
    assert {one.split()[0] for one in bold_words(figure)} == {"1.60"}  # grows faster than its paper claims


def bold_words(figure: Figure) -> set[str]:
    return {text.get_text() for ax in figure.axes for text in ax.texts if text.get_fontweight() == "bold"}


def test_a_power_has_the_interval_that_its_times_leave_open_and_is_bold_only_beyond_it(run: Any) -> None:
    """The same three times: within 1 % the power is larger than claimed, within a factor of two it may not be."""
    for share, bold, said in ((1.01, True, "1.60 ±0.01 / 1"), (2.0, False, "1.60 ±0.71 / 1")):
        rows = timed(run, "linear", (512, 1024, 2048), 1.6)
        for row in rows:
            row |= {"time_ci_low_s": row["time_median_s"] / share, "time_ci_high_s": row["time_median_s"] * share}
            row["peak_bytes"] = 100.0 * row["seq_len"]
        figure = draw_scaling(run.table(rows))
        assert said in {text.get_text() for ax in figure.axes for text in ax.texts}
        assert (said in bold_words(figure)) is bold


def test_without_intervals_a_power_is_as_sure_as_its_values_lie_on_a_line() -> None:
    from scipy.stats import linregress, t

    n, time = np.array([512.0, 1024.0, 2048.0]), np.array([1.0, 3.1, 6.0])
    fitted = linregress(np.log(n), np.log(time))
    assert power_of_n(n, time) == pytest.approx(fitted.slope)
    assert half_of_power(n, time) == pytest.approx(t.ppf(0.975, 1) * fitted.stderr)
    assert half_of_power(n, time, (time * 0.9, np.array([math.nan, 1.0, 1.0]))) == half_of_power(n, time)
    assert math.isnan(half_of_power(n[:2], time[:2]))


def test_two_lengths_have_no_power_and_reference_lines_accuse_nobody(run: Any) -> None:
    rows = timed(run, "linear", (512, 1024), 1.9) + timed(run, "identity", (512, 1024, 2048), 1.9)
    texts = [text for ax in draw_scaling(run.table(rows)).axes for text in ax.texts]
    assert sum(text.get_text() == "– / 1" for text in texts) == 2
    assert sum(text.get_text().startswith("1.90 ") for text in texts) == 2
    assert all(text.get_fontweight() != "bold" for text in texts)


def test_a_failure_is_a_cross_at_the_length_where_it_stopped(run: Any, words: Words) -> None:
    rows = timed(run, "softmax", (512, 1024, 2048), 2.0)[:2] + timed(run, "linear", (512, 1024, 2048), 1.0)
    rows += [run.failed("oom", "needs 9 GiB", "softmax", seq_len=2048), run.failed("oom", "", "softmax", seq_len=4096)]
    figure = draw_scaling(run.table(rows))
    assert "oom: softmax" in words(figure).splitlines()
    assert "oom: softmax (n = 2048, 4096) — needs 9 GiB" in words(figure)
    (cross,) = crosses(figure.axes[0])
    x, y = figure.axes[0].transData.inverted().transform(cross.get_transform().transform(cross.get_xydata()))[0]
    assert x == pytest.approx(2048)
    assert y > max(float(np.max(line.get_ydata())) for line in figure.axes[0].lines if line is not cross)


def crosses(ax: Axes) -> list[Line2D]:
    return [line for line in ax.lines if line.get_marker() == "x"]


@pytest.mark.parametrize("statuses", [["timeout"] * 6, ["timeout", "oom", "crash", "oom", "timeout", "nonfinite"]])
def test_what_stopped_is_written_inside_the_axes_and_on_nothing(run: Any, statuses: list[str]) -> None:
    rows = timed(run, "linear", (512, 1024, 2048, 4096), 1.0)
    for label, status in zip(run.labels[:6], statuses, strict=True):
        rows += [*timed(run, label, (512, 1024), 1.0), run.failed(status, "", label, seq_len=2048)]
    figure = draw_scaling(run.table(rows))
    ax = figure.axes[0]
    figure.draw_without_rendering()
    boxes, frame = [text.get_window_extent() for text in ax.texts], ax.get_window_extent()
    assert len(boxes) == len(crosses(ax)) == len(set(statuses))
    curves = [line.get_path().transformed(line.get_transform()) for line in ax.lines if line not in crosses(ax)]
    marks = [line.get_transform().transform(line.get_xydata())[0] for line in crosses(ax)]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
        assert not any(curve.intersects_bbox(box, filled=False) for curve in curves)
        assert not any(box.contains(*mark) for mark in marks)
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1


def test_intervals_are_drawn_and_the_axes_name_what_they_show(lra: pd.DataFrame) -> None:
    time, memory = draw_scaling(lra).axes[:2]
    assert time.get_ylabel() == "median time"
    assert memory.get_ylabel() == "peak memory"
    assert "length n" in memory.get_xlabel()
    assert len(time.collections) == 18
    assert any("GiB" in tick.get_text() for tick in memory.get_yticklabels())


def test_what_was_never_measured_is_named_with_its_reason(run: Any, words: Words) -> None:
    rows = timed(run, "linear", (512, 1024), 1.0)
    rows += [run.failed("unsupported", "causal: mixes all tokens", "fnet", seq_len=n) for n in (512, 1024)]
    said = words(draw_scaling(run.table(rows)))
    assert "unsupported: fnet (n = 512, 1024) — causal: mixes all tokens" in said


def test_where_all_failed_there_is_nothing_to_draw_and_the_reason_is_told(run: Any) -> None:
    frame = run.table([run.failed("oom", "too big", "softmax", seq_len=n) for n in (512, 1024)])
    assert applies(frame)
    with pytest.raises(NothingToDraw, match="oom: softmax"):
        draw_scaling(frame)


def test_rows_of_two_machines_are_two_lines_that_say_so(run: Any, words: Words) -> None:
    rows = timed(run, "linear", (512, 1024, 2048), 1.0) + timed(run, "linear", (512, 1024), 1.5, machine_id="other")
    figure = draw_scaling(run.table(rows))
    lines = figure.axes[0].lines
    assert sorted(len(line.get_xdata()) for line in lines) == [2, 3]
    assert len({line.get_linestyle() + str(line._dash_pattern) for line in lines}) == 2
    assert {"linear (machine 3f9c2a71)", "linear (machine other)"} <= set(words(figure).splitlines())


@pytest.mark.parametrize(
    "column",
    [{"dtype": "bfloat16"}, {"causal": True}, {"head_dim": 32}, {"bias": "alibi"}, {"compile": True}, {"inputs": "x"}],
    ids=str,
)
def test_rows_that_differ_are_drawn_apart_and_the_difference_is_in_the_label(
    run: Any, words: Words, column: dict[str, Any]
) -> None:
    rows = timed(run, "linear", (512, 1024), 1.0) + timed(run, "linear", (512, 1024), 1.5, **column)
    figure = draw_scaling(run.table(rows))
    assert len(figure.axes[0].lines) == 2
    names = [text.get_text() for text in figure.axes[2].texts if text.get_text().startswith("linear (")]
    assert len(set(names)) == 2
    ((key, value),) = column.items()
    assert sum(in_words(key, value) in name for name in names) == 1 + (key in ("causal", "compile"))  # "not causal"


def test_many_lines_that_differ_have_panels_under_headings(run: Any, words: Words) -> None:
    rows = [row for label in run.labels[:8] for row in timed(run, label, (512, 1024), 1.0)]
    rows += [{**row, "dtype": "bfloat16"} for row in rows]
    figure = draw_scaling(run.table(rows))
    assert [len(ax.lines) for ax in figure.axes if ax.get_ylabel() == "median time"] == [8, 8]
    assert {"float32", "bfloat16"} <= set(words(figure).splitlines())


def test_settings_beyond_those_with_room_are_named_with_the_remedy(run: Any, words: Words) -> None:
    rows = [row for k in range(9) for row in timed(run, "linear", (512, 1024), 1.0, head_dim=8 + k)]
    said = words(draw_scaling(run.table(rows))).replace("\n", " ")
    assert "for want of room: head width 14; head width 15; head width 16" in said
    assert "--head-dim" in said


def test_only_the_rows_asked_for_are_drawn_and_a_value_that_no_row_has_is_refused(run: Any, lra: pd.DataFrame) -> None:
    rows = timed(run, "linear", (512, 1024), 1.0) + timed(run, "linear", (512, 1024, 2048), 1.5, causal=True)
    (line,) = draw(run.table(rows), figures=["scaling"], only={"causal": True})["scaling"].axes[0].lines
    assert len(line.get_xdata()) == 3
    with pytest.raises(UsageError, match="no rows with level layer; there are: model"):
        draw(lra[lra["level"] == "model"], figures=["scaling"], only={"level": "layer"})


def test_forty_variants_still_fit_on_the_page(run: Any) -> None:
    rows = [row for k in range(40) for row in timed(run, f"performer:features={k + 1}", (512, 1024), 1.0)]
    figure = draw_scaling(run.table(rows))
    table = figure.axes[2]
    heights = sorted(text.get_position()[1] for text in table.texts if text.get_text().startswith("performer"))
    assert len(heights) == 40
    assert heights[0] > 0
    assert min(np.diff(heights)) * 72 > 7.5


def test_only_times_or_only_memory_is_enough(run: Any, words: Words) -> None:
    rows = timed(run, "linear", (512, 1024, 2048), 1.0)
    no_memory = [row | {"peak_bytes": None} for row in rows]
    figure = draw_scaling(run.table(no_memory))
    assert "Without peak memory: it was not measured." in words(figure)
    assert [ax.get_ylabel() for ax in figure.axes if ax.axison] == ["median time"]
    no_time = [row | {"time_median_s": None, "time_ci_low_s": None, "time_ci_high_s": None} for row in rows]
    assert "1.00 / 1" in words(draw_scaling(run.table(no_time)))


def test_a_name_too_long_for_the_table_of_a_column_has_a_line_of_its_own(run: Any) -> None:
    long, other = "performer:features=64,kernel=relu", "performer:features=256,kernel=positive"
    rows = [row for label in (long, other, "linear") for row in timed(run, label, (512, 1024, 2048), 1.0)]
    (figure,) = draw(run.table(rows), figures=["scaling"], width="column").values()
    places = {text.get_text(): text.get_position()[1] for ax in figure.axes for text in ax.texts}
    powers = [text.get_position()[1] for ax in figure.axes for text in ax.texts if text.get_text().startswith("1.00")]
    assert places[long] not in powers
    assert places["linear"] in powers


def test_lines_whose_names_would_be_cut_before_what_tells_them_apart_have_panels(run: Any, words: Words) -> None:
    rows = [
        run.row(label, seq_len=n, padding=padding, time_median_s=1e-6 * n, run=f"a folder with a long name {name}")
        for name in ("one", "two")
        for label in ("softmax", "linear")
        for padding in (0.0, 0.5)
        for n in (64, 128, 256)
    ]
    frame = run.table(rows).assign(run=[row["run"] for row in rows])
    said = words(draw_scaling(frame)).splitlines()
    assert not any("…" in line for line in said)
    assert sum("a folder with a long name two · 50% padding" in line for line in said) == 1


def test_a_decoding_step_is_held_to_no_power_of_all_tokens(run: Any, words: Words) -> None:
    rows = timed(run, "linear", (512, 1024, 2048), 1.6, **{"pass": "decode"})
    figure = draw_scaling(run.table(rows))
    assert "1.60" in words(figure).split()
    assert " / " not in words(figure)
    assert not {one for one in bold_words(figure) if one.startswith("1.60")}


def test_the_title_is_the_answer_of_the_first_of_several_panels(run: Any, words: Words) -> None:
    first, second = run.labels[2:4]
    rows = [row for label in run.labels[:8] for row in timed(run, label, (512, 1024), 1.0)]
    rows += [{**row, "dtype": "bfloat16"} for row in rows]
    for row in rows:
        fastest, seconds = (first, 1e-5) if row["dtype"] == "float32" else (second, 1e-6)
        if row["label"] == fastest:
            row |= {"time_median_s": seconds, "time_ci_low_s": 0.99 * seconds, "time_ci_high_s": 1.01 * seconds}
    said = words(draw_scaling(run.table(rows))).replace("\n", " ")
    assert f"Fastest at n = 1k: {first}; " in said
    assert "(float32)" in said


@pytest.mark.parametrize(
    ("pass_", "said"), [("forward", "least memory: linear"), ("decode", "least cache or state: local, softmax")]
)
def test_the_memory_of_decoding_is_what_it_keeps(run: Any, words: Words, pass_: str, said: str) -> None:
    sizes = {"linear": (1e3, 9e6), "local": (2e3, 5e6), "softmax": (3e3, 5e6)}
    rows = [
        {**row, "peak_bytes": peak, "state_bytes": kept}
        for label, (peak, kept) in sizes.items()
        for row in timed(run, label, (512, 1024), 1.0, **{"pass": pass_})
    ]
    assert f"; {said}\n" in words(draw_scaling(run.table(rows)))


def test_the_title_names_all_that_are_not_told_apart_from_the_fastest(run: Any, words: Words) -> None:
    some = ["softmax", "sdpa", "chunked", "local", "linear", "performer"]

    def title(half: float, *seconds: float) -> str:
        rows = [row for label in some[: len(seconds)] for row in timed(run, label, (512, 1024), 1.0)]
        for row in rows:
            middle = seconds[some.index(row["label"])]
            ends = {"time_ci_low_s": (1 - half) * middle, "time_ci_high_s": (1 + half) * middle}
            row |= {"time_median_s": middle, "time_rounds": 5} | ends
        return words(draw_scaling(run.table(rows))).replace("\n", " ")

    a, b, c = some[:3]
    assert f"Fastest at n = 1k: {b}; " in title(0.01, 1.5, 1.0, 1.4)
    assert f"Fastest at n = 1k: {b}, not told apart from {a}; " in title(0.01, 1.01, 1.0, 1.4)
    four = f"{b}, {c}, local and 1 more"
    assert f"Fastest at n = 1k: {a}, not told apart from {four}; " in title(0.01, 1.0, 1.001, 1.002, 1.003, 1.004, 1.4)
    assert "Fastest at n = 1k: cannot be told; " in title(0.01, 1.01, 1.0, 1.02)
    assert "Fastest at n = 1k: cannot be told; " in title(math.nan, 1.5, 1.0, 2.0)


def test_one_variant_alone_is_not_the_fastest(run: Any, words: Words) -> None:
    assert "Fastest" not in words(draw_scaling(run.table(timed(run, "linear", (512, 1024, 2048), 1.0))))


def test_a_setting_of_one_length_has_no_panel_and_is_named(run: Any, words: Words) -> None:
    rows = [row for label in run.labels[:8] for row in timed(run, label, (512, 1024), 1.0)]
    single = [{**row, "dtype": "bfloat16"} for row in rows if row["seq_len"] == 512]
    figure = draw_scaling(run.table(rows + single))
    assert [len(ax.lines) for ax in figure.axes if ax.get_ylabel() == "median time"] == [8]
    assert "Not drawn, at one length: bfloat16." in words(figure)
    alone = draw_scaling(run.table(single))
    assert [len(ax.lines) for ax in alone.axes if ax.get_ylabel() == "median time"] == [8]


def test_the_title_compares_no_two_settings_that_share_a_panel(run: Any, words: Words) -> None:
    rows = timed(run, "linear", (512, 1024), 1.0) + timed(run, "sdpa", (512, 1024), 1.1)
    rows += [{**row, "level": "layer", "time_median_s": 1e-9} for row in timed(run, "local", (512, 1024, 2048), 1.0)]
    said = words(draw_scaling(run.table(rows))).splitlines()
    assert any(line.startswith("Fastest at n = 1k: linear; ") and "attention operator" in line for line in said)


@pytest.mark.parametrize("width", ["page", "column"])
def test_names_of_two_lines_have_their_room(run: Any, width: str, faults: Callable[[Figure], list[str]]) -> None:
    labels = [f"performer:features={2 * k},kernel=trig,projection=orthogonal,rest=whatever" for k in range(1, 31)]
    rows = [
        run.row(label, seq_len=n, time_median_s=1e-6 * n, peak_bytes=1e3 * n) for label in labels for n in (64, 128)
    ]
    assert faults(draw(run.table(rows), figures=["scaling"], width=width)["scaling"]) == []
