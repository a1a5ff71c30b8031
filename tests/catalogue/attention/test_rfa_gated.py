from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.rfa_gated import GatedRandomFeatureAttention
from attnbench.contract.problem.shape import Shape

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=8)
CAUSAL = Shape(batch=2, heads=3, seq_len=23, head_dim=8, causal=True)
kernels = pytest.mark.parametrize("kernel", ["gaussian", "arccos"])


def make(shape: Shape, **options: object) -> GatedRandomFeatureAttention:
    model = GatedRandomFeatureAttention(shape, **options).double()  # type: ignore[arg-type]
    with torch.no_grad():
        model.sigma += 0.3 * torch.randn_like(model.sigma)
    return model


def qkv(shape: Shape = CAUSAL) -> list[Tensor]:
    return [torch.randn(shape.B, shape.H, shape.N, shape.D, dtype=torch.float64) for _ in range(3)]


def recurrence(model: GatedRandomFeatureAttention, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Token by token, as the paper writes it; causal."""
    B, N, C = x.shape
    H, D = model.heads, C // model.heads
    q, k, v = ((x @ part.T).view(B, N, H, D) for part in model.qkv.weight.chunk(3))
    out = torch.zeros(B, N, C, dtype=x.dtype)

    def phi(x: Tensor, h: int) -> Tensor:
        u = model.projection @ (model.sigma[h, 0] * x / x.norm() / model.temperature)
        return torch.cat([u.sin(), u.cos()]) if model.gaussian else u.clamp(min=0) + 0.001

    for b in range(B):
        for h in range(H):
            S, z = torch.zeros(1), torch.zeros(1)
            for t in range(N):
                if key_mask is None or key_mask[b, t]:
                    g = torch.sigmoid(model.gate.weight[h] @ x[b, t] + model.gate.bias[h])
                    key = phi(k[b, t, h], h)
                    S = g * S + (1 - g) * torch.outer(key, v[b, t, h])
                    z = g * z + (1 - g) * key
                if z.numel() > 1:
                    query = phi(q[b, t, h], h)
                    out[b, t, h * D : (h + 1) * D] = query @ S / (query @ z)
    return out @ model.out.weight.T


@kernels
@pytest.mark.parametrize("chunk", [1, 5, 23, 64])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_recurrence_token_by_token(kernel: str, chunk: int, padded: bool) -> None:
    model = make(CAUSAL, features=11, kernel=kernel, chunk=chunk)
    x = torch.randn(2, 23, 24, dtype=torch.float64)
    key_mask = None
    if padded:
        key_mask = torch.rand(2, 23) < 0.7
        key_mask[1, :4] = False
    expected = recurrence(model, x, key_mask)
    size = expected.abs().amax(-1, keepdim=True).clamp(min=1.0)  # denominators may come near 0
    real = torch.ones(2, 23, dtype=torch.bool) if key_mask is None else key_mask
    assert ((model(x, key_mask=key_mask) - expected) / size)[real].abs().max() < 1e-10
    assert ((model.dense(x, key_mask=key_mask) - expected) / size)[real].abs().max() < 1e-10


@kernels
def test_without_causality_what_lies_between_counts_alike_in_both_directions(kernel: str) -> None:
    model = make(SHAPE, features=32, kernel=kernel, chunk=5)
    x = torch.randn(2, 23, 24, dtype=torch.float64)
    key_mask = torch.rand(2, 23) < 0.7
    assert torch.allclose(model(x), model.dense(x), atol=1e-10)
    assert torch.allclose(model(x, key_mask=key_mask), model.dense(x, key_mask=key_mask), atol=1e-10)
    # One query, one key everywhere, gates of a half: the weight halves with each step away from the token.
    q, k = (x[:, :, :1].expand_as(x) for x in qkv()[:2])
    v = torch.zeros_like(q)
    v[:, :, 12] = 1.0
    out = model.mix(q, k, v, torch.zeros(2, 3, 23, 1, dtype=torch.float64))
    assert torch.allclose(out[:, :, 11] / out[:, :, 12], 0.5 * torch.ones(()).double(), rtol=1e-2)
    assert torch.allclose(out[:, :, 13] / out[:, :, 12], 0.5 * torch.ones(()).double(), rtol=1e-2)


@pytest.mark.parametrize("logit", [-300.0, 300.0])
def test_gates_that_are_shut_or_open_give_finite_outputs_and_gradients(logit: float) -> None:
    model = make(CAUSAL, kernel="arccos").float()
    q, k, v = (x.float().requires_grad_() for x in qkv())
    gate = (torch.randn(2, 3, 23, 1) + logit).requires_grad_()
    out = model.mix(q, k, v, gate)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v, gate)))


def test_long_sequences_keep_their_digits() -> None:
    shape = Shape(1, 1, 4096, 8, causal=True)
    model = make(shape, kernel="arccos", features=16)
    x = torch.randn(1, 4096, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(model.float()(x.float()).double(), model.double()(x), atol=1e-5)
