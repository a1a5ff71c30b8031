from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from attnbench.errors import ResultsError, UsageError
from attnbench.figures import draw
from attnbench.figures.kit.bubbles import FRONT, LARGEST, draw_front, round_sizes
from attnbench.figures.kit.heights import arrange
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.kit.palette import LIGHT
from attnbench.figures.published.lra import read_published
from attnbench.figures.tradeoff import applies, draw_tradeoff
from attnbench.results.frame.agreement import agreement, kind_of
from attnbench.results.frame.contenders import pareto
from attnbench.results.frame.settings import settings, timed

Words = Callable[[Figure], str]


@pytest.fixture(scope="module")
def figure(lra: pd.DataFrame) -> Figure:
    return draw_tradeoff(lra)


def names_in(figure: Figure, labels: Any) -> list[Any]:
    figure.draw_without_rendering()
    return [text for text in figure.axes[0].texts if text.get_text() in labels]


def circle_of(figure: Figure, label: str) -> Any:
    (circle,) = [circle for circle in figure.axes[0].collections if circle.get_label() == label]
    return circle


def test_every_variant_of_the_suite_has_its_circle_and_its_name(figure: Figure, run: Any) -> None:
    assert sorted(text.get_text() for text in names_in(figure, run.labels)) == sorted(run.labels)
    assert len(figure.axes[0].collections) == len(run.labels)


def test_the_title_says_what_where_and_when(figure: Figure, words: Words) -> None:
    said = words(figure)
    for part in ("n = 4096", "batch 1", "4 heads × 64", "float32", "training step", "cpu", "3f9c2a71", "2026-11-20"):
        assert part in said
    assert "inputs listops · 5 draws · n = 1024 (none at 4096)" in said
    assert "answering mean(V): 0.62" in said


def test_the_area_is_proportional_to_memory(figure: Figure, lra: pd.DataFrame) -> None:
    here = lra[(lra["seq_len"] == 4096) & (lra["sweep"] == "speed")].set_index("label")["peak_bytes"]
    sizes = {label: circle_of(figure, label).get_sizes()[0] for label in ("softmax", "synthesizer")}
    assert sizes["softmax"] / sizes["synthesizer"] == pytest.approx(here["softmax"] / here["synthesizer"])
    assert max(circle.get_sizes()[0] for circle in figure.axes[0].collections) == pytest.approx(LARGEST)


def test_other_operators_and_unfitted_methods_stand_in_bands_of_their_own(lra: pd.DataFrame) -> None:
    ticks = [tick.get_text() for tick in draw_tradeoff(lra, n=1024).axes[0].get_yticklabels()]
    assert "another\noperator" in ticks
    assert "learned: no\nerror before\nfitting" in ticks
    assert "exact up\nto rounding" in ticks
    assert kind_of("distance", "other", 0.01, "rel_error") == "other"
    assert kind_of("learned", "learned", 0.01, "rel_error") == "learned"
    assert kind_of("approximation", "learned", 0.01, "rel_error") == "measured", "it was fitted"
    assert kind_of("exact", "softmax", 0.0, "rel_error") == "exact"
    assert kind_of("approximation", "softmax", 0.3, "rel_error") == "measured"
    assert kind_of("approximation", "softmax", 3e-7, "rel_error") == "exact"
    assert kind_of("distance", "other", 3e-7, "rel_error") == "other"
    assert kind_of("approximation", "softmax", math.nan, "rel_error") == "missing"
    assert kind_of("", "other", 0.7, "score") == "measured"


def test_up_is_better_and_right_is_faster(run: Any) -> None:
    points = pd.DataFrame(
        {"label": ["good", "bad"], "name": ["good", "bad"], "kind": "measured", "x": [1.0, 1.0], "y": [0.01, 0.9]}
    )
    layout = arrange(points, lambda value: 0.0, 4.0, log=True)
    at = layout.points.set_index("label")["at"]
    assert at["good"] > at["bad"]
    layout = arrange(points, lambda value: 0.0, 4.0, log=False)
    at = layout.points.set_index("label")["at"]
    assert at["good"] < at["bad"]
    slow_left = draw_tradeoff(run.table(run.lra_rows([64])), x="time_median_s").axes[0].get_xlim()
    assert slow_left[0] > slow_left[1]


