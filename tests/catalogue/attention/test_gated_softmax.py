from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pairwise.gated_softmax import GatedSoftmax
from attnbench.catalogue.build import build
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible
from tests.catalogue.attention.small import CAUSAL, SHAPE, both, close, tokens

each_gate = pytest.mark.parametrize("gate", ["elements", "heads"])


def make(shape: Shape, gate: str = "elements") -> GatedSoftmax:
    module = build("gated-softmax", shape, gate=gate).double()
    assert isinstance(module, GatedSoftmax)
    return module


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


@each_gate
@pytest.mark.parametrize("more", [{"bias": "alibi"}, {"bias": "relative"}, {"sink": "learned"}, {"mask": "sliding:5"}])
def test_bias_sink_and_mask_are_those_of_softmax_attention(gate: str, more: dict[str, str]) -> None:
    shape = replace(CAUSAL, **more)  # type: ignore[arg-type]
    module, x, added, sink = make(shape, gate), tokens(shape), position_bias(shape), sink_of(shape)
    y = exact_attention(
        *heads_of(module, x),
        causal=Visible.of(shape),
        bias=added,
        sink=None if sink is None else sink.logit.detach(),
    )
    gates = torch.sigmoid(x @ module.gate.weight.detach().T).unflatten(-1, (3, -1))
    expected = (y.transpose(1, 2) * gates).flatten(2) @ module.out.weight.detach().T
    close(module(x).detach(), expected.detach())
    close(module.dense(x).detach(), expected.detach())
    state, rows = module.begin(x[:, :9]), []
    for t in range(9, 23):
        row, state = module.step(state, x[:, t : t + 1])
        rows.append(row)
    close(torch.cat(rows, 1).detach(), expected[:, 9:].detach())


def test_a_gate_for_heads_has_a_weight_for_each_head() -> None:
    assert make(SHAPE, "heads").gate.weight.shape == (3, 12)
    assert make(SHAPE).gate.weight.shape == (12, 12)
