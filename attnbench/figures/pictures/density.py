"""Softmax as a density estimate: the Gaussian kernel of the distance of query and key, and features for it.

With x = q/d^¼ and y = k/d^¼, exp(q·k/√d) = exp(‖x‖²/2)·exp(-‖x - y‖²/2)·exp(‖y‖²/2). The first factor is the same for a
whole row and cancels: a row weighs its keys by a Gaussian kernel around the query, and by their own length. Random
features estimate exp(q·k/√d); divided by the two lengths, they estimate that kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import RandomKernel
from attnbench.contract.inputs import INPUTS, draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError
from attnbench.figures.kit.page import narrow, new_page
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import DASHES, SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import linear_ticks, log_axis, padded, plain
from attnbench.figures.pictures.picture import Picture, two_panels

TITLE = "Softmax as a density estimate"
DRAWS = 15
"""Draws of queries and of features."""
FEATURES = 256
N, WIDTH = 64, 16
MOST = 4096
FARTHEST = 4.0
_STEPS = 32
WAYS = {
    "positive": "performer",
    "hyperbolic": "performer:kernel=hyperbolic",
    "trigonometric": "performer:kernel=trig",
    "FAVOR++": "favor-plus-plus",
}
"""Name of the features -> the variant with them."""
_LEAST = 1e-3
"""Relative errors below it are drawn there."""


@dataclass(frozen=True)
class Estimate:
    """The kernel as features estimate it, over the distance: quartiles over queries and draws."""

    way: str
    distances: np.ndarray
    """``(T,)``"""
    estimates: np.ndarray
    """``(3, T)``: lower quartile, median, upper quartile."""
    errors: np.ndarray
    """The same of the relative error."""


def draw_density(*, inputs: str = "gaussian:logit_std=0.5", n: int = N, head_dim: int = WIDTH) -> Picture:
    """Draw the Gaussian kernel that softmax weighs keys by, and the estimates of four kinds of random features.

    ``inputs`` gives the queries and the directions of the keys, drawn again for each draw of the features. Raises
    UsageError for an unknown input or an n below 2 or above :data:`MOST`, Unsupported if the input lacks this shape.
    """
    if not 2 <= n <= MOST:
        raise UsageError(f"this picture takes 2 to {MOST} queries, not {n}")
    spec = INPUTS.get(parse_spec(inputs).name).normalise(parse_spec(inputs))
    found = kernels(spec, Shape(batch=1, heads=1, seq_len=n, head_dim=head_dim), draws=DRAWS)
    label = INPUTS.get(spec.name).complete(spec).label
    about = f"queries from {label} · width {head_dim} · {FEATURES} features · {DRAWS} draws of {n} queries"
    return Picture(_draw(found, about), _numbers(found))


def kernels(inputs: Spec, shape: Shape, *, features: int = FEATURES, draws: int = DRAWS) -> list[Estimate]:
    """The estimated kernel of each way."""
    distances = torch.linspace(0.0, FARTHEST, _STEPS + 1, dtype=torch.float64)
    truth = true_kernel(distances.numpy())
    found: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    for seed in range(draws):
        q, k, _ = (x.double() for x in draw_qkv(inputs, shape, seed))
        queries, keys = rays(q, k, distances)
        own = Shape(batch=shape.N, heads=1, seq_len=1, kv_len=len(distances), head_dim=shape.D)
        for way, values in found.items():
            module = build(WAYS[way], own, seed=seed, features=features).double()
            with torch.no_grad():
                estimate = cast(RandomKernel, module).kernel(queries, keys)
            values.append(gaussian(estimate, queries, keys)[:, 0, 0].numpy())
    quarters = (0.25, 0.5, 0.75)
    made = []
    for way, values in found.items():
        every = np.concatenate(values)
        errors = np.abs(every / truth - 1)
        made.append(Estimate(way, distances.numpy(), *(np.quantile(x, quarters, axis=0) for x in (every, errors))))
    return made


def rays(q: Tensor, k: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """For each query, keys on the line through its own key, at given distances (times D^¼) from the query.

    q, k ``(1, 1, n, D)`` and distances ``(T,)`` -> ``(n, 1, 1, D)`` and ``(n, 1, T, D)``.
    """
    queries = q[0, 0, :, None, None]
    towards = normalize(k[0, 0, :, None, None] - queries, dim=-1)
    return queries, queries + towards * distances[:, None] * q.shape[-1] ** 0.25


def gaussian(kernel: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """An estimate of exp(q·k/√D) ``(..., N, M)`` as one of exp(-‖q - k‖²/2√D)."""
    of_q, of_k = (torch.linalg.vecdot(x, x) * (-0.5 * x.shape[-1] ** -0.5) for x in (q, k))
    estimate: Tensor = kernel * (of_q[..., :, None] + of_k[..., None, :]).exp()
    return estimate


def true_kernel(distances: np.ndarray) -> np.ndarray:
    """exp(-r²/2)."""
    return np.asarray(np.exp(-np.square(distances) / 2))


def _numbers(found: Sequence[Estimate]) -> pd.DataFrame:
    names = ("low", "median", "high")
    return pd.DataFrame(
        [
            {
                "features": one.way,
                "variant": WAYS[one.way],
                "distance": distance,
                "kernel": true_kernel(distance),
                **{f"estimate_{name}": one.estimates[row, at] for row, name in enumerate(names)},
                **{f"relative_error_{name}": one.errors[row, at] for row, name in enumerate(names)},
            }
            for one in found
            for at, distance in enumerate(one.distances)
        ]
    )


@in_style
def _draw(found: Sequence[Estimate], about: str) -> Figure:
    notes = [
        "exp(q·k/√d) is a Gaussian kernel of the distance r = ‖q - k‖/d^¼, times a factor of the query's length, "
        "which cancels in its row, and one of the key's. Each estimate is divided by both factors, and a key lies at "
        f"distance r from its query. Lines: medians over {DRAWS} draws of queries and features; bands: quartiles. A "
        "median below the kernel is no bias: estimates that are rarely far too large are mostly too small. Relative "
        "error: |estimate / kernel - 1|."
    ]
    page = new_page(TITLE, [about, *_said(found)], notes, height=1.0, room=5.2 if narrow() else 3.3)
    for place, (what, ax) in enumerate(zip(("kernel", "relative error"), two_panels(page), strict=True)):
        (_kernel_panel if place == 0 else _error_panel)(ax, found)
        ax.set_title(what + " (log scale)" * place, loc="left", pad=4)
        ax.set_xlim(-0.04 * FARTHEST, 1.02 * FARTHEST)
        ax.set_xticks(range(int(FARTHEST) + 1))
        ax.grid(axis="both")
        if place == 1 or not narrow():
            ax.set_xlabel("distance r of query and key")
    return page.figure


def _said(found: Sequence[Estimate]) -> list[str]:
    lines = []
    for distance in (0.5, 3.0):
        errors = {one.way: float(np.interp(distance, one.distances, one.errors[1])) for one in found}
        order = sorted(errors, key=lambda way: errors[way])
        shown = ", ".join(f"{way} {plain(float(f'{errors[way]:.2g}'))}" for way in order)
        lines.append(f"median relative error at r = {plain(distance)}: {shown}")
    return lines


def _kernel_panel(ax: Axes, found: Sequence[Estimate]) -> None:
    low = min(float(one.estimates[0].min()) for one in found)
    high = max(float(one.estimates[2].max()) for one in found)
    limits = max(min(low, 0.0), -0.5) - 0.04, min(max(high, 1.0), 2.0) + 0.04
    keys = _lines(ax, found, "estimates")
    distances = np.linspace(0, FARTHEST, 200)
    keys += ax.plot(distances, true_kernel(distances), color=palette().ink, lw=1.4, ls=":")
    ax.set_ylim(*limits)
    ax.set_yticks(linear_ticks(*limits))
    ax.legend(keys, [*(one.way for one in found), "the kernel"], loc="upper right", fontsize=SMALL_SIZE, frameon=False)


def _error_panel(ax: Axes, found: Sequence[Estimate]) -> None:
    values = [max(float(value), _LEAST) for one in found for value in one.errors[1:].flatten()]
    log_axis(ax, "y", padded([*values, 1.0], share=0.05), base=10, most=6)
    _lines(ax, found, "errors")
    ax.axhline(1.0, color=palette().faint, lw=0.8)


def _lines(ax: Axes, found: Sequence[Estimate], what: str) -> list[Line2D]:
    keys = []
    for turn, one in enumerate(found):
        colour, dashes = palette().sequence[turn], DASHES[turn]
        low, middle, high = getattr(one, what)
        if what == "errors":
            low, middle, high = (np.maximum(line, _LEAST) for line in (low, middle, high))
        ax.plot(one.distances, middle, color=colour, ls=dashes)
        ax.fill_between(one.distances, low, high, color=colour, alpha=0.15, lw=0)
        keys.append(Line2D([], [], color=colour, ls=dashes))
    return keys