def test_the_front_joins_what_nothing_beats() -> None:
    x, y = [1.0, 2.0, 3.0, 3.0, 0.5], [9.0, 5.0, 1.0, 2.0, 8.0]
    front = pareto(x, y)
    assert front == [3, 1, 0]
    for i in set(range(5)) - set(front):
        assert any(x[j] >= x[i] and y[j] >= y[i] for j in front)


def test_the_steps_of_the_front_bound_what_is_beaten() -> None:
    """At every corner some method is as fast and as good; a corner beyond would promise a method that there is not."""
    x, y = np.array([3.0, 2.0, 1.0]), np.array([1.0, 5.0, 9.0])
    ax = Figure().add_subplot()
    draw_front(ax, x, y, 0.0)
    corners = ax.lines[0].get_xydata()
    assert all(any(right <= i and up <= j for i, j in zip(x, y, strict=True)) for right, up in corners)
    assert {(right, up) for right, up in corners} >= set(zip(x, y, strict=True))


def test_the_front_leaves_out_reference_lines_and_what_is_no_better_than_the_mean(figure: Figure) -> None:
    (front,) = [line for line in figure.axes[0].lines if line.get_label() == FRONT]
    # performer:features=64, performer and sdpa; not mean-value, identity, local or the oracles.
    assert len(set(front.get_xdata())) == 3


def test_what_is_fast_but_worse_than_the_mean_is_not_on_the_front(run: Any) -> None:
    rows, at = [], {"sweep": "error", "error_kind": "approximation", "trivial_error": 0.6}
    for label, time, e in (
        ("performer", 0.3, 0.2),
        ("local", 0.1, 0.9),
        ("bigbird", 0.2, 0.5),
        ("mean-value", 0.01, 0.6),
    ):
        rows += [run.row(label, time_median_s=time, peak_bytes=1e6), run.row(label, rel_error=e, **at)]
    figure = draw_tradeoff(run.table(rows))
    (front,) = [line for line in figure.axes[0].lines if line.get_label() == FRONT]
    assert sorted({round(float(x), 6) for x in front.get_xdata()}) == [round(1 / 0.3, 6), 5.0]


def test_the_front_joins_what_ran_at_this_length_and_says_how_many_are_left_out(run: Any, words: Words) -> None:
    rows, error = [], {"sweep": "error", "error_kind": "approximation", "trivial_error": 0.6}
    for label, time, e in (("performer", 0.3, 0.2), ("bigbird", 0.2, 0.5), ("local", 0.1, 0.4), ("sparse", 0.2, None)):
        rows.append(run.row(label, time_median_s=time, peak_bytes=1e6))
        if e:
            rows.append(run.row(label, rel_error=e, **error))
        long = {"seq_len": 2048, "sweep": "speed"}
        if label == "local":
            rows.append(run.failed("oom", "needs more", label, **long))
        else:
            rows.append(run.row(label, time_median_s=2 * time, peak_bytes=1e6, **long))
    for n, speeds, said in (
        (1024, [1 / 0.3, 10.0], "3 of 4 methods."),
        (2048, [1 / 0.6, 2.5], "2 of 4 methods."),
    ):
        figure = draw_tradeoff(run.table(rows), n=n)
        (front,) = [line for line in figure.axes[0].lines if line.get_label() == FRONT]
        assert sorted({round(float(x), 6) for x in front.get_xdata()}) == [round(x, 6) for x in speeds]
        assert said in words(figure)
    assert "Left out at n = 2048 — oom: local — needs more" in words(figure)


def test_by_default_the_longest_length_at_which_all_ran(run: Any, words: Words) -> None:
    frame = run.table(run.lra_rows((256, 512, 1024), limit=250e6))
    said = words(draw_tradeoff(frame))
    assert "n = 512" in said
    said = words(draw_tradeoff(frame, n=1024))
    assert "Left out at n = 1024" in said
    assert "oom: softmax" in said
    assert "needs more than the limit" in said


def test_a_length_inputs_or_axis_that_does_not_exist_is_refused_with_those_that_do(lra: pd.DataFrame) -> None:
    for options, message in (
        ({"n": 5}, "no rows at n = 5; there are: 1024, 2048, 3072, 4096"),
        ({"inputs": "cats"}, "no error rows with inputs 'cats'; there are: gaussian:logit_std=2, listops"),
        ({"x": "speed"}, "x must be examples_per_s or tokens_per_s or time_median_s, not 'speed'"),
        ({"y": "loss"}, "y must be"),
        ({"overlay": "mine"}, "overlay must be published, not 'mine'"),
    ):
        with pytest.raises(UsageError, match=message.split("'")[0]) as caught:
            draw_tradeoff(lra, **options)
        assert message in str(caught.value)


