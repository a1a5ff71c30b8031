from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.pair_scores import PRODUCT, PairScore, attend_by_score
from attnbench.contract.problem.reference import exact_attention

B, H, N, D = 2, 3, 23, 4


def qkv(M: int = N) -> list[Tensor]:
    return [torch.randn(B, H, n, D, dtype=torch.float64) for n in (N, M, M)]


def holes(M: int = N) -> Tensor:
    mask = torch.arange(M) % 5 != torch.tensor([[0], [3]])
    mask[1, -4:] = False
    return mask


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 5, 22, 23, 64, None])
@pytest.mark.parametrize(("causal", "M"), [(False, N), (True, N), (False, 31)])
@pytest.mark.parametrize("padded", [False, True])
def test_with_products_as_scores_it_is_softmax_attention_forward_and_backward(
    chunk: int | None, causal: bool, M: int, padded: bool
) -> None:
    inputs, mask = [x.requires_grad_() for x in qkv(M)], holes(M) if padded else None
    q, k, v = inputs
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (k, v))
    out = attend_by_score(PRODUCT, q * D**-0.5, k, v, causal=causal, key_mask=mask, chunk=chunk)
    expected = exact_attention(*inputs, causal=causal, key_mask=mask)
    close(out, expected)
    grad = torch.randn_like(out)
    mine, theirs = (torch.autograd.grad(y, inputs, grad) for y in (out, expected))
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)


@pytest.mark.parametrize("most", [1, 300, 1 << 18])
def test_weights_of_a_score_get_gradients_from_all_tiles_and_examples(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling.TUNED, "pair_scores.hidden", tiling.Tuned(most))
    q, k, v = qkv()
    temperature = torch.rand(H, D, dtype=torch.float64, requires_grad=True)

    def score(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (x * w[:, None]) @ y.mT

    out = attend_by_score(PairScore(score, (temperature,)), q, k, v, causal=True, key_mask=None)
    expected = exact_attention(q * temperature[:, None] * D**0.5, k, v, causal=True)
    close(out, expected)
    grad = torch.randn_like(out)
    close(*(torch.autograd.grad(y, temperature, grad)[0] for y in (out, expected)))


def test_what_needs_no_gradient_gets_none() -> None:
    q, k, v = qkv()
    v.requires_grad_()
    out = attend_by_score(PRODUCT, q, k, v, causal=False, key_mask=None)
    (grad,) = torch.autograd.grad(out.sum(), v)
    close(grad.sum(2), torch.full((B, H, D), float(N), dtype=torch.float64))


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient() -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0], mask[1, :6] = False, False
    out = attend_by_score(PRODUCT, *inputs, causal=True, key_mask=mask, chunk=4)
    assert not out[0].any()
    assert not out[1, :, :6].any()
    for grad in torch.autograd.grad(out.square().sum(), inputs):
        assert grad.isfinite().all()
        assert not grad[0].any()
