from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures.error import draw_error
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.map import draw_map
from attnbench.figures.speedup import draw_speedup
from attnbench.results.frame.label_options import logit_std

Words = Callable[[Figure], str]


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("gaussian:logit_std=2", 2.0),
        ("gaussian:logit_std=0.5,x=1", 0.5),
        ("listops", None),
        ("file:q.safetensors", None),
        ("?", None),
    ],
)
def test_the_logit_std_is_read_from_the_label_of_the_inputs(label: str, value: float | None) -> None:
    assert logit_std(label) == value


def test_errors_are_drawn_over_features_and_over_logit_std(performer: pd.DataFrame, words: Words) -> None:
    figure = draw_error(performer)
    first, second = (ax for ax in figure.axes if ax.get_xlabel())
    assert "features (performer)" in first.get_xlabel()
    assert "standard deviation of the logits" in second.get_xlabel()
    said = words(figure)
    for part in ("performer trig, iid", "answering mean(V)", "oracle-lowrank", "oracle-topk"):
        assert part in said
    assert "exact up to rounding: softmax; other operators: linear" in said
    assert "inputs gaussian:logit_std=1" in said


def test_the_line_of_the_trivial_answer_is_its_error(performer: pd.DataFrame) -> None:
    (ax,) = [ax for ax in draw_error(performer).axes if ax.get_xlabel().startswith("standard")]
    (dotted,) = [line for line in ax.lines if line.get_linestyle() == ":"]
    x, y = np.asarray(dotted.get_xdata()), np.asarray(dotted.get_ydata())
    assert y == pytest.approx(np.sqrt(1 - np.exp(-(x**2))))


def test_the_values_drawn_are_those_of_the_table(performer: pd.DataFrame) -> None:
    (ax,) = [ax for ax in draw_error(performer, inputs="gaussian:logit_std=2").axes if "features" in ax.get_xlabel()]
    rows = performer[(performer["inputs"] == "gaussian:logit_std=2") & (performer["variant"] == "performer")]
    drawn = {round(float(y), 12) for line in ax.lines for y in np.atleast_1d(line.get_ydata())}
    assert {round(value, 12) for value in rows["rel_error"].dropna()} <= drawn


def test_inputs_of_a_trained_model_stand_in_a_column_beside_the_logit_stds(run: Any, words: Words) -> None:
    at = {"suite": "s", "sweep": "e", "seq_len": 2048, "error_kind": "approximation", "trivial_error": 0.5}
    kinds = ("gaussian:logit_std=0.5", "gaussian:logit_std=2", "listops")
    rows = [run.row(name, inputs=kind, rel_error=0.1, **at) for name in ("local", "performer") for kind in kinds[:2]]
    rows += [run.row(name, inputs=kinds[2], rel_error=0.3, **at) for name in ("local", "performer")]
    figure = draw_error(run.table(rows))
    (ax,) = [ax for ax in figure.axes if ax.get_xlabel().startswith("standard")]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0.5", "2", "listops"]
    assert "Right of the upright line: other inputs" in words(figure)
    places = [float(line.get_xdata()[0]) for line in ax.lines if list(line.get_ydata()) == [0.3]]
    assert len(set(places)) == 2  # side by side
    assert all(2 < place < 2 * ax.get_xticks()[-1] for place in places)


def test_an_option_inputs_or_length_that_no_row_has_is_refused(performer: pd.DataFrame) -> None:
    for options, message in (
        ({"option": "window"}, "no option 'window' varies in the error rows; there are: features, rank"),
        ({"inputs": "cats"}, "no error rows with inputs 'cats'"),
        ({"n": 7}, "no error rows at n = 7; there are: 2048"),
    ):
        with pytest.raises(UsageError) as caught:
            draw_error(performer, **options)
        assert message in str(caught.value)


def test_errors_at_one_setting_are_nothing_to_draw_a_line_through(run: Any) -> None:
    at = {"sweep": "error", "error_kind": "approximation", "trivial_error": 0.5}
    frame = run.table([run.row("performer", rel_error=0.3, **at)])
    with pytest.raises(NothingToDraw, match="needs errors at two options or logit_std"):
        draw_error(frame)
    frame = run.table([run.row("performer", rel_error=math.nan, **at), run.failed("nonfinite", "NaN", "local", **at)])
    with pytest.raises(NothingToDraw):
        draw_error(frame)


def test_a_map_has_a_panel_for_each_kernel_and_projection(performer: pd.DataFrame, words: Words) -> None:
    figure = draw_map(performer)
    titles = {ax.get_title(loc="left") for ax in figure.axes} - {""}
    assert len(titles) == 6
    assert "kernel trig, projection iid" in titles
    said = words(figure)
    assert "standard deviation of the logits" in said
    assert "nonfinite: performer with 8 settings — output holds NaN or infinity" in said


