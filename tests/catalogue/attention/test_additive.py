from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pairwise.additive import Additive
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=4)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=4, causal=True)
both = pytest.mark.parametrize("shape", [SHAPE, CAUSAL], ids=["all", "causal"])


def make(shape: Shape, hidden: int | None = 5, chunk: int | None = None) -> Additive:
    module = build("additive", shape, hidden=hidden, chunk=chunk).double()
    assert isinstance(module, Additive)
    with torch.no_grad():
        module.b.normal_()
    return module.requires_grad_(False)


def qkv(shape: Shape) -> list[Tensor]:
    return [torch.randn(shape.B, shape.H, n, shape.D, dtype=torch.float64) for n in (shape.N, shape.M, shape.M)]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


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


def test_where_queries_say_nothing_all_queries_weigh_alike() -> None:
    module, (q, k, v) = make(SHAPE), qkv(SHAPE)
    with torch.no_grad():
        module.W.zero_()
    out = module(q, k, v)
    close(out, out[:, :, :1].expand_as(out))
    with torch.no_grad():
        module.U.zero_()
    close(module(q, k, v), v.mean(2, keepdim=True).expand_as(v))


def test_the_logits_are_bounded_by_the_size_of_w_however_large_the_inputs_are() -> None:
    module, (q, k, _) = make(SHAPE), qkv(SHAPE)
    most = 2 * module.w.abs().sum(-1).max()
    weights = module(1e6 * q, 1e6 * k, torch.eye(23, dtype=torch.float64)[None, None, :, :].expand(2, 3, -1, -1))
    assert float(weights.amax(-1).div(weights.amin(-1)).max()) <= math.exp(float(most)) * (1 + 1e-9)


def test_the_hidden_layer_is_as_wide_as_a_head_unless_asked() -> None:
    assert make(SHAPE, hidden=None).w.shape == (3, 4)
    assert make(SHAPE, hidden=9).W.shape == (3, 4, 9)


def test_decoding_keeps_the_projected_keys() -> None:
    module, (q, k, v) = make(CAUSAL), qkv(CAUSAL)
    state = module.begin(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    assert state.keys.shape == (2, 3, 9, 5)
    close(state.keys, k[:, :, :9] @ module.U.detach())
