from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.low_rank.nystrom import Nystrom
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.low_rank.pseudo_inverse import newton
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close

F64 = torch.float64


def qkv(N: int = 23, M: int | None = None, D: int = 5, B: int = 2, H: int = 3) -> list[Tensor]:
    return [torch.randn(B, H, length, D, dtype=F64) for length in (N, M or N, M or N)]


def nystrom(N: int = 23, M: int | None = None, D: int = 5, **options: object) -> Nystrom:
    return built(Nystrom, "nystrom", Shape(2, 3, N, D, kv_len=M), **{"landmarks": 5, **options}).double()


def test_the_formula_with_equal_runs_is_that_of_the_paper() -> None:
    q, k, v = qkv(20)
    q_mean, k_mean = (x.unflatten(2, (5, 4)).mean(3) for x in (q, k))

    def weights(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.mT / 5**0.5).softmax(-1)

    A = weights(q_mean, k_mean)
    expected = weights(q, k_mean) @ torch.linalg.inv(A) @ weights(q_mean, k) @ v
    close(nystrom(20, pinv="exact")(q, k, v), expected)


@pytest.mark.parametrize("N", [7, 16, 23])
def test_a_landmark_for_each_token_and_the_exact_inverse_is_exact_attention(N: int) -> None:
    inputs = qkv(N)
    for landmarks in (N, N + 9):
        close(nystrom(N, landmarks=landmarks, pinv="exact")(*inputs), exact_attention(*inputs), 1e-9)


def test_a_landmark_for_each_token_and_newton_steps_nears_exact_attention_as_the_steps_do() -> None:
    torch.manual_seed(1)
    for _ in range(3):
        inputs = [torch.randn(1, 2, 64, 32, dtype=F64) for _ in range(3)]
        exact = exact_attention(*inputs)

        def error(steps: int, inputs: list[Tensor] = inputs, exact: Tensor = exact) -> float:
            module = build("nystrom:landmarks=64", Shape(1, 2, 64, 32), iterations=steps).double()
            return relative_error(module(*inputs), exact)

        # No short cut to exact attention where there are as many landmarks as tokens.
        assert 3e-2 < error(6) < 5e-2
        assert error(12) < 4e-4
        assert error(20) < 1e-8


def test_newton_steps_converge_to_the_pseudo_inverse_of_any_matrix() -> None:
    for size in ((4, 7), (7, 4), (5, 5)):
        A = torch.randn(3, *size, dtype=F64)
        A[0, :, -2:] = 0
        start = A.mT / torch.linalg.matrix_norm(A, 2)[:, None, None] ** 2
        close(newton(A, start, 30), torch.linalg.pinv(A), 1e-8)


def test_six_steps_are_the_default() -> None:
    inputs = qkv()
    assert torch.equal(nystrom()(*inputs), nystrom(iterations=6)(*inputs))
    assert not torch.equal(nystrom()(*inputs), nystrom(iterations=5)(*inputs))


def test_rows_sum_to_one_with_the_exact_inverse_and_not_after_few_steps() -> None:
    q, k, v = qkv()
    close(nystrom(pinv="exact")(q, k, torch.ones_like(v)), torch.ones_like(v))
    few = nystrom(iterations=2)(q, k, torch.ones_like(v))
    assert (few - 1).abs().max() > 1e-3


def test_the_convolution_is_added_for_each_head_and_starts_as_a_moving_average() -> None:
    inputs = qkv()
    plain, module = nystrom(), nystrom(conv=3)
    v = torch.nn.functional.pad(inputs[2], (0, 0, 1, 1))
    close(module(*inputs) - plain(*inputs), (v[:, :, :-2] + v[:, :, 1:-1] + v[:, :, 2:]) / 3, 1e-7)
    assert module.convolution is not None
    with torch.no_grad():
        module.convolution.zero_()
        module.convolution[1, 0] = 1
    added = module(*inputs) - plain(*inputs)
    close(added[:, 1, 1:], inputs[2][:, 1, :-1])
    assert added[:, [0, 2]].abs().max() < 1e-12


def test_with_fewer_landmarks_than_tokens_the_exact_inverse_is_worse_than_six_steps() -> None:
    q, k, v = qkv(256, D=16)
    exact = exact_attention(q, k, v)
    few, full = (relative_error(nystrom(256, D=16, landmarks=32, **o)(q, k, v), exact) for o in ({}, {"pinv": "exact"}))
    assert 2 * few < full
