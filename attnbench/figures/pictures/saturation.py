"""The effect of the factor 1/√d: entropy and gradient of softmax rows over the scale of the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from attnbench.errors import UsageError
from attnbench.figures.kit.page import narrow, new_page
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.kit.ticks import halves, log_axis, padded
from attnbench.figures.pictures.picture import QUARTILES, Picture

TITLE = "Softmax saturates without the factor 1/√d"
WIDTHS = (16, 64, 256)
N = 512
MOST = 65536
_QUERIES = 256
_SCALES = tuple(2.0 ** (step / 2) for step in range(-16, 7))
"""Factors of q·k, from 1/256 to 8."""


def draw_saturation(*, n: int = N, head_dim: int | None = None) -> Picture:
    """Draw entropy and Jacobian norm of softmax(c·q·k) over c, for independent normal q and k of variance 1.

    ``n`` keys, 512 by default; width ``head_dim`` of a head, 16, 64 and 256 by default. Raises UsageError if n is below
    2, the width below 1, or one of them above :data:`MOST`.
    """
    if not 2 <= n <= MOST:
        raise UsageError(f"softmax rows have 2 to {MOST} keys here, not {n}")
    if head_dim is not None and not 1 <= head_dim <= MOST:
        raise UsageError(f"a head is 1 to {MOST} wide here, not {head_dim}")
    widths = WIDTHS if head_dim is None else (head_dim,)
    found = pd.concat([rows_over_scale(n, width) for width in widths], ignore_index=True)
    return Picture(_draw(found, widths, n), found)


def rows_over_scale(n: int, head_dim: int) -> pd.DataFrame:
    """Quartiles over softmax rows at every scale, the factor 1/√d among them.

    Of their entropy over log n, where 1 is uniform and 0 is one key, and of the norm of their Jacobian.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(size, head_dim, generator=generator, dtype=torch.float64) for size in (_QUERIES, n))
    logits = q @ k.T
    scales = sorted({*_SCALES, head_dim**-0.5})
    rows = []
    for scale in scales:
        entropy, norm = quartiles_of((scale * logits).softmax(-1))
        row = {"head_dim": head_dim, "scale": scale, "logit_std": scale * math.sqrt(head_dim)}
        row |= {f"entropy_{name}": value for name, value in zip(QUARTILES, entropy, strict=True)}
        rows.append(row | {f"jacobian_norm_{name}": value for name, value in zip(QUARTILES, norm, strict=True)})
    return pd.DataFrame(rows)


def quartiles_of(weights: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Quartiles over softmax rows ``(rows, n)`` of entropy over log n, and of the norm of the Jacobian."""
    entropy = torch.special.entr(weights).sum(-1) / math.log(weights.shape[-1])
    quarters = torch.tensor([*QUARTILES.values()], dtype=weights.dtype)
    return entropy.quantile(quarters).numpy(), jacobian_norm(weights).quantile(quarters).numpy()


def jacobian_norm(weights: Tensor) -> Tensor:
    """Frobenius norm of diag(p) - p pᵀ, the derivative of softmax by its logits, for each row p ``(rows, n)``."""
    squares, cubes = weights.square().sum(-1), weights.pow(3).sum(-1)
    return (squares - 2 * cubes + squares.square()).clamp(min=0).sqrt()


@in_style
def _draw(found: pd.DataFrame, widths: Sequence[int], n: int) -> Figure:
    notes = [
        f"softmax(c·q·k) over {n} keys, q and k independent normal numbers of variance 1, so that q·k has the "
        "standard deviation √d. Lines: medians of 256 rows; bands: quartiles. Entropy over log n: 1 is uniform, 0 is "
        "one key. Jacobian: diag(p) - ppᵀ, by which every gradient through a row p is multiplied. It is small "
        "at both ends: a uniform row hardly reacts to one logit, a saturated row to none.",
        "Dashed: c = 1/√d, at which rows of every width are alike.",
    ]
    about = [_said(found, width) for width in widths[-1:]]
    page = new_page(TITLE, about, notes, height=1.0, room=5.0 if narrow() else 3.2)
    panels = (("entropy", "entropy / log n"), ("jacobian_norm", "norm of the Jacobian (log scale)"))
    for place, (what, label) in enumerate(panels):
        if narrow():
            tall = (page.top - page.bottom - 0.9) / 2
            at = (page.left + 0.56, page.top - (place + 1) * tall - place * 0.4, page.right - page.left - 0.66, tall)
        else:
            wide = (page.right - page.left - 1.3) / 2
            at = (page.left + 0.56 + place * (wide + 0.66), page.bottom + 0.42, wide, page.top - page.bottom - 0.5)
        ax = page.axes(*at)
        _panel(ax, found, widths, what)
        ax.set_ylabel(label)
        if not narrow() or place:
            ax.set_xlabel("factor c of the logits (log2 scale)")
        if place == 0:
            lines = [Line2D([], [], color=colour) for _, colour in zip(widths, palette().sequence, strict=False)]
            ax.legend(lines, [f"d = {one}" for one in widths], loc="lower left", fontsize=SMALL_SIZE, frameon=False)
    return page.figure


def _said(found: pd.DataFrame, width: int) -> str:
    kept = found[found["head_dim"] == width].set_index("scale")["entropy_median"]
    return (
        f"d = {width}: with 1/√d a row keeps {kept[width**-0.5]:.0%} of the entropy of uniform weights, without it "
        f"{kept[1.0]:.0%}"
    )


def _panel(ax: Axes, found: pd.DataFrame, widths: Sequence[int], what: str) -> None:
    columns = [f"{what}_{name}" for name in QUARTILES]
    values = found[columns].to_numpy()
    log_axis(ax, "x", padded(_SCALES, share=0.03), text=halves, most=4 if narrow() else 7)
    if what == "jacobian_norm":
        # Beyond a millionth of the largest there is nothing to learn from.
        high = float(values.max())
        log_axis(ax, "y", padded([max(float(values.min()), 1e-6 * high), high]), base=10, most=6)
    else:
        ax.set_ylim(-0.02, 1.04)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.grid(axis="both")
    for width, colour in zip(widths, palette().sequence, strict=False):
        own = found[found["head_dim"] == width]
        low, middle, most = own[columns].clip(lower=1e-300).to_numpy().T
        ax.plot(own["scale"], middle, color=colour)
        ax.fill_between(own["scale"], low, most, color=colour, alpha=0.15, lw=0)
        ax.axvline(width**-0.5, color=colour, lw=1.0, ls=(0, (3, 2)))
