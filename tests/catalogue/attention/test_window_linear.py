from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.window_linear import WindowLinear
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import both, built, close, qkv

each_map = pytest.mark.parametrize("features", ["hedgehog", "taylor", "elu+1"])


def make(shape: Shape, features: str, window: int = 3, chunk: int = 5) -> WindowLinear:
    module = built(WindowLinear, "window-linear", shape, features=features, window=window, chunk=chunk).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.5 * torch.randn_like(weight)
    return module


def by_hand(module: WindowLinear, q: Tensor, k: Tensor, v: Tensor, causal: bool, features: str, window: int) -> Tensor:
    """Row by row, key by key."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = range(i + 1 if causal else q.shape[2])
                logits = {j: q[b, h, i] @ k[b, h, j] / 2 for j in seen}
                largest = max(float(logits[j]) for j in seen if abs(i - j) <= window)
                weights = []
                for j in seen:
                    if abs(i - j) <= window:
                        near = logits[j]
                        if features == "hedgehog":
                            near = near - largest + module.log_gamma[h]
                        weights.append(near.exp())
                    elif features == "taylor":
                        weights.append(1 + logits[j] + logits[j] ** 2 / 2)
                    elif features == "elu+1":
                        phi = [torch.nn.functional.elu(x) + 1 for x in (q[b, h, i], k[b, h, j])]
                        weights.append(phi[0] @ phi[1])
                    else:
                        u, w = module.W_q[h] @ q[b, h, i], module.W_k[h] @ k[b, h, j]
                        weights.append(torch.cat([u, -u]).softmax(0) @ torch.cat([w, -w]).softmax(0))
                row = torch.stack(weights)
                out[b, h, i] = row / row.sum() @ v[b, h, : len(seen)]
    return out.detach()


@both
@each_map
def test_near_keys_weigh_by_exponentials_and_far_ones_by_features_under_one_sum(shape: Shape, features: str) -> None:
    module, inputs = make(shape, features), qkv(shape)
    close(module(*inputs).detach(), by_hand(module, *inputs, shape.causal, features, 3))


def test_a_row_whose_logits_all_lie_far_below_zero_keeps_its_weights() -> None:
    shape = Shape(1, 1, 9, 4, causal=True)
    q, k, v = (torch.randn(1, 1, 9, 4) for _ in range(3))
    q, k = q / 8 + 40, k / 8 - 40
    out = make(shape, "elu+1", window=3).float()(q, k, v)
    expected = exact_attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, :4].double(), expected[:, :, :4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, -84.0), (torch.float64, -300.0)])
def test_weights_that_are_all_tiny_keep_their_shares(dtype: torch.dtype, far: float) -> None:
    """A key weighs e^-84, say, in the window, and six times as much outside of it."""
    shape = Shape(1, 1, 9, 4, causal=True)
    q, k, v = (torch.full((1, 1, 9, 4), number, dtype=dtype) for number in (far, 0.5, 0.0))
    v += torch.randn(1, 1, 9, 4, dtype=dtype)
    module = make(shape, "elu+1", window=3)
    expected = module.dense(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(module.to(dtype)(q, k, v).double(), expected, rtol=1e-5, atol=1e-5)
