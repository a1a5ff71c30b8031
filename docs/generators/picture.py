"""A small picture of which tokens reach which output: computed from the formula on 32 tokens, drawn as SVG."""

from __future__ import annotations

from html import escape

from torch import Tensor

from attnbench.contract.variant import Variant
from attnbench.errors import Unsupported
from attnbench.figures.pictures.picture import LEVELS
from attnbench.laws.implied import random_weights, share_of_largest, small_setting

N = 32
"""Tokens."""
_SIDE = 6
"""Pixels of one pair."""


def pictures(entry: Variant) -> str:
    """The patterns that a variant has without and with causality, one figure; empty where none can be computed."""
    spec = small_setting(entry.name)
    drawn = []
    for causal in (False, True):
        try:
            weights = random_weights(spec, N, causal=causal)
        except Unsupported:
            continue
        drawn.append(svg(weights, "causal" if causal else "not causal", entry.name))
    if not drawn:
        return ""
    return f'<div class="patterns">{"".join(drawn)}</div>\n\n{_CAPTION.format(n=N, name=spec.label)}'


_CAPTION = (
    "A row is a query and a column a key, both of {n} tokens; a dark square is a large weight within its row. "
    "Drawn for `{name}`, on random inputs; `attnbench plot pattern` draws it larger, of your options."
)


def svg(weights: Tensor, title: str, name: str) -> str:
    """One square for each pair, by runs of equal opacity."""
    share = share_of_largest(weights)
    size = len(weights) * _SIDE
    paths = []
    above = float("inf")
    for least, opacity in LEVELS:
        inside = (share >= least) & (share < above)
        above = least
        runs = "".join(_runs(row, i) for i, row in enumerate(inside.tolist()))
        if runs:
            paths.append(f'<path d="{runs}" fill-opacity="{opacity:g}"/>')
    return (
        f'<figure><svg class="pattern" viewBox="0 0 {size} {size}" role="img" '
        f'aria-label="{escape(f"which keys each query of {name} sees, {title}")}">{"".join(paths)}</svg>'
        f"<figcaption>{title}</figcaption></figure>"
    )


def _runs(row: list[bool], i: int) -> str:
    found, start = "", None
    for j, inside in enumerate([*row, False]):
        if inside and start is None:
            start = j
        elif not inside and start is not None:
            found += f"M{start * _SIDE} {i * _SIDE}h{(j - start) * _SIDE}v{_SIDE}H{start * _SIDE}z"
            start = None
    return found
