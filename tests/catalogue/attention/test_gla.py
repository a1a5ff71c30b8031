from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.gla import GLA, gated_attention
from attnbench.catalogue.engines.recurrent import stretches
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import CAUSAL, HOLES, both, close, tokens


def qkv(N: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, N, 4, dtype=dtype) for _ in range(3)]


def pair_by_pair(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, causal: bool) -> Tensor:
    out, (N, D) = torch.zeros_like(v), q.shape[1:]
    for i in range(N):
        for j in range(i + 1 if causal else N):
            between = log_decay[:, min(i, j) + 1 : max(i, j) + 1].sum(1)
            out[:, i] += (q[:, i] * k[:, j] * between.exp2()).sum(-1, keepdim=True) * v[:, j] / D**0.5
    return out


def test_equals_the_recurrence_of_the_paper() -> None:
    module, x = GLA(CAUSAL, rank=3, temperature=2.0).double(), tokens(CAUSAL)
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    q, k, v = (x @ weight.T for weight in p["qkv.weight"].split(12))
    alpha = torch.sigmoid(x @ p["decay.0.weight"].T @ p["decay.1.weight"].T + p["decay.1.bias"]).sqrt()
    gate = x @ p["gate.weight"].T + p["gate.bias"]
    rows = torch.zeros(2, 23, 12, dtype=torch.float64)
    for h in range(3):
        own = slice(4 * h, 4 * h + 4)
        state = torch.zeros(2, 4, 4, dtype=torch.float64)
        for t in range(23):
            state = alpha[:, t, own, None] * state + k[:, t, own, None] * v[:, t, None, own]
            y = (q[:, t, own, None] * state).sum(1) / 2
            y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
            rows[:, t, own] = y * gate[:, t, own] * torch.sigmoid(gate[:, t, own])
    close(module(x), rows @ p["out.weight"].T)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 8, 32])
def test_pairs_decay_by_the_tokens_between_them(causal: bool, chunk: int) -> None:
    q, k, v = qkv(19)
    log_decay = -3 * torch.rand(2, 19, 4, dtype=torch.float64)
    out = gated_attention(q, k, v, log_decay, causal=causal, chunk=chunk)
    close(out, pair_by_pair(q, k, v, log_decay, causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strength", [20.0, 30.0, 300.0, 1e4])
def test_the_strongest_decays_neither_overflow_nor_lose_digits(causal: bool, strength: float) -> None:
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-12)):
        inputs = qkv(40, dtype)
        # Strong and absent decays side by side, so that far and near keys share a run of tokens.
        log_decay = -strength * (torch.rand(2, 40, 4) < 0.3).to(dtype) * torch.rand(2, 40, 4, dtype=dtype)
        out = gated_attention(*inputs, log_decay, causal=causal, chunk=32)
        expected = pair_by_pair(*(x.double() for x in (*inputs, log_decay)), causal)
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_for_the_gradients_of_many_stretches_only_their_states_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "STRETCH", 32)
    inputs = [x.requires_grad_() for x in (*qkv(640), -torch.rand(2, 640, 4, dtype=torch.float64))]
    peaks = []
    for kept in (1, 1000):
        monkeypatch.setattr(stretches, "KEPT", kept)
        peaks.append(peak_tensor_bytes(lambda: gated_attention(*inputs, causal=True, chunk=32).sum().backward()))
    few, many = peaks
    assert few is not None
    assert many is not None
    assert few < many / 2


@pytest.mark.parametrize("strength", [1.0, 400.0])
def test_gradients_are_finite_and_right_where_decays_are_strong(strength: float) -> None:
    inputs = [*qkv(19), -strength * torch.rand(2, 19, 4, dtype=torch.float64)]
    inputs = [x.requires_grad_() for x in inputs]
    grad = torch.randn(2, 19, 4, dtype=torch.float64)
    mine = torch.autograd.grad(gated_attention(*inputs, causal=False, chunk=16), inputs, grad)
    theirs = torch.autograd.grad(pair_by_pair(*inputs, causal=False), inputs, grad)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)


@both
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_with_tied_keys_a_token_writes_what_the_decay_takes(shape: Shape, temperature: float) -> None:
    module = GLA(shape, rank=3, chunk=8, temperature=temperature, tied_keys=True).double()
    x = tokens(shape)
    close(module(x, key_mask=HOLES), module.dense(x, key_mask=HOLES))
    q, k, v, log_decay = module._parts(x)
    logits = x @ module.decay[0].weight.T @ module.decay[1].weight.T + module.decay[1].bias
    alpha = (torch.sigmoid(logits) ** (1 / temperature)).view(2, 23, 3, 4).transpose(1, 2)
    close(log_decay.exp2(), alpha)
    close(k, 1 - alpha)
    columns = (x @ module.qkv.weight.T).view(2, 23, 2, 3, 4)
    close(q, columns[:, :, 0].transpose(1, 2))
    close(v, columns[:, :, 1].transpose(1, 2))
