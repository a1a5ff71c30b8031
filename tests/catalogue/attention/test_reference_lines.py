from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.reference.identity import Identity
from attnbench.catalogue.attention.reference.mean_value import MeanValue
from attnbench.catalogue.attention.reference.oracle_lowrank import OracleLowRank, _Truncate
from attnbench.catalogue.attention.reference.oracle_topk import OracleTopK
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.test_softmax import B, D, H, N, draw, some_keys


def probabilities(q: Tensor, k: Tensor, causal: bool = False, key_mask: Tensor | None = None) -> Tensor:
    """The exact matrix P ``(B, H, N, M)``."""
    identity = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    return exact_attention(q, k, identity, causal=causal, key_mask=key_mask)


# identity


def test_identity_hands_back_the_values_themselves() -> None:
    q, k, v = draw()
    assert Identity(Shape(B, H, N, D))(q, k, v) is v


def test_identity_gives_zero_where_a_token_may_not_see_itself() -> None:
    q, k, v = draw()
    mask = some_keys()
    output = Identity(Shape(B, H, N, D))(q, k, v, key_mask=mask)
    assert torch.equal(output, v * mask[:, None, :, None])


def test_identity_keeps_nothing_when_it_decodes() -> None:
    q, k, v = draw()
    module = Identity(Shape(B, H, N, D, causal=True))
    assert module.begin(q, k, v) == ()
    output, state = module.step((), q[:, :, :1], k[:, :, :1], v[:, :, :1])
    assert torch.equal(output, v[:, :, :1])
    assert state == ()


# mean-value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("causal", "M"), [(False, N), (True, N), (False, 17)])
def test_mean_value_is_exact_attention_with_all_queries_zero(causal: bool, M: int, masked: bool) -> None:
    q, k, v = draw(M)
    key_mask = some_keys(M) if masked else None
    output = MeanValue(Shape(B, H, N, D, M, causal))(q, k, v, key_mask=key_mask)
    exact = exact_attention(q * 0, k, v, causal=causal, key_mask=key_mask)
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_mean_value_in_half_precision_sums_in_float32(causal: bool, masked: bool) -> None:
    n = 3000  # of 100 each: more than float16 can hold
    mask = torch.ones(1, n, dtype=torch.bool) if masked else None
    for dtype in (torch.float16, torch.bfloat16):
        v = torch.full((1, 1, n, 2), 100.0, dtype=dtype)
        assert torch.equal(MeanValue(Shape(1, 1, n, 2, causal=causal))(v, v, v, key_mask=mask), v)


def test_mean_value_error_on_gaussian_logits_is_the_known_one() -> None:
    n, std = 512, 1.0
    logits = std * torch.randn(1, 1, n, n, dtype=torch.float64)
    v = torch.randn(1, 1, n, 2000, dtype=torch.float64)
    # D = M and keys √D times the identity make q itself the logits.
    exact = exact_attention(logits, math.sqrt(n) * torch.eye(n)[None, None], v)
    error = relative_error(MeanValue(Shape(1, 1, n, n))(logits, logits, v), exact)
    assert error == pytest.approx(math.sqrt(1 - math.exp(-(std**2))), abs=0.02)


def test_mean_value_keeps_one_sum_when_it_decodes_in_float32_at_least() -> None:
    q, k, v = draw(dtype=torch.float16)
    module = MeanValue(Shape(B, H, N, D, causal=True))
    state = module.begin(q, k, v)
    assert state.total.shape == (B, H, 1, D)
    assert (state.total.dtype, state.tokens) == (torch.float32, N)
    for _ in range(3000):  # of 100 each: more than float16 can hold
        output, state = module.step(state, q[:, :, :1], k[:, :, :1], torch.full_like(v[:, :, :1], 100))
    mean = (v.double().sum(2, keepdim=True) + 300_000) / (N + 3000)
    torch.testing.assert_close(output.double(), mean, rtol=1e-3, atol=0)


