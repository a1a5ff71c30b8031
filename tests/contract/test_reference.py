from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.contract.problem.reference import exact_attention, masked_attention, relative_error
from attnbench.measure.memory import peak_tensor_bytes

B, H, N, D = 2, 3, 7, 4


def draw(M: int = N) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D, dtype=torch.float64), *torch.randn(2, B, H, M, D, dtype=torch.float64)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, key_mask: Tensor | None, added: Tensor | None = None
) -> Tensor:
    """One number at a time, in Python."""
    B, H, N, D = q.shape
    output = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(N):
                seen = [
                    j
                    for j in range(k.shape[2])
                    if (not causal or j <= i) and (key_mask is None or bool(key_mask[b, j]))
                ]
                weights = [
                    math.exp(
                        sum(float(q[b, h, i, d]) * float(k[b, h, j, d]) for d in range(D)) / math.sqrt(D)
                        + (0 if added is None else float(added[h, i, j]))
                    )
                    for j in seen
                ]
                for weight, j in zip(weights, seen, strict=True):
                    output[b, h, i] += weight / sum(weights) * v[b, h, j]
    return output


def some_keys(M: int) -> Tensor:
    """The later keys of the first sequence, nothing of the second."""
    mask = torch.zeros(B, M, dtype=torch.bool)
    mask[0, 2:] = True
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("causal", "M"), [(False, N), (True, N), (False, 9), (False, 1)])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 512])
def test_equals_a_literal_loop_whatever_the_block(block: int, causal: bool, M: int, masked: bool) -> None:
    q, k, v = draw(M)
    key_mask = some_keys(M) if masked else None
    exact = exact_attention(q, k, v, causal=causal, key_mask=key_mask, block=block)
    torch.testing.assert_close(exact, by_hand(q, k, v, causal, key_mask), rtol=0, atol=1e-14)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [1, 3, 512])
def test_a_bias_is_added_to_the_logits(block: int, causal: bool, masked: bool) -> None:
    inputs, added = draw(), torch.randn(H, N, N, dtype=torch.float64)
    key_mask = some_keys(N) if masked else None
    exact = exact_attention(
        *inputs,
        causal=causal,
        key_mask=key_mask,
        bias=lambda queries, keys, dtype: added[:, queries, keys].to(dtype),
        block=block,
    )
    torch.testing.assert_close(exact, by_hand(*inputs, causal, key_mask, added), rtol=0, atol=1e-14)


def test_queries_that_see_no_key_give_zero_and_finite_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in draw())
    exact = exact_attention(q, k, v, causal=True, key_mask=some_keys(N))
    assert exact[1].count_nonzero() == 0
    assert exact[0, :, :2].count_nonzero() == 0
    assert exact[0, :, 2:].count_nonzero() == H * (N - 2) * D
    grads = torch.autograd.grad(exact.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    assert all(grad[1].count_nonzero() == 0 for grad in grads)


def test_gradcheck_with_rows_that_see_nothing() -> None:
    q, k, v = (x[:1, :1, :4, :2].clone().requires_grad_() for x in draw())
    allowed = torch.rand(4, 4) < 0.5
    allowed[2] = False
    assert torch.autograd.gradcheck(lambda q, k, v: masked_attention(q, k, v, allowed), (q, k, v))


def test_hidden_keys_may_hold_anything_finite() -> None:
    q, k, v = draw()
    mask = some_keys(N)
    exact = exact_attention(q, k, v, key_mask=mask)
    hidden = ~mask[:, None, :, None]
    poisoned = exact_attention(q, k.masked_fill(hidden, 1e30), v.masked_fill(hidden, 1e30), key_mask=mask)
    assert torch.equal(poisoned, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float64_whatever_it_is_given(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in draw())
    exact = exact_attention(q, k, v)
    assert exact.dtype == torch.float64
    assert torch.equal(exact, exact_attention(q.double(), k.double(), v.double()))


def test_logits_too_large_for_exp_are_no_problem() -> None:
    q, k, v = draw()
    exact = exact_attention(q * 1e6, k, v, causal=True)
    assert exact.isfinite().all()
    best = (q @ k.mT).masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -math.inf).argmax(-1)
    torch.testing.assert_close(exact, v.gather(2, best[..., None].expand(-1, -1, -1, D)))


def test_memory_is_that_of_a_block_of_rows() -> None:
    n = 512
    q, k, v = torch.randn(3, 1, 1, n, 4)
    assert (peak_tensor_bytes(lambda: exact_attention(q, k, v, causal=True, block=16)) or 0) < n * n * 8 / 4


def test_masked_attention_takes_any_mask_that_broadcasts() -> None:
    q, k, v = draw()
    allowed = torch.rand(N, N) < 0.6
    per_head = masked_attention(q, k, v, allowed.expand(B, H, N, N))
    torch.testing.assert_close(masked_attention(q, k, v, allowed), per_head)
    for i in range(N):
        seen = allowed[i].nonzero()[:, 0]
        alone = exact_attention(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen])
        torch.testing.assert_close(per_head[:, :, i : i + 1], alone, rtol=0, atol=1e-14)


def test_relative_error_is_the_frobenius_norm_of_the_difference_over_that_of_the_truth() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.tensor([3.0, 5.0]), exact) == pytest.approx(0.2, abs=1e-15)
    assert relative_error(torch.zeros(2), exact) == 1
    assert relative_error(torch.zeros(2, dtype=torch.float16, requires_grad=True), exact) == 1
