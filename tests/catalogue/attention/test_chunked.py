from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attnbench.catalogue.attention.exact.chunked import Chunked
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes

B, H, N, M, D = 3, 2, 11, 13, 4


def draw(M: int = N, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, N, D, dtype=dtype), *torch.randn(2, B, H, M, D, dtype=dtype)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Hundreds of tiny operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_number_of_threads_decides_only_the_order_of_work() -> None:
    q, k, v = draw(M)
    torch.set_num_threads(4)  # four heads at a time, then the two that are left
    got = Chunked(Shape(B, H, N, D, M), query_chunk=3, key_chunk=3)(q, k, v)
    torch.testing.assert_close(got, exact_attention(q, k, v), rtol=0, atol=1e-12)


def test_gradient_reaches_one_input_alone() -> None:
    q, k, v = draw()
    variant = Chunked(Shape(B, H, N, D), query_chunk=3, key_chunk=3)
    for x in (q, k, v):
        x.requires_grad_()
        variant(q, k, v).square().sum().backward()
        want = torch.autograd.grad(exact_attention(q, k, v).square().sum(), x)[0]
        torch.testing.assert_close(x.grad, want, rtol=0, atol=1e-11)
        x.requires_grad_(False)


def test_defaults_take_less_memory_than_the_matrix() -> None:
    n = 1024
    q, k, v = torch.randn(3, 1, 4, n, 16)
    assert (peak_tensor_bytes(lambda: Chunked(Shape(1, 4, n, 16))(q, k, v)) or 0) < 0.4 * 4 * n * n * 4


@pytest.mark.parametrize("backward", [False, True])
def test_causal_does_half_the_work(backward: bool) -> None:
    n = 256
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=backward) for _ in range(3))

    def flops(causal: bool) -> int:
        with FlopCounterMode(display=False) as counted:
            output = Chunked(Shape(1, 2, n, 8, causal=causal), query_chunk=8, key_chunk=n)(q, k, v)
            if backward:
                output.sum().backward()
        return counted.get_total_flops()

    products = 2 + 5 * backward
    assert flops(False) == products * 2 * 2 * n * n * 8
    assert flops(True) <= 0.52 * flops(False)


def test_a_decoding_step_holds_the_logits_of_a_chunk() -> None:
    n = 4096
    q, k, v = torch.randn(3, 1, 1, n, 4)
    module = Chunked(Shape(1, 1, n, 4, causal=True), query_chunk=4, key_chunk=64)
    state = module.begin(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])
    token = [x[:, :, :1] for x in (q, k, v)]
    assert (peak_tensor_bytes(lambda: module.step(state, *token)) or 0) < n * 4 / 4


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_on_a_gpu_equals_the_dense_formula(dtype: torch.dtype, bound: float) -> None:
    q, k, v = draw(dtype=dtype)
    variant = Chunked(Shape(B, H, N, D, causal=True), query_chunk=3, key_chunk=3)
    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    output = variant(*leaves)
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = exact_attention(*exact_leaves, causal=True)
    assert relative_error(output.cpu(), exact) < bound
    grads, wants = torch.autograd.grad(output.sum(), leaves), torch.autograd.grad(exact.sum(), exact_leaves)
    for grad, want in zip(grads, wants, strict=True):
        assert relative_error(grad.cpu(), want) < 3 * bound


def test_one_number_per_query_is_kept_beside_inputs_and_output_for_the_backward_pass() -> None:
    q, k, v = (x.requires_grad_() for x in draw(M))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = Chunked(Shape(B, H, N, D, M), query_chunk=3, key_chunk=4)(q, k, v)
    numbers = {x.data_ptr(): x.numel() for x in kept}
    assert sum(numbers.values()) == q.numel() + k.numel() + v.numel() + out.numel() + B * H * N