def test_a_frame_that_is_no_results_table_is_refused() -> None:
    with pytest.raises(ResultsError, match="not a results table"):
        draw_tradeoff(pd.DataFrame({"a": [1]}))


def test_a_sweep_timed_on_several_inputs_has_the_error_of_each(run: Any, words: Words) -> None:
    at = {"error_kind": "approximation", "error_draws": 1, "trivial_error": 0.9, "sweep": "timed"}
    rows = [
        run.row(name, inputs=inputs, time_median_s=0.1, examples_per_s=10.0, rel_error=error, **at)
        for inputs, error in (("listops", 0.11), ("gaussian:logit_std=2", 0.22))
        for name in ("linear", "local")
    ]
    table = run.table(rows)
    found = {one.rows["inputs"].iloc[0]: one for one in settings(timed(table), also_same=("inputs",))}
    for inputs, error in (("listops", 0.11), ("gaussian:logit_std=2", 0.22)):
        agreed = agreement(table, "rel_error", None, found[inputs])(rows[0]["seq_len"])
        assert (agreed.inputs, set(agreed.rows["y"])) == (inputs, {error})
    assert "the timed inputs · 1 draw" in words(draw_tradeoff(table))


def test_inputs_choose_the_error_row(lra: pd.DataFrame) -> None:
    frame = lra.copy()
    other = (frame["label"] == "performer") & (frame["inputs"] == "gaussian:logit_std=2")
    frame.loc[other, "rel_error"] = 0.123
    speed = settings(timed(frame))[0]
    for inputs, wanted in ((None, 0.33), ("listops", 0.33), ("gaussian", 0.123), ("gaussian:logit_std=2", 0.123)):
        rows = agreement(frame, "rel_error", inputs, speed)(1024).rows.set_index("label")
        assert rows.loc["performer", "y"] == wanted


@pytest.mark.parametrize("error", [0.0, math.inf, math.nan, 1e-9, 1e12])
def test_errors_off_the_scale_still_give_a_figure(run: Any, error: float) -> None:
    rows = [
        run.row("performer", time_median_s=0.1, peak_bytes=1e6),
        run.row("local", time_median_s=0.2, peak_bytes=2e6),
    ]
    at = {"sweep": "error", "error_kind": "approximation", "trivial_error": 0.6}
    rows += [run.row("performer", rel_error=error, **at), run.row("local", rel_error=0.5, **at)]
    figure = draw_tradeoff(run.table(rows))
    figure.draw_without_rendering()
    assert np.isfinite(figure.axes[0].dataLim.get_points()).all()


@pytest.mark.parametrize("memory", [math.nan, 0.0, 1.0])
def test_one_row_with_or_without_memory_gives_a_figure(run: Any, words: Words, memory: float) -> None:
    figure = draw_tradeoff(run.table([run.row("softmax", time_median_s=0.1, peak_bytes=memory)]))
    figure.draw_without_rendering()
    assert "softmax" in words(figure)


def test_where_all_failed_there_is_nothing_to_draw_and_the_reasons_are_told(run: Any) -> None:
    rows = [run.failed("oom", "needs 9 GiB", label) for label in run.labels]
    frame = run.table([*rows, run.failed("timeout", "took longer than 60 s", "oracle-lowrank", seq_len=2048)])
    with pytest.raises(NothingToDraw) as caught:
        draw_tradeoff(frame)
    assert "oom: softmax" in str(caught.value)
    assert "timeout: oracle-lowrank (n = 2048) — took longer than 60 s" in str(caught.value)
    assert not applies(frame)


def test_an_infinite_or_zero_speed_is_not_drawn(run: Any) -> None:
    rows = [run.row("softmax", time_median_s=0.1, peak_bytes=1e6), run.row("local", time_median_s=0.1, peak_bytes=1e6)]
    rows[1]["examples_per_s"] = math.inf
    assert len(draw_tradeoff(run.table(rows)).axes[0].collections) == 1


