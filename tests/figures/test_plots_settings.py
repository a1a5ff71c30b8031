"""Which rows share a series, what tells others apart, and the mark of a variant that is this project's own form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from attnbench.figures import figure_kinds
from attnbench.results.frame.settings import PANELS, settings, timed
from attnbench.results.frame.words import difference, where

Words = Callable[[Figure], str]


def two(run: Any, **column: Any) -> list[dict[str, Any]]:
    return [run.row("linear", time_median_s=0.1), run.row("linear", time_median_s=0.2, **column)]


@pytest.mark.parametrize(
    ("column", "names"),
    [
        ({"padding": 0.5}, ("no padding", "50% padding")),
        ({"dtype": "bfloat16"}, ("float32", "bfloat16")),
        ({"causal": True}, ("not causal", "causal")),
        ({"bias": "alibi"}, ("no bias", "bias alibi")),
        ({"head_dim": 32}, ("head width 64", "head width 32")),
        ({"heads": 1}, ("4 heads", "1 head")),
        ({"kv_len": 77}, ("as many keys", "77 keys")),
        ({"compile": True}, ("not compiled", "compiled")),
        ({"threads": 1}, ("2 threads", "1 thread")),
        ({"torch_version": "2.9.0"}, ("torch 2.13.0", "torch 2.9.0")),
    ],
    ids=str,
)
def test_rows_that_differ_in_one_thing_are_two_settings_named_after_it(
    run: Any, column: dict[str, Any], names: tuple[str, str]
) -> None:
    found = settings(timed(run.table(two(run, **column))))
    assert {one.name for one in found} == {one.about for one in found} == set(names)
    assert [len(one.rows) for one in found] == [1, 1]


def test_one_setting_has_no_name(run: Any) -> None:
    (alone,) = settings(timed(run.table([run.row("linear", time_median_s=0.1), run.row("local", time_median_s=0.1)])))
    assert (alone.name, alone.about) == ("", "")


def test_a_name_has_the_fewest_words_that_tell_settings_apart_and_about_has_all() -> None:
    table = pd.DataFrame(
        {"run": ["a", "b", "b"], "dtype": ["float32", "float32", "bfloat16"], "batch": [1, 32, 8], "heads": [4, 4, 4]}
    )
    assert difference(table) == [
        ("a, float32", "a · float32 · batch 1"),
        ("b, float32", "b · float32 · batch 32"),
        ("b, bfloat16", "b · bfloat16 · batch 8"),
    ]


def test_the_subtitle_says_only_what_is_true_of_all_that_is_drawn(run: Any) -> None:
    what, on = where(run.table(two(run, dtype="bfloat16", machine_id="other")))
    assert what == "lra · batch 1 · 4 heads × 64 · attention operator · forward pass"
    assert on == "cpu · 2 threads · process tuned · torch 2.13.0 · 2026-11-20"
    assert "50% padding" in where(run.table(two(run, padding=0.5)[1:]))[0]


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ("gg", "as CUDA graphs"),
        ("ee", "launched by the host"),
        ("ge", "as CUDA graphs, but by the host: linear (n = 1024)"),
    ],
)
def test_the_subtitle_says_how_a_gpu_was_launched(run: Any, ways: str, said: str) -> None:
    launched = [{"g": "graph", "e": "eager"}[way] for way in ways]
    rows = [run.row(name, device="cuda", launched=one) for name, one in zip(("local", "linear"), launched, strict=True)]
    assert f" · {said} · 2026-11-20" in where(run.table(rows))[1]


def test_a_cell_too_large_for_the_tuned_allocator_stays_in_its_line_and_the_subtitle_names_it(
    run: Any, words: Words, linformer: pd.DataFrame
) -> None:
    large = (linformer["label"] == "softmax") & (linformer["seq_len"] == 16384)
    figure = figure_kinds()["speedup"].draw(linformer.assign(process=linformer["process"].mask(large, "as-shipped")))
    assert "allocator as shipped for large cells: softmax (n = 16384)" in " ".join(words(figure).split())
    assert "no\nsoftmax" not in words(figure)
    assert "allocator as shipped" not in words(figure_kinds()["speedup"].draw(linformer))


@pytest.mark.parametrize("apart", [{"run": "b"}, {"threads": 1}, {"suite": "other"}], ids=str)
def test_another_run_as_shipped_is_no_large_cell_of_this_one(run: Any, apart: dict[str, Any]) -> None:
    name = apart.pop("run", "a")
    rows = [run.row("linear", time_median_s=0.1), run.row("linear", time_median_s=0.2, process="as-shipped", **apart)]
    found = settings(timed(run.table(rows).assign(run=["a", name])))
    assert sorted(one.rows["process"].iloc[0] for one in found) == ["as-shipped", "tuned"]


@pytest.mark.parametrize("figure", ["tradeoff", "scaling", "catalogue", "speedup", "error", "map"])
def test_an_own_form_has_a_dagger_and_one_footnote_that_says_what_it_means(
    run: Any, words: Words, performer: pd.DataFrame, linformer: pd.DataFrame, lra: pd.DataFrame, figure: str
) -> None:
    frame = {"speedup": linformer, "error": performer, "map": performer}.get(figure, lra)
    marked = frame["variant"].isin(["linformer", "performer"])
    frame = frame.assign(own_form=marked.map({True: "sums where the paper multiplies", False: ""}))
    said = words(figure_kinds()[figure].draw(frame))
    assert "linformer†" in said or "performer†" in said or "performer:features=64†" in said
    assert said.count("† not the form that the source describes; attnbench show NAME says what differs") == 1
    assert "softmax†" not in said
    assert "†" not in words(figure_kinds()[figure].draw(frame.assign(own_form="")))


def test_no_more_settings_are_drawn_than_have_room(run: Any) -> None:
    rows = [
        row for k in range(PANELS + 3) for n in (64, 128) for row in [run.row(f"v{k}", seq_len=n, time_median_s=1.0)]
    ]
    rows = [row | {"seed": int(row["label"][1:])} for row in rows]
    figure = figure_kinds()["scaling"].draw(run.table(rows))
    assert len([ax for ax in figure.axes if ax.get_ylabel() == "median time"]) == PANELS
