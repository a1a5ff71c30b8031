from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pairwise.gated_softmax import GatedSoftmax
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import SHAPE, both, built, close, tokens

each_gate = pytest.mark.parametrize("gate", ["elements", "heads"])


def make(shape: Shape, gate: str = "elements") -> GatedSoftmax:
    return built(GatedSoftmax, "gated-softmax", shape, gate=gate).double()


def heads_of(module: GatedSoftmax, x: Tensor) -> list[Tensor]:
    q, k, v = (x @ weight.T for weight in module.qkv.weight.detach().split(12))
    return [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (q, k, v)]


@both
@each_gate
def test_each_token_gates_what_its_heads_give_it(shape: Shape, gate: str) -> None:
    module, x = make(shape, gate), tokens(shape)
    q, k, v = heads_of(module, x)
    rows = torch.zeros(2, 23, 12, dtype=torch.float64)
    for at in ((b, i, h) for b in range(2) for i in range(23) for h in range(3)):
        b, i, h = at
        last = i + 1 if shape.causal else 23
        y = (k[b, h, :last] @ q[b, h, i] / 2).softmax(0) @ v[b, h, :last]
        for d in range(4):
            row = 4 * h + d if gate == "elements" else h
            rows[b, i, 4 * h + d] = y[d] * torch.sigmoid(module.gate.weight.detach()[row] @ x[b, i])
    close(module(x).detach(), rows @ module.out.weight.detach().T)


def test_a_gate_for_heads_has_a_weight_for_each_head() -> None:
    assert make(SHAPE, "heads").gate.weight.shape == (3, 12)
    assert make(SHAPE).gate.weight.shape == (12, 12)
