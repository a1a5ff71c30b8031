from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.delta import Delta
from attnbench.catalogue.engines.recurrent.erase_and_write import erase_and_write
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, both, close, tokens


def draw(N: int, D: int = 4, E: int = 5) -> tuple[Tensor, ...]:
    q, k = (torch.nn.functional.normalize(torch.randn(2, N, D, dtype=torch.float64), dim=-1) for _ in range(2))
    return q, k, torch.randn(2, N, E, dtype=torch.float64), torch.rand(2, N, dtype=torch.float64)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 19])
def test_the_rule_is_the_product_of_householder_like_matrices(strict: bool, chunk: int) -> None:
    q, k, v, beta = draw(19)
    out, last = erase_and_write(q, k, v, beta, chunk=chunk, strict=strict)
    for t in range(19):
        stop = t if strict else t + 1
        expected = torch.zeros(2, 5, dtype=torch.float64)
        for j in range(stop):  # o_t = Σ_j β_j v_j (k_jᵀ A_{j+1} ... A_t q), A = I - β k kᵀ
            reader = q[:, t]
            for s in range(stop - 1, j, -1):
                reader = reader - beta[:, s, None] * k[:, s] * (k[:, s] * reader).sum(-1, keepdim=True)
            expected += (beta[:, j] * (k[:, j] * reader).sum(-1))[:, None] * v[:, j]
        close(out[:, t], expected)
    assert last.shape == (2, 4, 5)


def test_the_mixer_is_silu_norm_rule_norm_and_projection() -> None:
    module, x = Delta(CAUSAL, chunk=5).double(), tokens(CAUSAL)
    torch.nn.init.uniform_(module.norm.weight)
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    q, k, v = (x @ weight.T for weight in p["qkv.weight"].split(12))
    q, k = q * torch.sigmoid(q), k * torch.sigmoid(k)
    beta = torch.sigmoid(x @ p["beta.weight"].T)
    rows = torch.zeros(2, 23, 12, dtype=torch.float64)
    for h in range(3):
        own = slice(4 * h, 4 * h + 4)
        state = torch.zeros(2, 4, 4, dtype=torch.float64)  # values in rows, keys in columns, as in the papers
        for t in range(23):
            key = k[:, t, own] / k[:, t, own].square().sum(-1, keepdim=True).sqrt()
            query = q[:, t, own] / q[:, t, own].square().sum(-1, keepdim=True).sqrt()
            old = state @ key[:, :, None]
            state = state + beta[:, t, h, None, None] * (v[:, t, own, None] - old) * key[:, None]
            y = (state @ query[:, :, None])[..., 0]
            rows[:, t, own] = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["norm.weight"]
    close(module(x), rows @ p["out.weight"].T)


def test_a_long_sequence_of_alike_keys_stays_bounded_in_float32() -> None:
    q, k, v, beta = (x.float() for x in draw(1024))
    k = torch.nn.functional.normalize(k + 3, dim=-1)
    out, _ = erase_and_write(q, k, v, torch.ones_like(beta), chunk=64)
    exact, _ = erase_and_write(*(x.double() for x in (q, k, v, torch.ones_like(beta))), chunk=1)
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


# Several steps for a token


STEPS = pytest.mark.parametrize(("steps", "negative"), [(2, True), (3, False), (1, True)])


@both
@STEPS
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("decay", [False, True])
def test_a_token_makes_its_steps_one_after_the_other(
    shape: Shape, steps: int, negative: bool, chunk: int, decay: bool
) -> None:
    module, x = Delta(shape, steps=steps, negative=negative, decay=decay, chunk=chunk).double(), tokens(shape)
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    columns, rates = (x @ p[name].T for name in ("qkv.weight", "beta.weight"))
    rates = (2 if negative else 1) / (1 + torch.exp(-rates))

    def unit(y: Tensor) -> Tensor:
        y = y / (1 + torch.exp(-y))
        return y / y.square().sum(-1, keepdim=True).sqrt()

    out = torch.zeros(2, 23, 12, dtype=torch.float64)
    for h in range(3):
        for order, reads_itself in ((range(23), True), (range(22, -1, -1), False)):
            state = torch.zeros(2, 4, 4, dtype=torch.float64)  # values in rows, keys in columns, as in the papers
            for t in order:
                if decay:
                    logit = x[:, t] @ p["fading.weight"][h] + p["step_bias"][h]
                    state = state * torch.exp(-p["log_A"][h].exp() * torch.log1p(torch.exp(logit)))[:, None, None]
                before = state
                for j in range(steps):
                    k, v = (columns[:, t, 12 * (1 + i * steps + j) + 4 * h :][:, :4] for i in range(2))
                    k, rate = unit(k), rates[:, t, 3 * j + h, None, None]
                    householder = torch.eye(4, dtype=torch.float64) - rate * k[:, :, None] * k[:, None]
                    state = state @ householder + rate * v[:, :, None] * k[:, None]
                if reads_itself or not shape.causal:
                    q = unit(columns[:, t, 4 * h : 4 * h + 4])
                    out[:, t, 4 * h : 4 * h + 4] += ((state if reads_itself else before) @ q[..., None])[..., 0]
    y = out.view(2, 23, 3, 4)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["norm.weight"]
    close(module(x), y.flatten(2) @ p["out.weight"].T)
