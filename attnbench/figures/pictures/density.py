"""Softmax as a density estimate: the Gaussian kernel of the distance of query and key, and features for it.

With x = q/d^¼ and y = k/d^¼, exp(q·k/√d) = exp(‖x‖²/2)·exp(-‖x - y‖²/2)·exp(‖y‖²/2). The first factor is the same for a
whole row and cancels: a row weighs its keys by a Gaussian kernel around the query, and by their own length. Random
features estimate exp(q·k/√d); divided by the two lengths, they estimate that kernel.
"""

from __future__ import annotations

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
from attnbench.figures.pictures.picture import QUARTILES, Picture, two_panels

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
    return Picture(_draw(found, about), found)


def kernels(inputs: Spec, shape: Shape, *, features: int = FEATURES, draws: int = DRAWS) -> pd.DataFrame:
    """Quartiles of the estimate of each way and of its relative error, over queries and draws, at each distance."""
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
    made = []
    for way, values in found.items():
        every = np.concatenate(values)
        table = pd.DataFrame({"features": way, "variant": WAYS[way], "distance": distances.numpy(), "kernel": truth})
        for column, drawn in (("estimate", every), ("relative_error", np.abs(every / truth - 1))):
            for name, part in QUARTILES.items():
                table[f"{column}_{name}"] = np.quantile(drawn, part, axis=0)
        made.append(table)
    return pd.concat(made, ignore_index=True)


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


@in_style
def _draw(found: pd.DataFrame, about: str) -> Figure:
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


def _said(found: pd.DataFrame) -> list[str]:
    lines = []
    for distance in (0.5, 3.0):
        errors = {
            str(way): float(np.interp(distance, own["distance"], own["relative_error_median"]))
            for way, own in found.groupby("features", sort=False)
        }
        order = sorted(errors, key=lambda way: errors[way])
        shown = ", ".join(f"{way} {plain(float(f'{errors[way]:.2g}'))}" for way in order)
        lines.append(f"median relative error at r = {plain(distance)}: {shown}")
    return lines


def _kernel_panel(ax: Axes, found: pd.DataFrame) -> None:
    low, high = float(found["estimate_low"].min()), float(found["estimate_high"].max())
    limits = max(min(low, 0.0), -0.5) - 0.04, min(max(high, 1.0), 2.0) + 0.04
    keys = _lines(ax, found, "estimate")
    distances = np.linspace(0, FARTHEST, 200)
    keys += ax.plot(distances, true_kernel(distances), color=palette().ink, lw=1.4, ls=":")
    ax.set_ylim(*limits)
    ax.set_yticks(linear_ticks(*limits))
    ax.legend(keys, [*WAYS, "the kernel"], loc="upper right", fontsize=SMALL_SIZE, frameon=False)


def _error_panel(ax: Axes, found: pd.DataFrame) -> None:
    values = found[["relative_error_median", "relative_error_high"]].clip(lower=_LEAST).to_numpy().ravel()
    log_axis(ax, "y", padded([*values, 1.0], share=0.05), base=10, most=6)
    _lines(ax, found, "relative_error")
    ax.axhline(1.0, color=palette().faint, lw=0.8)


def _lines(ax: Axes, found: pd.DataFrame, what: str) -> list[Line2D]:
    keys = []
    columns = [f"{what}_{name}" for name in QUARTILES]
    for turn, way in enumerate(WAYS):
        colour, dashes = palette().sequence[turn], DASHES[turn]
        own = found[found["features"] == way]
        low, middle, high = own[columns].clip(lower=_LEAST if what == "relative_error" else None).to_numpy().T
        ax.plot(own["distance"], middle, color=colour, ls=dashes)
        ax.fill_between(own["distance"], low, high, color=colour, alpha=0.15, lw=0)
        keys.append(Line2D([], [], color=colour, ls=dashes))
    return keys