# oracle-topk


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("causal", "M"), [(False, N), (True, N), (False, 17)])
@pytest.mark.parametrize("keys", [1, 4, 100])
def test_topk_equals_the_dense_formula(keys: int, causal: bool, M: int, masked: bool, renormalise: bool) -> None:
    q, k, v = draw(M)
    key_mask = some_keys(M) if masked else None
    P = probabilities(q, k, causal, key_mask)
    for row in P.flatten(0, 2):
        row[row.argsort(descending=True)[keys:]] = 0
        if renormalise and row.any():
            row /= row.sum()
    variant = OracleTopK(Shape(B, H, N, D, M, causal), keys=keys, renormalise=renormalise)
    torch.testing.assert_close(variant(q, k, v, key_mask=key_mask), P @ v, rtol=0, atol=1e-14)


def test_topk_goes_over_the_rows_in_blocks() -> None:
    n = 1000  # not a multiple of the block
    q, k, v = torch.randn(3, 1, 2, n, 4)
    variant = OracleTopK(Shape(1, 2, n, 4, causal=True), keys=n)
    exact = exact_attention(q, k, v, causal=True)
    assert relative_error(variant(q, k, v), exact) < 1e-6
    with torch.no_grad():
        assert (peak_tensor_bytes(lambda: variant(q, k, v)) or 0) < 2 * n * n * 4 * 4


def test_topk_with_equal_keys_keeps_only_as_many_as_it_may() -> None:
    q, _, v = draw()
    k = torch.ones_like(q)
    output = OracleTopK(Shape(B, H, N, D), keys=3, renormalise=False)(q, k, torch.ones_like(v))
    torch.testing.assert_close(output, torch.full_like(output, 3 / N))


# oracle-lowrank


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("M", [N, 9, 17])
@pytest.mark.parametrize("rank", [1, 4, 100])
def test_lowrank_equals_the_truncated_decomposition(rank: int, M: int, masked: bool) -> None:
    q, k, v = draw(M)
    key_mask = some_keys(M) if masked else None
    P = probabilities(q, k, key_mask=key_mask)
    if key_mask is not None and M == N:
        P = P * key_mask[:, None, :, None]
    U, s, Wt = torch.linalg.svd(P)
    r = min(rank, N, M)
    want = U[..., :r] @ (s[..., :r, None] * Wt[..., :r, :]) @ v
    output = OracleLowRank(Shape(B, H, N, D, M), rank=rank)(q, k, v, key_mask=key_mask)
    torch.testing.assert_close(output, want, rtol=0, atol=1e-12)


def test_lowrank_derivative_is_finite_and_right_where_singular_values_coincide() -> None:
    U, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    W, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    s = torch.tensor([2.0, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    matrix = ((U[:, :5] * s) @ W.mT).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: _Truncate.apply(x, 2), (matrix,))
    grads = torch.autograd.grad(_Truncate.apply(matrix * 0, 2).sum(), matrix)
    assert grads[0].isfinite().all()


# all four


# both oracles


@pytest.mark.parametrize("name", ["oracle-lowrank", "oracle-topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_oracles_that_keep_everything_are_exact_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    q, k, v = draw(dtype=dtype)
    output = build(name, Shape(B, H, N, D))(q, k, v, key_mask=some_keys())
    assert output.dtype == dtype
    real = some_keys()[:, None, :, None]
    exact = exact_attention(q, k, v, key_mask=some_keys()) * real
    assert relative_error(output * real, exact) < torch.finfo(dtype).eps


def test_mean_value_holds_one_row_unless_rows_differ() -> None:
    q, k, v = draw()
    assert build("mean-value", Shape(B, H, N, D))(q, k, v).stride(2) == 0
    assert build("mean-value", Shape(B, H, N, D, causal=True))(q, k, v).stride(2) != 0


def test_lowrank_decomposes_in_float64_whatever_the_inputs_are() -> None:
    module = build("oracle-lowrank:rank=3", Shape(B, H, N, D))
    for dtype in (torch.float32, torch.bfloat16):
        inputs = draw(dtype=dtype)
        assert torch.equal(module(*inputs), module(*(x.double() for x in inputs)).to(dtype))
