from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.catalogue.attention.pairwise.fox import ForgettingAttention, forgetful, forgetful_both_ways
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import HOLES, both, built, close, tokens


def make(shape: Shape, chunk: int | None = None) -> ForgettingAttention:
    module = built(ForgettingAttention, "fox", shape, chunk=chunk).double()
    with torch.no_grad():
        module.forget.weight.normal_()
        module.forget.bias.normal_()
    return module


def heads_of(module: ForgettingAttention, x: Tensor) -> list[Tensor]:
    """q, k and v ``(B, H, N, 4)`` by the weights of the projection."""
    q, k, v = (x @ weight.T for weight in module.qkv.weight.detach().split(12))
    return [part.unflatten(-1, (3, 4)).transpose(1, 2) for part in (q, k, v)]


def by_hand(module: ForgettingAttention, x: Tensor, causal: bool, real: Tensor) -> Tensor:
    """Token by token and gate by gate: a state of logits that every gate lowers before its token asks."""
    q, k, v = heads_of(module, x)
    gates = torch.sigmoid(x @ module.forget.weight.detach().T + module.forget.bias.detach())
    rows = torch.zeros(2, 3, 23, 4, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            for i in range(23):
                logits, seen = [], []
                for j in range(i + 1 if causal else 23):
                    if not real[b, j]:
                        continue
                    share = 1.0
                    for between in range(min(i, j) + 1, max(i, j) + 1):
                        share *= float(gates[b, between, h]) if real[b, between] else 1.0
                    logits.append(q[b, h, i] @ k[b, h, j] / 2 + torch.tensor(share, dtype=torch.float64).log())
                    seen.append(j)
                if seen:
                    rows[b, h, i] = torch.stack(logits).softmax(0) @ v[b, h, seen]
    return rows.transpose(1, 2).flatten(2) @ module.out.weight.detach().T


@both
@pytest.mark.parametrize("padded", [False, True])
def test_a_key_fades_by_every_gate_after_it_and_not_by_its_own(shape: Shape, padded: bool) -> None:
    module, x = make(shape), tokens(shape)
    real = HOLES if padded else torch.ones(2, 23, dtype=torch.bool)
    x = x.masked_fill(~real[..., None], 0.0)
    out = module(x, key_mask=real if padded else None).detach()
    close(out[real], by_hand(module, x, shape.causal, real)[real])


@pytest.mark.parametrize("score", [forgetful, forgetful_both_ways])
def test_what_follows_a_strong_gate_keeps_its_digits(score: object) -> None:
    # Between -1e6 and what a gate of 0.999 takes off lie nine digits; float32 has seven.
    log_f = torch.full((1, 40), -1e-3, dtype=torch.float64)
    log_f[:, 5] = -1e6
    total = log_f.cumsum(-1)
    nothing, each = torch.zeros(1, 40, 2), total[..., None]
    assert callable(score)
    found = score(nothing, nothing, each, each)
    expected = total[:, :, None] - total[:, None]
    expected = expected if score is forgetful else -expected.abs()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-8)


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the tiles that take memory of their own."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += result is not args[0] and result.shape[-2:] == (40, 30)
        return result


@pytest.mark.parametrize(("score", "tiles"), [(forgetful, 2 + 1), (forgetful_both_ways, 3 + 4)])
def test_a_tile_is_made_once_in_each_data_type_and_no_gradient_is_negated(score: object, tiles: int) -> None:
    x, y, of_x, of_y = (torch.randn(2, n, d).requires_grad_() for n, d in ((40, 8), (30, 8), (40, 1), (30, 1)))
    assert callable(score)
    above = torch.ones(2, 40, 30)
    with Made() as made:  # type: ignore[no-untyped-call]  # untyped in torch
        torch.autograd.grad(score(x, y, of_x.double(), of_y.double()), (x, y, of_x, of_y), above)
    assert made.count == tiles


@both
def test_gates_learn_as_exactly_as_from_the_formula_however_many_tokens_there_are(shape: Shape) -> None:
    # If all is added up in float32 on the way, it is 40 times as far off as the formula, and more with more tokens.
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(6):
        single = build("fox", replace(shape, batch=1, heads=1, seq_len=512), seed=seed)
        double = copy.deepcopy(single).double()
        assert isinstance(single, ForgettingAttention)
        assert isinstance(double, ForgettingAttention)
        x, direction = torch.randn(2, 1, 512, 4, generator=torch.Generator().manual_seed(seed))
        exact = slope(double, double.dense(x.double()), direction)
        errors += torch.stack([(slope(single, y, direction) - exact).square() for y in (single(x), single.dense(x))])
    assert errors[0] < 6**2 * errors[1]


def slope(module: ForgettingAttention, y: Tensor, direction: Tensor) -> Tensor:
    """The gradient of the bias of the gates."""
    return torch.autograd.grad((y * direction).sum(), module.forget.bias)[0].double()[0]