def test_a_cell_of_the_map_holds_its_error_and_is_blue_only_below_the_mean(performer: pd.DataFrame) -> None:
    (ax,) = [ax for ax in draw_map(performer).axes if ax.get_title(loc="left") == "kernel positive, projection iid"]
    texts = {text.get_position(): text.get_text() for text in ax.texts}
    patches = {patch.get_xy(): patch.get_facecolor() for patch in ax.patches}
    rows = performer[performer["label"] == "performer:features=64,kernel=positive,projection=iid"]
    for column, std in enumerate((0.25, 0.5, 1, 2, 4, 8)):
        row = rows[rows["inputs"] == f"gaussian:logit_std={std}"].iloc[0]
        assert float(texts[column + 0.5, 2.5]) == pytest.approx(row["rel_error"], rel=0.06)
        red, _, blue, _ = patches[column, 2]
        assert (blue > red) == (row["rel_error"] < row["trivial_error"])


def test_a_map_of_rows_whose_defaults_are_unknown_says_how_many_are_left_out(run: Any, words: Words) -> None:
    rows = run.performer_rows((16, 64), (0.5, 2))
    at = {"suite": "performer", "sweep": "map", "seq_len": 2048, "error_kind": "approximation", "trivial_error": 0.5}
    rows.append(run.row("performer", inputs="gaussian:logit_std=2", rel_error=0.1, **at))
    assert "Not drawn, since without features or on other inputs: 1." in words(draw_map(run.table(rows)))


def test_inputs_that_differ_in_more_than_logit_std_share_no_line_and_no_map(run: Any, words: Words) -> None:
    rows = run.performer_rows((16, 64), (0.5, 2))
    at = {"suite": "performer", "sweep": "map", "seq_len": 2048, "error_kind": "approximation", "trivial_error": 0.5}
    label = "performer:features=16,kernel=positive,projection=iid"
    rows.append(run.row(label, inputs="clustered:clusters=4,logit_std=1", rel_error=77.0, **at))
    table = run.table(rows)
    assert "clustered" not in words(draw_error(table))
    said = words(draw_map(table))
    assert "Not drawn, since without features or on other inputs: 1." in said
    assert "77" not in said


def test_a_third_option_gets_panels_of_its_own_and_no_row_is_lost(run: Any) -> None:
    rows = []
    at = {"suite": "performer", "sweep": "map", "error_kind": "approximation", "trivial_error": 0.5, "rel_error": 0.2}
    kinds = (
        "",
        ",kernel=trig",
        ",projection=iid",
        ",kernel=trig,projection=iid",
        ",norms=quantile",
        ",kernel=trig,norms=quantile",
    )
    for std in (0.5, 2):
        for r in (16, 64):
            rows += [
                run.row(f"performer:features={r}{kind}", inputs=f"gaussian:logit_std={std}", **at) for kind in kinds
            ]
    figure = draw_map(run.table(rows))
    numbers = [text for ax in figure.axes for text in ax.texts if text.get_text() == "0.2"]
    assert len(numbers) == len(rows)
    titles = {ax.get_title(loc="left") for ax in figure.axes} - {""}
    assert len(titles) == 6
    assert "kernel default, norms default, projection iid" in titles


def test_an_approximation_that_leaves_nothing_out_does_not_stretch_the_axis(run: Any, words: Words) -> None:
    rows = []
    for std in (0.5, 2):
        at = {"inputs": f"gaussian:logit_std={std}", "error_kind": "approximation", "trivial_error": 0.5}
        rows += [run.row("local", rel_error=3e-7, **at), run.row("performer", rel_error=0.3 * std, **at)]
    figure = draw_error(run.table(rows))
    assert figure.axes[0].get_ylim()[0] > 0.05
    assert "exact up to rounding: local" in words(figure)


def test_no_map_without_two_sizes_and_two_logit_stds(lra: pd.DataFrame) -> None:
    with pytest.raises(NothingToDraw, match="needs errors at two sizes and two logit_std"):
        draw_map(lra)
    with pytest.raises(UsageError, match="no map of 'linformer'"):
        draw_map(lra, variant="linformer")


def test_the_speed_up_is_softmax_over_the_variant(linformer: pd.DataFrame) -> None:
    figure = draw_speedup(linformer)
    time, memory = figure.axes[:2]
    at = linformer[linformer["seq_len"] == 4096].set_index("label")
    for ax, column in ((time, "time_median_s"), (memory, "peak_bytes")):
        texts = {text.get_position(): text.get_text() for text in ax.texts}
        wanted = at.loc["softmax", column] / at.loc["linformer:rank=256", column]
        assert float(texts[1.5, 3.5].rstrip("×")) == pytest.approx(wanted, rel=0.05)


