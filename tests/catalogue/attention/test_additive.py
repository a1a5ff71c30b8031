from __future__ import annotations

import math

import torch

from attnbench.catalogue.attention.pairwise.additive import Additive
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import SHAPE, both, built, close, qkv


def make(shape: Shape, hidden: int | None = 5, chunk: int | None = None) -> Additive:
    module = built(Additive, "additive", shape, hidden=hidden, chunk=chunk).double()
    with torch.no_grad():
        module.b.normal_()
    return module.requires_grad_(False)


@both
def test_a_weight_is_the_exponential_of_what_the_network_of_its_head_says(shape: Shape) -> None:
    module, (q, k, v) = make(shape), qkv(shape)
    out = module(q, k, v)
    for b, h, i in ((0, 0, 0), (1, 2, 7), (0, 1, 22)):
        seen = range(i + 1 if shape.causal else 23)
        logits = []
        for j in seen:
            units = [
                math.tanh(float(module.W[h, :, a] @ q[b, h, i] + module.U[h, :, a] @ k[b, h, j] + module.b[h, a]))
                for a in range(5)
            ]
            logits.append(sum(float(w) * unit for w, unit in zip(module.w[h], units, strict=True)))
        weights = torch.tensor(logits, dtype=torch.float64).exp()
        close(out[b, h, i], weights / weights.sum() @ v[b, h, : len(seen)])


def test_the_hidden_layer_is_as_wide_as_a_head_unless_asked() -> None:
    assert make(SHAPE, hidden=None).w.shape == (3, 4)
    assert make(SHAPE, hidden=9).W.shape == (3, 4, 9)
