from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.window_linear import WindowLinear
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.recurrent import stretches
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, both, close

each_map = pytest.mark.parametrize("features", ["hedgehog", "taylor", "elu+1"])
HOLES = torch.arange(23) % 5 != torch.tensor([[0], [3]])


def make(shape: Shape, features: str, window: int = 3, chunk: int = 5) -> WindowLinear:
    module = build("window-linear", shape, features=features, window=window, chunk=chunk).double()
    assert isinstance(module, WindowLinear)
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.5 * torch.randn_like(weight)
    return module


def qkv(shape: Shape) -> list[Tensor]:
    return [torch.randn(shape.B, shape.H, shape.N, shape.D, dtype=torch.float64) for _ in range(3)]


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


@both
@each_map
@pytest.mark.parametrize(("window", "chunk"), [(0, 4), (1, 23), (3, 1), (5, 3), (9, 64), (40, 7)])
@pytest.mark.parametrize("stretch", [4, 1024])
def test_equals_the_matrix_forward_and_backward_for_every_window_and_chunk(
    shape: Shape, features: str, window: int, chunk: int, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnbench.catalogue.attention.kernel.window_linear.STRETCH", stretch)
    monkeypatch.setattr(stretches, "KEPT", 2)
    module, inputs = make(shape, features, window, chunk), [x.requires_grad_() for x in qkv(shape)]
    wanted = [*inputs, *module.parameters()]
    for mask in (None, HOLES):
        out, expected = (f(*inputs, key_mask=mask) for f in (module, module.dense))
        close(out, expected)
        grad = torch.randn_like(out)
        mine, theirs = (
            torch.autograd.grad(y, wanted, grad, materialize_grads=True, allow_unused=True) for y in (out, expected)
        )
        for one, other in zip(mine, theirs, strict=True):
            close(one, other.nan_to_num())


def test_a_row_whose_logits_all_lie_far_below_zero_keeps_its_weights() -> None:
    shape = Shape(1, 1, 9, 4, causal=True)
    q, k, v = (torch.randn(1, 1, 9, 4) for _ in range(3))
    q, k = q / 8 + 40, k / 8 - 40
    out = make(shape, "elu+1", window=3).float()(q, k, v)
    expected = exact_attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, :4].double(), expected[:, :, :4], rtol=1e-4, atol=1e-4)


def test_the_state_is_the_window_and_one_sum() -> None:
    module, (q, k, v) = make(CAUSAL, "hedgehog"), qkv(CAUSAL)
    state = module.begin(q, k, v)
    assert state.sums.shape == (2, 3, 8, 5)
    assert state.k.shape == (2, 3, 3, 4)
    _, after = module.step(state, q[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert [x.shape for x in after] == [x.shape for x in state]
