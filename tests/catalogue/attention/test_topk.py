from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.topk import TopK
from attnbench.catalogue.engines.gathered.largest import STRIDE, largest
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import built

B, H, N, D = 2, 3, 13, 4


def draw(M: int = N, *, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, n, D, dtype=torch.float64), *torch.randn(2, B, H, M, D, dtype=torch.float64)


def definition(q: Tensor, k: Tensor, v: Tensor, keys: int, visible: Tensor) -> Tensor:
    """One query at a time: sort its visible logits, keep the largest, average the values there."""
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(q.shape[2]):
                seen = visible[b, i].nonzero()[:, 0]
                logits = k[b, h, seen] @ q[b, h, i] / D**0.5
                best = logits.sort(descending=True).indices[:keys]
                if len(best):
                    out[b, h, i] = logits[best].softmax(0) @ v[b, h, seen[best]]
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("causal", "M"), [(False, N), (True, N), (False, 17)])
@pytest.mark.parametrize("options", ["keys=1", "keys=4", "keys=4,chunk=5", "keys=2,chunk=1", "keys=100,chunk=3"])
def test_every_query_averages_its_largest_logits(options: str, causal: bool, M: int, masked: bool) -> None:
    q, k, v = draw(M)
    key_mask = torch.rand(B, M) < torch.tensor([[0.6], [0.2]]) if masked else None
    module = built(TopK, f"topk:{options}", Shape(B, H, N, D, M, causal))
    visible = torch.ones(B, N, M, dtype=torch.bool).tril(0 if causal else M)
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    expected = definition(q, k, v, module.keys, visible)
    torch.testing.assert_close(module(q, k, v, key_mask=key_mask), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(module.dense(q, k, v, key_mask=key_mask), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [1, 3, 9])
def test_searching_in_groups_finds_the_same_keys(causal: bool, keys: int) -> None:
    n = 16 * keys + 21  # groups are used, and some keys are in none
    q, k, v = torch.randn(3, B, H, n, D, dtype=torch.float64)
    assert n // STRIDE >= 2 * keys
    visible = torch.ones(B, n, n, dtype=torch.bool).tril(0 if causal else n)
    got = TopK(Shape(B, H, n, D, causal=causal), keys=keys, chunk=50)(q, k, v)
    torch.testing.assert_close(got, definition(q, k, v, keys, visible), rtol=0, atol=1e-13)


def test_the_largest_are_found_wherever_they_are() -> None:
    for at in ([0, 1, 2], [0, 8, 16], [40, 41, 42], [5, 39, 42]):
        row = torch.arange(43.0).neg()
        row[at] = torch.tensor([7.0, 9.0, 8.0])
        kept, chosen = largest(row[None], 2)
        assert sorted(chosen[0].tolist()) == sorted(at[1:])
        assert sorted(kept[0].tolist()) == [8.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_by_unrounded_logits(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(40, n=40))
    module = TopK(Shape(B, H, 40, D), keys=3)
    out = module(q, k, v)
    out.sum().backward()
    assert out.dtype == dtype
    exact = module.dense(*(x.detach().double() for x in (q, k, v)))
    assert relative_error(out, exact) < torch.finfo(dtype).eps
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_neither_pass_holds_a_matrix_of_all_pairs() -> None:
    n = 2048
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
    module = TopK(Shape(1, 1, n, 8), keys=4)
    with torch.no_grad():
        forward = peak_tensor_bytes(lambda: module(q, k, v))
    training = peak_tensor_bytes(lambda: module(q, k, v).sum().backward())
    assert forward is not None
    assert training is not None
    assert max(forward, training) < n * n * 4
