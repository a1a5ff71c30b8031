"""A small picture of which tokens reach which output: computed from the formula on 32 tokens, drawn as SVG."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from html import escape

import torch
from torch import Tensor, nn

from attnbench.capabilities import Dense
from attnbench.errors import Unsupported
from attnbench.reference import exact_attention
from attnbench.shape import Shape
from attnbench.spec import parse_spec
from attnbench.variant import Variant, build

N = 32
"""Tokens."""
LEVELS = ((0.5, "1"), (0.1, "0.6"), (0.01, "0.32"), (1e-6, "0.13"))
"""From which share of the largest weight of its row a pair has which opacity."""
_SIDE = 6
"""Pixels of one pair."""


def pictures(entry: Variant) -> str:
    """The patterns that a variant has without and with causality, one figure; empty where none can be computed."""
    setting = entry.settings[0] if entry.settings else ""
    drawn = []
    for causal in (False, True):
        weights = _weights(entry, setting, causal) if entry.traits.causal or not causal else None
        if weights is not None:
            drawn.append(svg(weights, "causal" if causal else "not causal", entry.name))
    if not drawn:
        return ""
    name = f"{entry.name}:{setting}".rstrip(":")
    return f'<div class="patterns">{"".join(drawn)}</div>\n\n{_CAPTION.format(n=N, name=name)}'


_CAPTION = (
    "A row is a query and a column a key, both of {n} tokens; a dark square is a large weight within its row. "
    "Drawn for `{name}`, on random inputs."
)


def _weights(entry: Variant, setting: str, causal: bool) -> Tensor | None:
    """``(N, N)``, not negative: how much token j moves output i. None where the variant refuses the shape."""
    spec = parse_spec(f"{entry.name}:{setting}".rstrip(":"))
    operator = entry.kind == "operator"
    shape = Shape(batch=1, heads=1, seq_len=N, head_dim=N if operator else 8, causal=causal)
    generator = torch.Generator().manual_seed(0)
    try:
        module = build(spec, shape).double()
        formula = _formula(entry, module, causal)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if operator:
                q, k = (torch.randn(1, 1, N, N, generator=generator, dtype=torch.float64) * 0.5 for _ in "qk")
                return formula(q, k, torch.eye(N, dtype=torch.float64)[None, None]).detach()[0, 0].abs()
            return _reach(formula, torch.randn(1, N, shape.C, generator=generator, dtype=torch.float64))
    except Unsupported:
        return None


def _formula(entry: Variant, module: nn.Module, causal: bool) -> Callable[..., Tensor]:
    if isinstance(module, Dense):
        return module.dense
    if entry.traits.exact:
        return lambda q, k, v: exact_attention(q, k, v, causal=causal)
    return module


def _reach(formula: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Size of the gradient of each output token with respect to each token of ``x``."""
    x.requires_grad_()
    out = formula(x)
    direction = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    rows = [torch.autograd.grad((out[0, i] * direction).sum(), x, retain_graph=True)[0] for i in range(out.shape[1])]
    sizes: Tensor = torch.stack(rows)[:, 0].norm(dim=-1)
    return sizes


def svg(weights: Tensor, title: str, name: str) -> str:
    """One square for each pair, by runs of equal opacity."""
    share = weights / weights.amax(1, keepdim=True).clamp(min=1e-300)
    size = len(weights) * _SIDE
    paths = []
    above = torch.full_like(share, float("inf"))
    for least, opacity in LEVELS:
        inside = (share >= least) & (share < above)
        above = torch.full_like(share, least)
        runs = "".join(_runs(row, i) for i, row in enumerate(inside.tolist()))
        if runs:
            paths.append(f'<path d="{runs}" fill-opacity="{opacity}"/>')
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