def test_strange_names_are_written_as_they_are(run: Any, words: Words) -> None:
    name = 'a$x_1$<b>&"c"'
    rows = [run.row("_under", time_median_s=0.1, peak_bytes=1e6), run.row("x", time_median_s=0.2, peak_bytes=1e6)]
    rows[1] |= {"label": name, "variant": name, "family": "$new$"}
    said = words(draw_tradeoff(run.table(rows)))
    assert name in said
    assert "_under" in said
    assert "$new$" in said


def test_the_published_panel_has_its_own_axes_and_names_its_source(run: Any, words: Words) -> None:
    figure = draw_tradeoff(run.table([run.row("softmax", time_median_s=0.1, peak_bytes=1e6)]), overlay="published")
    said = words(figure)
    assert "The paper's own measurements, on TPUs, with its own implementations" in said
    assert "speed relative to the Transformer at 4K" in said
    assert "average score" in said
    (panel,) = [ax for ax in figure.axes if "relative to the Transformer" in ax.get_xlabel()]
    assert len(panel.collections) == 11
    assert sum(text.get_text() in set(read_published()["model"]) for text in panel.texts) == 11


def test_the_published_averages_are_the_means_of_their_rows_but_for_one_known_slip() -> None:
    table = read_published()
    mean = table[["listops", "text", "retrieval", "image", "pathfinder"]].mean(axis=1)
    off = table.loc[(mean - table["average"]).abs() > 0.006, "model"]
    assert list(off) == ["Sinkhorn Transformer"]
    assert set(table["family"]) <= set(LIGHT.families)


def test_the_published_relative_speeds_follow_from_the_speeds_up_to_rounding() -> None:
    table = read_published().dropna(subset=["steps_per_s_4k"])
    assert len(table) == 9
    for k in ("1k", "2k", "3k", "4k"):
        base = table.loc[table["model"] == "Transformer", f"steps_per_s_{k}"].item()
        low, high = (
            (table[f"steps_per_s_{k}"] - 0.05) / (base + 0.05),
            (table[f"steps_per_s_{k}"] + 0.05) / (base - 0.05),
        )
        printed = table[f"relative_speed_{k}"]
        assert ((printed + 0.05 >= low) & (printed - 0.05 <= high)).all()


def test_the_size_key_is_round_and_never_larger_than_the_largest_circle() -> None:
    assert round_sizes(3.0e9) == [2.0**31, 2.0**29, 2.0**27]
    assert round_sizes(math.nan) == []
    assert round_sizes(0.0) == []


def test_a_circle_has_the_colour_of_its_family(figure: Figure) -> None:
    for label, family in (("softmax", "exact"), ("performer", "kernel"), ("sinkhorn", "learned pattern")):
        edge = circle_of(figure, label).get_edgecolor()[0][:3]
        assert tuple(edge) == pytest.approx(to_rgb(LIGHT.families[family]))


def test_oracles_without_a_speed_are_lines_with_their_error(run: Any, words: Words) -> None:
    rows = [
        run.row("performer", time_median_s=0.1, peak_bytes=1e6),
        run.row("local", time_median_s=0.2, peak_bytes=1e6),
    ]
    at = {"sweep": "error", "error_kind": "approximation", "trivial_error": 0.62}
    rows += [
        run.row(label, rel_error=e, **at) for label, e in (("performer", 0.3), ("local", 0.9), ("mean-value", 0.62))
    ]
    rows += [run.row("oracle-topk", **{**at, "sweep": "oracles"}, rel_error=0.04, error_draws=1)]
    figure = draw_tradeoff(run.table(rows))
    said = words(figure)
    assert "oracle-topk: 0.04" in said
    assert "answering mean(V): 0.62; no better below" in said
    assert "mean-value" not in said
    low, high = figure.axes[0].get_ylim()
    dotted = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    assert len(dotted) == 2
    assert all(low < y < high for y in dotted)


def test_a_variant_with_one_setting_stands_without_it_and_the_note_tells(run: Any, words: Words) -> None:
    labels = ("local:window=50", "performer:features=64", "performer:features=128")
    rows = [run.row(label, time_median_s=0.1 * (k + 1), peak_bytes=1e6) for k, label in enumerate(labels)]
    said = words(draw_tradeoff(run.table(rows))).splitlines()
    assert {"local", "performer:features=64", "performer:features=128"} <= set(said)
    assert "Settings: local:window=50." in said


def panels_of(figure: Figure) -> list[Any]:
    return [ax for ax in figure.axes if ax.get_xlabel()]


