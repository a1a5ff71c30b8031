from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.rwkv7 import RWKV7
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, both, close, tokens


def make(shape: Shape, *, chunk: int = 4) -> RWKV7:
    module = RWKV7(shape, rank=3, chunk=chunk).double()
    with torch.no_grad():
        module.bonus.add_(torch.randn_like(module.bonus))
        module.weight.add_(torch.rand_like(module.weight))
        module.bias.add_(torch.randn_like(module.bias))
    return module


def one_way(module: RWKV7, x: Tensor) -> Tensor:
    """Token by token, head by head, values in rows of the state and keys in columns as in the paper; ``(B, N, C)``."""
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    (B, N, C), D = x.shape, x.shape[2] // module.heads
    state, rows, before = torch.zeros(B, module.heads, D, D, dtype=x.dtype), [], torch.zeros(B, C, dtype=x.dtype)
    for t in range(N):
        token = x[:, t]
        r, w, k, v, a, g = (token + p["shift"][i] * (before - token) for i in range(6))
        before = token
        r, k, v = (z @ p[f"{name}.weight"].T for name, z in (("receptance", r), ("key", k), ("value", v)))
        w = torch.tanh(w @ p["decay.0.weight"].T) @ p["decay.2.weight"].T + p["decay.2.bias"]
        w = torch.exp(-math.exp(-0.5) / (1 + torch.exp(-w)))
        a = 1 / (1 + torch.exp(-(a @ p["share.0.weight"].T @ p["share.1.weight"].T + p["share.1.bias"])))
        g = 1 / (1 + torch.exp(-(g @ p["gate.0.weight"].T))) @ p["gate.2.weight"].T
        kappa, k = k * p["removal"], k * (1 + (a - 1) * p["strengthened"])
        y = torch.zeros(B, C, dtype=x.dtype)
        for h in range(module.heads):
            own = slice(h * D, h * D + D)
            unit = kappa[:, own] / kappa[:, own].square().sum(-1, keepdim=True).sqrt()
            transition = torch.diag_embed(w[:, own]) - unit[:, :, None] * (a[:, own] * unit)[:, None]
            state[:, h] = state[:, h] @ transition + v[:, own, None] * k[:, None, own]
            o = (state[:, h] @ r[:, own, None])[..., 0]
            o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + 1e-5 * D).sqrt()
            bonus = (r[:, own] * k[:, own] * p["bonus"][h]).sum(-1, keepdim=True)
            y[:, own] = o * p["weight"][own] + p["bias"][own] + bonus * v[:, own]
        rows.append(y * g)
    return torch.stack(rows, 1)


def by_hand(module: RWKV7, x: Tensor) -> Tensor:
    y = one_way(module, x)
    if not module.causal:
        y = y + one_way(module, x.flip(1)).flip(1)
    return y @ module.out.weight.detach().T


@both
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_equals_the_recurrence_of_the_paper(shape: Shape, chunk: int) -> None:
    module, x = make(shape, chunk=chunk), tokens(shape)
    close(module(x), by_hand(module, x))


def test_decays_lie_between_0_545_and_1() -> None:
    module, x = make(CAUSAL), tokens(CAUSAL)
    with torch.no_grad():
        module.decay[2].bias.copy_(torch.where(torch.arange(12) % 2 == 0, 1e3, -1e3))
    kept = module._parts(x, x)[0][5].exp2()
    close(kept[..., ::2], torch.full((2, 3, 23, 2), math.exp(-math.exp(-0.5)), dtype=torch.float64))
    close(kept[..., 1::2], torch.ones(2, 3, 23, 2, dtype=torch.float64))


def test_widths_follow_the_model_as_in_the_authors_code() -> None:
    for C, narrow, wide in ((12, 32, 32), (256, 32, 64), (768, 64, 128), (2048, 128, 224)):
        module = RWKV7(Shape(heads=C // 4, head_dim=4))
        assert [part[0].weight.shape[0] for part in (module.decay, module.share, module.gate)] == [narrow, narrow, wide]
