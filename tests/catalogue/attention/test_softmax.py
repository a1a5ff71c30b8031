from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Bias, Shape
from attnbench.measure.memory import peak_tensor_bytes

B, H, N, D = 3, 2, 13, 8


def draw(M: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D, dtype=dtype), *torch.randn(2, B, H, M, D, dtype=dtype)


def some_keys(M: int = N) -> Tensor:
    """All of the first sequence, the middle of the second, nothing of the third."""
    mask = torch.ones(B, M, dtype=torch.bool)
    mask[1, :2] = mask[1, 9:] = mask[2] = False
    return mask


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("causal", [False, True])
def test_keeps_the_dtype_and_rounds_no_more_than_it_must(dtype: torch.dtype, bound: float, causal: bool) -> None:
    q, k, v = draw(dtype=dtype)
    output = Softmax(Shape(B, H, N, D, causal=causal))(q, k, v, key_mask=some_keys())
    assert output.dtype == dtype
    assert relative_error(output, exact_attention(q, k, v, causal=causal, key_mask=some_keys())) < bound


@pytest.mark.parametrize("causal", [False, True])
def test_a_hidden_key_with_the_lowest_logits_of_float16_makes_no_nan(causal: bool) -> None:
    q, k, v = (torch.full((B, H, N, D), x, dtype=torch.float16, requires_grad=True) for x in (-100.0, 100.0, 1.0))
    output = Softmax(Shape(B, H, N, D, causal=causal))(q, k, v, key_mask=some_keys())
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), (q, k, v)))


def test_without_gradients_holds_one_matrix_and_with_them_no_more_than_two_forward() -> None:
    n = 256
    q, k, v = torch.randn(3, 1, 2, n, 8)
    matrix = 2 * n * n * 4
    variant = Softmax(Shape(1, 2, n, 8))
    assert matrix <= (peak_tensor_bytes(lambda: variant(q, k, v)) or 0) <= 1.2 * matrix
    q.requires_grad_()
    assert (peak_tensor_bytes(lambda: variant(q, k, v)) or 0) <= 2.2 * matrix


@pytest.mark.parametrize("bias", ["alibi", "relative"])
def test_a_bias_is_at_most_one_more_matrix_for_each_head_and_not_for_each_example(bias: Bias) -> None:
    n = 128
    q, k, v = torch.randn(3, 6, 2, n, 8)
    plain, biased = Softmax(Shape(6, 2, n, 8)), Softmax(Shape(6, 2, n, 8, bias=bias))
    with torch.no_grad():
        more = (peak_tensor_bytes(lambda: biased(q, k, v)) or 0) - (peak_tensor_bytes(lambda: plain(q, k, v)) or 0)
    assert 0 < more <= 1.05 * 2 * n * n * 4


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_equals_the_reference(causal: bool) -> None:
    q, k, v = (x.cuda() for x in draw(dtype=torch.float32))
    output = Softmax(Shape(B, H, N, D, causal=causal)).cuda()(q, k, v, key_mask=some_keys().cuda())
    exact = exact_attention(q, k, v, causal=causal, key_mask=some_keys().cuda())
    assert relative_error(output, exact) < 1e-5