def test_rows_that_differ_have_a_panel_each_and_the_one_with_few_variants_comes_last(run: Any, words: Words) -> None:
    rows = [run.row(label, time_median_s=0.1, peak_bytes=1e6) for label in run.labels[:6]]
    rows += [run.row(label, time_median_s=0.2, peak_bytes=1e6, level="layer") for label in run.labels[:2]]
    figure = draw_tradeoff(run.table(rows))
    assert [len(ax.collections) for ax in panels_of(figure)] == [6, 2]
    said = words(figure).splitlines()
    assert said.index("attention operator") < said.index("attention layer")
    (alone,) = panels_of(draw(run.table(rows), figures=["tradeoff"], only={"level": "layer"})["tradeoff"])
    assert len(alone.collections) == 2


def test_the_front_joins_only_what_was_measured_alike(run: Any) -> None:
    rows = []
    for dtype, factor in (("float32", 1.0), ("bfloat16", 0.1)):
        for label, time, e in (("performer", 0.3, 0.2), ("bigbird", 0.2, 0.5)):
            at = {"dtype": dtype, "error_kind": "approximation", "trivial_error": 0.6}
            rows += [run.row(label, time_median_s=factor * time, peak_bytes=1e6, rel_error=e, **at)]
    figure = draw_tradeoff(run.table(rows))
    ends = [
        sorted({round(float(x), 3) for x in line.get_xdata()})
        for ax in panels_of(figure)
        for line in ax.lines
        if line.get_label() == FRONT
    ]
    assert sorted(ends) == [[3.333, 5.0], [33.333, 50.0]]


def test_several_runs_are_told_apart_and_each_has_its_own_errors(run: Any, words: Words) -> None:
    rows = []
    for name, error in (("monday", 0.2), ("tuesday", 0.5)):
        at = {"error_kind": "approximation", "trivial_error": 0.6}
        rows += [run.row("performer", time_median_s=0.3, peak_bytes=1e6) | {"run": name}]
        rows += [run.row("performer", sweep="error", rel_error=error, **at) | {"run": name}]
    frame = pd.concat([run.table(rows), pd.DataFrame({"run": [row["run"] for row in rows]})], axis=1)
    figure = draw_tradeoff(frame)
    assert {"monday", "tuesday"} <= set(words(figure).splitlines())
    first, second = (float(ax.collections[0].get_offsets()[0][1]) for ax in panels_of(figure))
    assert first > second  # up is better


def test_circles_of_two_panels_have_one_scale_of_memory(run: Any) -> None:
    rows = [run.row("local", time_median_s=0.1, peak_bytes=4e6)]
    rows += [run.row("local", time_median_s=0.1, peak_bytes=1e6, causal=True)]
    sizes = [ax.collections[0].get_sizes()[0] for ax in panels_of(draw_tradeoff(run.table(rows)))]
    assert sorted(sizes) == pytest.approx([LARGEST / 4, LARGEST])


def test_the_measured_row_counts_and_the_newest_of_several(run: Any) -> None:
    old = run.row("local", time_median_s=0.5, peak_bytes=1e6, started_at="2026-11-19T00:00:00")
    new = run.row("local", time_median_s=0.1, peak_bytes=1e6, started_at="2026-11-20T00:00:00")
    broken = run.failed("crash", "signal 9", "local", started_at="2026-11-21T00:00:00")
    rows = settings(timed(run.table([new, broken, old])))[0].rows
    assert rows["time_median_s"].tolist() == [0.1]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"softmax": 0.060}, "softmax is the only method here"),
        ({"performer": 0.060}, "performer is the only method here"),
        ({"softmax": 0.060, "sdpa": 0.021, "chunked": 0.060}, "sdpa is the fastest of 3 exact methods"),
        (
            {"softmax": 0.060, "sdpa": 0.021, "chunked": 0.022},
            "sdpa is the fastest of 3 exact methods, not told apart from chunked",
        ),
    ],
)
def test_the_title_of_few_or_exact_methods_is_what_their_intervals_allow(
    run: Any, words: Words, seconds: dict[str, float], said: str
) -> None:
    rows = []
    for label, time in seconds.items():
        times = {"time_median_s": time, "time_ci_low_s": 0.9 * time, "time_ci_high_s": 1.1 * time, "peak_bytes": 1e6}
        rows.append(run.row(label, **times, examples_per_s=1 / time, rel_error=1e-7, error_kind="exact"))
    assert said in words(draw_tradeoff(run.table(rows))).splitlines()
