"""The error of random features over their number; after figure 4 of Choromanski et al. 2021, "Performer".

The figure has two panels, orthogonal against independent projections and positive against trigonometric features. The
paper does not print its numbers of features or the size of its inputs, so here both are options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import RandomKernel
from attnbench.contract.inputs import INPUTS, draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError
from attnbench.figures.kit.page import narrow, new_page
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import DASHES, MARKERS, SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import log_axis, padded, plain
from attnbench.figures.pictures.picture import QUARTILES, Picture, two_panels

TITLE = "Error of random features over their number"
DRAWS = 15
"""Draws of inputs and of features, as in the paper."""
FEATURES = (8, 16, 32, 64, 128, 256, 512)
N, WIDTH = 512, 16
MOST = 4096
_WAYS: Mapping[str, Mapping[str, str]] = {
    "orthogonal, positive": {"projection": "orthogonal", "kernel": "positive"},
    "independent, positive": {"projection": "iid", "kernel": "positive"},
    "orthogonal, trigonometric": {"projection": "orthogonal", "kernel": "trig"},
}
_PANELS = (
    ("projections", ("orthogonal, positive", "independent, positive")),
    ("features", ("orthogonal, positive", "orthogonal, trigonometric")),
)
"""The lines of each panel; the first is that of the paper's method."""


def draw_features(*, inputs: str = "gaussian:logit_std=1", n: int = N, head_dim: int = WIDTH) -> Picture:
    """Draw the mean squared error of the Performer's estimate of softmax's matrix, in two panels.

    ``inputs`` gives q and k, drawn again for each draw of the features. Raises UsageError for an unknown input or an n
    below 2 or above :data:`MOST`, and Unsupported if the input lacks this shape.
    """
    if not 2 <= n <= MOST:
        raise UsageError(f"this picture takes 2 to {MOST} tokens, not {n}")
    spec = INPUTS.get(parse_spec(inputs).name).normalise(parse_spec(inputs))
    shape = Shape(batch=1, heads=1, seq_len=n, head_dim=head_dim)
    errors, trivial = errors_over_features(spec, shape)
    about = f"inputs {INPUTS.get(spec.name).complete(spec).label} · n = {n} · width {head_dim} · {DRAWS} draws"
    return Picture(_draw(errors, trivial, about), errors.drop(columns="way"))


def errors_over_features(
    inputs: Spec, shape: Shape, *, features: Sequence[int] = FEATURES, draws: int = DRAWS
) -> tuple[pd.DataFrame, float]:
    """The error of each way, number of features and draw, and the median error of uniform weights."""
    found: dict[tuple[str, int], list[float]] = {(way, count): [] for way in _WAYS for count in features}
    trivial = []
    for seed in range(draws):
        q, k, _ = (x.double() for x in draw_qkv(inputs, shape, seed))
        exact = (q @ k.mT * shape.D**-0.5).softmax(-1)
        trivial.append(float((exact - 1 / shape.M).square().mean()))
        for way, count in found:
            module = build(Spec.of("performer", {**_WAYS[way], "features": count}), shape, seed=seed).double()
            with torch.no_grad():
                kernel = cast(RandomKernel, module).kernel(q, k)
            # Trigonometric features may have a sum near 0: the error is then as large as it looks.
            found[way, count].append(float((kernel / kernel.sum(-1, keepdim=True) - exact).square().mean()))
    rows = [
        {"way": way, **_WAYS[way], "features": count, "draw": draw, "mean_squared_error": value}
        for (way, count), values in found.items()
        for draw, value in enumerate(values)
    ]
    return pd.DataFrame(rows), float(np.median(trivial))


@in_style
def _draw(errors: pd.DataFrame, trivial: float, about: str) -> Figure:
    notes = [
        "Mean squared error of the attention matrix, the estimated kernel over the sums of its rows, against exact "
        f"softmax. Lines: medians of {DRAWS} draws of inputs and features; bands: quartiles. Features: rows of the "
        "projection; a trigonometric row makes two numbers, a sine and a cosine. Dotted: uniform weights, which ignore "
        "the queries. After figure 4 of Choromanski et al. 2021, which shows the error of the output at 4096 tokens."
    ]
    drawn = errors.groupby(["way", "features"])["mean_squared_error"]
    table = pd.DataFrame({name: drawn.quantile(part) for name, part in QUARTILES.items()})
    quartiles = {str(way): part.droplevel("way") for way, part in table.groupby("way")}
    counts = [*table.index.unique("features")]
    page = new_page(TITLE, [about, *_said(quartiles)], notes, height=1.0, room=5.2 if narrow() else 3.3)
    for place, ((what, ways), ax) in enumerate(zip(_PANELS, two_panels(page), strict=True)):
        log_axis(ax, "x", padded(counts, share=0.04), at=counts, most=4 if narrow() else 8)
        values = np.concatenate([quartiles[way].to_numpy().ravel() for way in ways])
        log_axis(ax, "y", padded([*values, trivial], share=0.05, least=4), base=10, text=_two_digits, most=6)
        ax.set_title(what, loc="left", pad=4)
        ax.grid(axis="both")
        if place == 0 or narrow():
            ax.set_ylabel("mean squared error")
        if place == 1 or not narrow():
            ax.set_xlabel("features (log2 scale)")
        _panel(ax, quartiles, ways, trivial)
    return page.figure


def _said(quartiles: Mapping[str, pd.DataFrame]) -> list[str]:
    lines = []
    for what, (own, other) in _PANELS:
        ratios = quartiles[other]["median"] / quartiles[own]["median"]
        names = own.split(", ")[what == "features"], other.split(", ")[what == "features"]
        few, many = (plain(float(f"{ratios.iloc[at]:.2g}")) for at in (0, -1))
        said = f"{few} times the error at {ratios.index[0]} features, {many} at {ratios.index[-1]}"
        lines.append(f"{names[1]} over {names[0]}: {said}")
    return lines


def _two_digits(value: float) -> str:
    return f"{value:.2g}".replace("e-0", "e-")


def _panel(ax: Axes, quartiles: Mapping[str, pd.DataFrame], ways: Sequence[str], trivial: float) -> None:
    keys = []
    for way in ways:
        # A way has one look in both panels.
        turn = list(_WAYS).index(way)
        colour, dashes, marker = palette().sequence[turn], DASHES[turn], MARKERS[turn]
        own = quartiles[way]
        ax.plot(own.index, own["median"], color=colour, ls=dashes, marker=marker)
        ax.fill_between(own.index, own["low"], own["high"], color=colour, alpha=0.15, lw=0)
        keys.append(Line2D([], [], color=colour, ls=dashes, marker=marker))
    keys.append(ax.axhline(trivial, color=palette().ink, lw=1.4, ls=":"))
    names = [*ways, "uniform weights"]
    ax.legend(keys, names, loc="best", fontsize=SMALL_SIZE, frameon=False)
