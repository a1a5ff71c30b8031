"""Attention from one sequence to another inside a model, with its projections."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS


class Crossing(nn.Module):
    """x ``(B, N, C)`` takes from y ``(B, M, C)``: ``out(operator(q(x), k(y), v(y)))``, ``(B, N, C)``.

    The projections have no bias. They are C × H·D, C × K·(D + E) and H·E × C; k and v come from one product.
    """

    def __init__(self, operator: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.operator = operator
        self.heads, self.head_dim, self.kv_heads = shape.H, shape.D, shape.K
        self.widths = [shape.K * shape.D, shape.K * shape.E]
        self.q = nn.Linear(shape.C, shape.C, bias=False)
        self.kv = nn.Linear(shape.C, sum(self.widths), bias=False)
        self.out = nn.Linear(shape.H * shape.E, shape.C, bias=False)
        for weight in (self.q.weight, *torch.split(self.kv.weight.detach(), self.widths), self.out.weight):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, y: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend from x to y; ``key_mask`` is ``(B, M)``, True where a token of y is real."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        parts = torch.split(self.kv(y), self.widths, -1)
        k, v = (part.view(*y.shape[:2], self.kv_heads, -1).transpose(1, 2) for part in parts)
        out: Tensor = self.out(self.operator(q, k, v, key_mask=key_mask).transpose(1, 2).flatten(2))
        return out


class Taking(nn.Module):
    """x ``(B, N, C)`` takes from y ``(B, M, C)`` through a mixer that has projections of its own."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.operator = mixer

    def forward(self, x: Tensor, y: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.operator(x, source=y, key_mask=key_mask)
        return out


def as_crossing(module: nn.Module, spec: Spec, shape: Shape) -> Crossing | Taking:
    """The result of :func:`crossing`, with projections if it has none."""
    return Taking(module) if VARIANTS.get(spec.name).kind == "mixer" else Crossing(module, shape)


def crossing(spec: Spec, shape: Shape, *, seed: int = 0) -> nn.Module:
    """The variant for N queries of one sequence and M keys of another, which may be as long; not causal, no bias.

    Raises UsageError, as :func:`~attnbench.catalogue.build.build`, and Unsupported, also for a variant without
    cross-attention.
    """
    shape = replace(shape, causal=False, bias="none", mask="none", sink="none", added_tokens=0, query_stride=1)
    if not shape.cross:  # equally long by chance: what needs them to be one sequence says so only where they are not
        build(spec, replace(shape, kv_len=shape.M + 1))
    return build(spec, shape, seed=seed)
