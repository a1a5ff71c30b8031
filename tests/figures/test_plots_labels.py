"""Nothing that is written in the bubble plot lies on anything else: measured in the rendered figure."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.path import Path as Line
from matplotlib.transforms import Bbox

from attnbench.figures.kit.labels import place_labels
from attnbench.figures.kit.page import laid_out
from attnbench.figures.kit.palette import drawn_in
from attnbench.figures.tradeoff import draw_tradeoff
from tests.committed import rows_of


def boxes_of(ax: Axes) -> list[tuple[str, Bbox]]:
    return [(text.get_text(), text.get_window_extent()) for text in ax.texts if text.get_text()]


def lines_of(ax: Axes) -> list[Line]:
    """Error bars, levels, the front, the lines from names to circles: in pixels."""
    return [line.get_path().transformed(line.get_transform()) for line in ax.lines]


def circles_of(ax: Axes) -> list[tuple[float, float, float]]:
    """x, y and radius in pixels."""
    dpi = ax.get_figure(root=True).dpi  # type: ignore[union-attr]  # it has one
    return [
        (
            *ax.transData.transform(np.asarray(drawn.get_offsets())[0]),
            math.sqrt(drawn.get_sizes()[0] / math.pi) * dpi / 72,
        )
        for drawn in ax.collections
        if isinstance(drawn, PathCollection)
    ]


def collisions(ax: Axes) -> list[str]:
    """What is written on a line, on a circle, on something written, or beyond the axes."""
    ax.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]  # it has one
    boxes, frame = boxes_of(ax), ax.get_window_extent()
    found = [f"{a} on {b}" for (a, one), (b, other) in combinations(boxes, 2) if Bbox.intersection(one, other)]
    for name, box in boxes:
        found += [f"{name} on a line" for line in lines_of(ax) if line.intersects_bbox(box, filled=False)]
        for x, y, radius in circles_of(ax):
            near = np.clip((x, y), (box.x0, box.y0), (box.x1, box.y1))
            found += [f"{name} on a circle"] * bool(math.hypot(*(near - (x, y))) < radius)
        if box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1:
            found.append(f"{name} beyond the axes")
    return found


def panels(figure: Figure) -> list[Axes]:
    """The axes with circles and a scale, which the key beside them has not."""
    return [ax for ax in figure.axes if ax.get_xlabel()]


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("lra-cpu", {}),
    ("lra-h200", {"n": 1024}),
    ("lra-cpu", {"x": "time_median_s"}),
    ("lra-h200", {"y": "cosine"}),
    ("lra-cpu", {"inputs": "gaussian:logit_std=2"}),
    ("lra-h200", {"overlay": "published"}),
]
OTHER_RUN = {"lra-cpu": "lra-h200", "lra-h200": "lra-cpu"}


@pytest.mark.parametrize(
    ("run", "options"),
    [*WAYS, *(pytest.param(OTHER_RUN[run], options, marks=pytest.mark.slow) for run, options in WAYS)],
    ids=str,
)
def test_in_the_committed_runs_no_name_lies_on_anything(run: str, options: dict[str, Any]) -> None:
    for ax in panels(draw_tradeoff(rows_of(run), **options)):
        assert len(boxes_of(ax)) > 10
        assert collisions(ax) == []


@pytest.mark.parametrize(
    ("run", "y"),
    [
        ("lra-cpu", "rel_error"),
        ("lra-h200", "cosine"),
        pytest.param("lra-cpu", "cosine", marks=pytest.mark.slow),
        pytest.param("lra-h200", "rel_error", marks=pytest.mark.slow),
    ],
)
def test_names_in_a_column_lie_on_nothing(run: str, y: str) -> None:
    with laid_out("column"):
        figure = draw_tradeoff(rows_of(run), y=y)
    (panel,) = panels(figure)
    assert collisions(panel) == []


@pytest.mark.parametrize("dpi", [60, 300])
def test_nor_at_another_resolution_or_in_dark(dpi: int) -> None:
    with drawn_in("dark"):
        figure = draw_tradeoff(rows_of("lra-cpu"))
    figure.set_dpi(dpi)
    assert collisions(panels(figure)[0]) == []


def random_rows(run: Any, seed: int) -> list[dict[str, Any]]:
    """Up to two dozen variants of any speed, error, spread and size, many of them close to each other."""
    draw = np.random.default_rng(seed)
    centre, families = draw.uniform(-4, 1), ("exact", "kernel", "low rank", "reference", "fixed pattern")
    rows = []
    for i in range(int(draw.integers(3, 24))):
        label = f"{'abcdefghijklmnopqrstuvwxyz'[i]}-variant"[: int(draw.integers(3, 10))]
        label += f":features={draw.integers(9, 999)}" * bool(draw.random() < 0.2)
        family = str(draw.choice(families))
        time, spread = 10 ** (centre + draw.normal(0, 0.3)), 1 + abs(draw.normal(0, 0.15))
        rows.append(
            run.row(
                label, family=family, time_median_s=time, time_ci_low_s=time / spread, time_ci_high_s=time * spread,
                peak_bytes=10 ** draw.uniform(6, 9),
            )
        )  # fmt: skip
        kind = {"exact": "exact"}.get(family, str(draw.choice(["approximation", "approximation", "distance"])))
        error = 10 ** draw.normal(-0.5, 0.3)
        at = {"sweep": "error", "error_kind": kind, "trivial_error": 0.6, "family": family}
        rows.append(run.row(label, **at, rel_error=error, rel_error_std=error * draw.uniform(0, 0.4)))
    return rows


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_in_random_tables_no_name_lies_on_anything(run: Any, seed: int) -> None:
    (ax,) = panels(draw_tradeoff(run.table(random_rows(run, seed))))
    assert collisions(ax) == []


def test_names_in_a_crowd_are_set_apart_and_each_has_a_line_to_its_circle() -> None:
    figure = Figure(figsize=(6, 4))
    ax = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 10)
    angles = np.arange(18) * 2.4
    x, y = 5 + 0.13 * np.sqrt(angles) * np.cos(angles), 5 + 0.2 * np.sqrt(angles) * np.sin(angles)
    ax.scatter(x[:1], y[:1], s=50)
    place_labels(ax, [f"variant-{k}" for k in range(18)], list(x), list(y), [4.0] * 18)
    assert collisions(ax) == []
    centres = ax.transData.transform(np.column_stack([x, y]))
    gaps = [
        math.hypot(*(np.clip(centre, (box.x0, box.y0), (box.x1, box.y1)) - centre)) - 4 * figure.dpi / 72
        for centre, (_, box) in zip(centres, boxes_of(ax), strict=True)
    ]
    assert len(ax.lines) == sum(gap > 8 for gap in gaps) > 6


def test_the_check_itself_sees_each_kind_of_collision() -> None:
    figure = Figure(figsize=(4, 4))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 10)
    ax.text(1, 1, "first")
    ax.text(1.2, 1.1, "second")
    ax.text(5, 5, "struck")
    ax.plot([4, 7], [5.1, 5.1])
    ax.text(2, 8, "covered")
    ax.scatter([2.3], [8.1], s=40)
    ax.text(9.8, 9.8, "outside")
    wanted = ["first on second", "struck on a line", "covered on a circle", "outside beyond the axes"]
    assert collisions(ax) == wanted
