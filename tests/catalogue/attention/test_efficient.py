from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel import efficient
from attnbench.catalogue.attention.kernel.efficient import Efficient
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, SHAPE, both, mask, qkv


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None = None) -> Tensor:
    """Row by row and sequence by sequence, over the keys that a row sees."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            seen = torch.arange(k.shape[2]) <= (t if causal else k.shape[2])
            if key_mask is not None:
                seen = seen & key_mask[b]
            if seen.any():
                context = k[b, :, seen].softmax(1).mT @ v[b, :, seen]  # (H, D, E)
                out[b, :, t] = (q[b, :, t, None].softmax(-1) @ context)[:, 0]
    return out


@pytest.mark.parametrize("rows", [1, 7, 23])
def test_keys_in_several_tiles_are_the_formula(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient, "_ROWS", rows)
    q, k, v = qkv(SHAPE)
    k[:, :, ::5] += 400  # the largest so far changes from tile to tile, far beyond what exp takes
    real = mask()
    with torch.inference_mode():
        got = Efficient(SHAPE)(q, k, v, key_mask=real)
    torch.testing.assert_close(got, by_hand(q, k, v, causal=False, key_mask=real), rtol=0, atol=1e-12)


@both
@pytest.mark.parametrize("chunk", [1, 2, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_the_formula_row_by_row_for_every_chunk(shape: Shape, chunk: int, padded: bool) -> None:
    q, k, v = qkv(shape)
    key_mask = mask() if padded else None
    model, expected = Efficient(shape, chunk=chunk), by_hand(q, k, v, shape.causal, key_mask)
    assert torch.allclose(model(q, k, v, key_mask=key_mask), expected, atol=1e-13)
    assert torch.allclose(model.dense(q, k, v, key_mask=key_mask), expected, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("jump", [200.0, -200.0, 3e4])
def test_keys_of_very_different_size_neither_overflow_nor_lose_early_rows(chunk: int, jump: float) -> None:
    q, k, v = qkv(CAUSAL)
    k[:, :, 9] += jump
    k[:, :, 17:, 3] -= jump
    expected = by_hand(q, k, v, True)
    inputs = [x.float().requires_grad_() for x in (q, k, v)]
    out = Efficient(CAUSAL, chunk=chunk)(*inputs)
    assert torch.allclose(out.double(), expected, atol=2e-2 if abs(jump) > 1e4 else 1e-4)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), inputs))
