"""The Long Range Arena figure: speed to the right, agreement with exact attention upwards, memory as area.

After figure 3 of Tay et al. 2020, "Long Range Arena", arXiv:2011.04006. There y is the average score on the tasks; here
every number comes from one's own run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from attnbench.errors import UsageError
from attnbench.plots.agreement import Y_AXES, Agreement, agreement, kind_of
from attnbench.plots.bands import Layout, arrange, draw_bands
from attnbench.plots.bubbles import draw_circles, draw_front, draw_keys, pareto, round_sizes
from attnbench.plots.catalogue import applies as too_many_to_name
from attnbench.plots.labels import place_labels
from attnbench.plots.page import draw_nothing, new_page, shorten
from attnbench.plots.published import draw_published
from attnbench.plots.setting import Chosen, choose, failures, short_names, timed, where
from attnbench.plots.style import FAMILY_COLOURS, INK, OTHER_COLOUR, SMALL_SIZE, in_style
from attnbench.plots.ticks import halves, log_axis, padded, plain, trimmed
from attnbench.units import format_bytes

_X = {
    "examples_per_s": "examples per second (log2 scale)",
    "tokens_per_s": "tokens per second (log2 scale)",
    "time_median_s": "seconds per call (log2 scale, faster to the right)",
}
_TRIVIAL = "answering mean(V)"
_FRONT = (
    "Dashed steps: the Pareto front, methods than which no other is both faster and closer. It joins exact methods and "
    "approximations of softmax attention that do better than answering mean(V), without the reference lines."
)


def applies(frame: pd.DataFrame) -> bool:
    """Something was timed, or failed to be, and no more than a scatter plot can name."""
    return not timed(frame).empty and not too_many_to_name(frame)


@in_style
def draw_tradeoff(
    frame: pd.DataFrame,
    *,
    n: int | None = None,
    x: str = "examples_per_s",
    y: str = "rel_error",
    level: str | None = None,
    pass_: str | None = None,
    inputs: str | None = None,
    overlay: str | None = None,
) -> Figure:
    """Bubble plot of one length: x speed (log2), y agreement, area peak memory, with the Pareto front.

    Args:
        frame: rows as :func:`attnbench.plots.load.read_results` gives them.
        n: the length; by default the longest at which every variant that ever ran was measured (or most of them).
        x: ``examples_per_s``, ``tokens_per_s`` or ``time_median_s``; right is faster.
        y: ``rel_error``, ``max_abs_error``, ``cosine`` or ``score``; up is better.
        level, pass_: which speed rows; by default those of the whole model and of training, where there are any.
        inputs: which error rows, by label or name; by default ``listops``, else the first.
        overlay: ``published`` adds a panel with the paper's own measurements.

    Raises:
        UsageError: an option whose value does not exist.
        ResultsError: not a results table.
    """
    for name, value, known in (("x", x, list(_X)), ("y", y, list(Y_AXES)), ("overlay", overlay, [None, "published"])):
        if value not in known:
            raise UsageError(f"{name} must be {' or '.join(one for one in known if one)}, not {value!r}")
    title = f"Speed, memory and {'score' if y == 'score' else 'agreement with exact attention'}"
    prefer = {"level": ("model", "layer", "operator"), "pass": ("training", "forward")}
    speed = choose(timed(frame), prefer, also_same=("inputs",), level=level, pass_=pass_)
    measured = speed.ok[np.isfinite(speed.ok[x]) & (speed.ok[x] > 0)]
    if n is not None and n not in set(speed.rows["seq_len"]):
        there = ", ".join(str(one) for one in sorted(set(speed.rows["seq_len"])))
        raise UsageError(f"no rows at n = {n}; there are: {there or 'none'}")
    if n is None and len(measured):
        counts = measured.groupby("seq_len")["label"].nunique()
        n = int(counts[counts == counts.max()].index.max())
    here = measured[measured["seq_len"] == n]
    if here.empty or n is None:
        return draw_nothing(title, where(speed.rows, n), failures(speed.rows) or ["no row holds a time"])
    agreed = agreement(frame, y, inputs, speed, n)
    return _draw(_points(here, x, agreed), title, speed, agreed, x, n, overlay)


def _points(here: pd.DataFrame, x: str, agreed: Agreement) -> pd.DataFrame:
    """One row for each label: x with its interval, memory, y, kind and the name to write."""
    points = here[["label", "variant", "family", "target"]].assign(x=here[x], memory=here["peak_bytes"])
    for end, other in (("low", "high"), ("high", "low")):
        ratio = here[f"time_ci_{end if x == 'time_median_s' else other}_s"] / here["time_median_s"]
        points[f"x_{end}"] = here[x] * ratio if x == "time_median_s" else here[x] / ratio
    points = points.merge(agreed.rows.drop(columns="family").drop_duplicates("label"), on="label", how="left")
    known = zip(points["error_kind"], points["target"], points["y"].astype(float), strict=True)
    points["kind"] = [kind_of(kind, target, value, agreed.column) for kind, target, value in known]
    names, _ = short_names(points)
    points["name"] = [shorten(names[label], 1.9, SMALL_SIZE) for label in points["label"]]
    return points


def _draw(
    points: pd.DataFrame, title: str, speed: Chosen, agreed: Agreement, x: str, n: int, overlay: str | None
) -> Figure:
    about = where(speed.rows[speed.rows["seq_len"] == n], n)
    about.append(agreed.said)
    log = agreed.column in ("rel_error", "max_abs_error")
    fair = _competing(points, agreed.trivial)
    front = _front(fair, log=log, fast_low=x == "time_median_s")
    every = speed.rows.loc[speed.rows["family"] != "reference", "label"].nunique()
    matched = f"{_FRONT} {len(fair)} of {every} compete, {every - len(fair)} left out."
    # More than two dozen names need a taller page.
    room = 4.3 + 0.13 * max(0, len(points) - 24)
    page = new_page(
        title,
        about,
        [*([matched] if len(front) > 1 else []), *_notes(points, speed, n)],
        width=13.6 if overlay else 8.0,
        room=room,
    )
    right = 6.65
    left, bottom = page.left + 0.96, page.bottom + 0.42
    width, height = right - left, page.top - bottom
    limits = padded(pd.concat([points["x"], points["x_low"], points["x_high"]]), share=0.1)
    limits = limits[::-1] if x == "time_median_s" else limits

    def place(value: float) -> float:
        return math.log(value / limits[0]) / math.log(limits[1] / limits[0]) * width

    lines = _lines(points, agreed)
    layout = arrange(points, place, height, log=log, also=list(lines.values()))
    ax = page.axes(left, bottom, width, height)
    log_axis(ax, "x", limits, text=halves)
    ax.set_xlabel(_X[x])
    ax.grid(axis="x")
    draw_bands(ax, layout, height, Y_AXES[agreed.column], width)
    taken = _mark_lines(ax, layout, lines)
    if len(front) > 1:
        at = layout.points.set_index("label").loc[front["label"], "at"]
        draw_front(ax, front["x"].to_numpy(), at.to_numpy(), layout.scale[0])
    _mark_spread(ax, layout)
    largest = float(points["memory"].max())
    radii = draw_circles(ax, layout.points, largest)
    sizes = {size: trimmed(format_bytes(size)) for size in round_sizes(largest)}
    draw_keys(
        page,
        right + 0.14,
        page.top,
        list(points["family"]),
        largest,
        "peak memory\n(circle area)" if sizes else "",
        sizes,
    )
    if overlay:
        draw_published(page, right + 1.62)
    drawn = layout.points
    place_labels(ax, list(drawn["name"]), list(drawn["x"]), list(drawn["at"]), radii, taken=taken, size=SMALL_SIZE)
    return page.figure


def _lines(points: pd.DataFrame, agreed: Agreement) -> dict[str, float]:
    """Name -> error of what is drawn as a line."""
    lines = {_TRIVIAL: agreed.trivial} if math.isfinite(agreed.trivial) else {}
    rows = agreed.rows[(agreed.rows["family"] == "reference") & (agreed.rows["error_kind"] == "approximation")]
    for label, value in rows[["label", "y"]].itertuples(index=False):
        if label not in {"mean-value", *points["label"]} and value > 0 and math.isfinite(value):
            lines[label] = float(value)
    return lines


def _mark_lines(ax: Axes, layout: Layout, lines: Mapping[str, float]) -> list[Bbox]:
    """Errors without a speed: answering mean(V), below which a method knows nothing of the logits, and the oracles.

    Returns the boxes of their names.
    """
    if not (layout.points["kind"] == "measured").any():
        return []
    texts = []
    for name, value in lines.items():
        at, low = layout.height_of(value), layout.scale[0]
        trivial = name == _TRIVIAL
        if trivial:
            ax.axhspan(low, at, facecolor="#fbeee6", lw=0, zorder=0)
        ax.axhline(at, color=INK if trivial else FAMILY_COLOURS["reference"], lw=1.2, ls=":", zorder=1.6)
        words = f"{name}: {plain(float(f'{value:.3g}'))}" + ("; no better below" if trivial else "")
        side, shift = ("top", -0.03) if trivial else ("bottom", 0.02)
        texts.append(
            ax.text(
                0.012, at + shift, words, transform=ax.get_yaxis_transform(), fontsize=SMALL_SIZE, color=INK, va=side,
                style="italic", zorder=6,
            )
        )  # fmt: skip
    return [text.get_window_extent() for text in texts]


def _competing(points: pd.DataFrame, trivial: float) -> pd.DataFrame:
    """Rows with both a speed and an error; reference lines and what is no better than mean(V) are not among them."""
    fair = points[points["kind"].isin(["exact", "measured"]) & (points["family"] != "reference")]
    if math.isfinite(trivial):
        fair = fair[(fair["kind"] == "exact") | (fair["y"] < trivial)]
    return fair


def _front(fair: pd.DataFrame, *, log: bool, fast_low: bool) -> pd.DataFrame:
    """Of those that compete, the rows on the Pareto front, fastest first."""
    # All exact methods are equally good.
    goodness = (-fair["y"] if log else fair["y"]).where(fair["kind"] != "exact", math.inf)
    return fair.iloc[pareto(list(-fair["x"] if fast_low else fair["x"]), list(goodness))]


def _mark_spread(ax: Axes, layout: Layout) -> None:
    """Thin crosses: the interval of the median time, one standard deviation of the error over draws."""
    columns = layout.points[["family", "kind", "x", "at", "x_low", "x_high", "y", "y_std"]]
    for family, kind, x, at, low, high, y, std in columns.itertuples(index=False):
        how: dict[str, Any] = {"color": FAMILY_COLOURS.get(family, OTHER_COLOUR), "lw": 0.9, "zorder": 2.5}
        if math.isfinite(low) and math.isfinite(high):
            ax.plot([low, high], [at, at], **how)
        if kind == "measured" and math.isfinite(std):
            ax.plot([x, x], [layout.height_of(y - std), layout.height_of(y + std)], **how)


def _notes(points: pd.DataFrame, speed: Chosen, n: int) -> list[str]:
    _, settings = short_names(points)
    notes = [settings]
    if points["memory"].isna().any():
        notes.append("Dashed circle: memory was not measured.")
    here = speed.rows[speed.rows["seq_len"] == n]
    failed = failures(here[~here["label"].isin(points["label"])], at_n=False)
    absent = [label for label in dict.fromkeys(speed.rows["label"]) if label not in set(here["label"])]
    failed += [f"not in the table at this n: {', '.join(absent)}"] if absent else []
    notes += [f"Left out at n = {n} — {line}" for line in failed]
    return [*notes, speed.others]