def test_a_speed_up_that_the_intervals_do_not_settle_is_in_italics(run: Any) -> None:
    rows = run.linformer_rows((128, 256), (512, 1024))
    for row in rows:
        if row["label"] == "linformer:rank=128" and row["seq_len"] == 512:
            row |= {"time_ci_low_s": 1e-9, "time_ci_high_s": 1e9}
        elif row["time_median_s"]:
            row |= {"time_ci_low_s": row["time_median_s"], "time_ci_high_s": row["time_median_s"]}
    texts = draw_speedup(run.table(rows)).axes[0].texts
    assert [text.get_position() for text in texts if text.get_fontstyle() == "italic"] == [(0.5, 0.5)]


def test_where_softmax_or_the_variant_failed_the_cell_says_so(linformer: pd.DataFrame, words: Words) -> None:
    said = words(draw_speedup(linformer))
    assert "softmax oom" in said
    assert "unsupported" in said
    assert "oom: softmax (n = 32768, 65536) — needs more than the limit of 12.0 GiB" in said


def test_speed_up_options_that_no_row_has_are_refused(linformer: pd.DataFrame, lra: pd.DataFrame) -> None:
    with pytest.raises(NothingToDraw, match="needs softmax or sdpa beside two sizes at two lengths"):
        draw_speedup(lra[lra["variant"] != "performer"])
    with pytest.raises(UsageError, match="no rows of the baseline 'sdpa'"):
        draw_speedup(linformer, baseline="sdpa")
    with pytest.raises(UsageError, match="'local' was not timed at several sizes and lengths; there are: linformer"):
        draw_speedup(linformer, variant="local")


def test_a_variant_of_which_one_setting_is_another_operator_is_not_said_to_be_left_out(run: Any, words: Words) -> None:
    at = {"sweep": "error", "seq_len": 512, "trivial_error": 0.9}
    rows = []
    for std in (0.5, 2.0):
        here = at | {"inputs": f"gaussian:logit_std={std}"}
        rows += [
            run.row("performer", **here, rel_error=std, error_kind="approximation"),
            run.row("performer:kernel=relu", **here, rel_error=std, error_kind="distance"),
            run.row("linear:map=elu", **here, rel_error=std, error_kind="distance"),
        ]
    said = words(draw_error(run.table(rows)))
    assert "Left out — other operators: performer:kernel=relu, linear." in said


def test_what_has_one_setting_and_no_line_is_named_with_its_error(run: Any, words: Words) -> None:
    at = {"sweep": "error", "seq_len": 512, "trivial_error": 0.9, "error_kind": "approximation", "inputs": "listops"}
    rows = [run.row(f"performer:features={size}", **at, rel_error=0.5) for size in (16, 64)]
    said = words(draw_error(run.table([*rows, run.row("nystrom", **at, rel_error=0.0609)])))
    assert "Left out — at one setting, which makes no line: nystrom (0.0609 on listops)." in said
    assert "Nearest to exact attention: performer, with an error of 0.5 on inputs listops" in said


def at(n: int, frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    return frame.assign(seq_len=n, kv_len=n, test_len=n, **columns)


@pytest.mark.parametrize("draw", [draw_error, draw_map])
def test_a_length_that_only_one_of_several_settings_has_is_drawn_of_that(
    performer: pd.DataFrame, draw: Callable[..., Figure], words: Words
) -> None:
    frame = pd.concat([performer, at(512, performer, dtype="bfloat16")], ignore_index=True)
    said = words(draw(frame, n=512))
    assert "n = 512" in said
    assert "bfloat16" in said


@pytest.mark.parametrize("draw", [draw_error, draw_map])
def test_a_length_at_which_nothing_was_measured_is_not_the_default(
    performer: pd.DataFrame, draw: Callable[..., Figure], words: Words
) -> None:
    longer = at(4096, performer, status="oom", reason="needs 9 GiB", rel_error=math.nan)
    assert "n = 2048" in words(draw(pd.concat([performer, longer], ignore_index=True)))


def test_a_map_at_a_length_is_of_a_variant_that_has_it(performer: pd.DataFrame, words: Words) -> None:
    other = performer[(performer["variant"] == "performer") & (performer["inputs"] != "gaussian:logit_std=8")]
    other = at(512, other, variant="rfa", label=other["label"].str.replace("performer", "rfa"))
    assert "rfa is better" in words(draw_map(pd.concat([performer, other], ignore_index=True), n=512))


def test_an_option_of_zero_has_a_place_left_of_the_others(run: Any) -> None:
    at = {"sweep": "error", "error_kind": "approximation", "trivial_error": 0.9}
    rows = [run.row(f"bigbird:random_blocks={count}", rel_error=0.5 / (1 + count), **at) for count in (0, 1, 2, 4)]
    (ax,) = [ax for ax in draw_error(run.table(rows)).axes if ax.get_xlabel()]
    (line,) = [line for line in ax.lines if len(line.get_xdata()) == 4]
    assert list(line.get_xdata()) == [0.5, 1, 2, 4]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "1", "2", "4"]
