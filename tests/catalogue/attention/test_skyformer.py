from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.low_rank.skyformer import Skyformer
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close

F64 = torch.float64


def qkv(N: int = 23, M: int | None = None, D: int = 5) -> list[Tensor]:
    return [torch.randn(2, 3, length, D, dtype=F64) for length in (N, M or N, M or N)]


def skyformer(N: int = 23, M: int | None = None, *, seed: int = 0, **options: object) -> Skyformer:
    return built(Skyformer, "skyformer", Shape(2, 3, N, 5, kv_len=M), seed=seed, **{"landmarks": 7, **options}).double()


def kernelized(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax's numerators over exp(‖q‖²/2√D) and exp(‖k‖²/2√D), as the paper introduces it."""
    root = q.shape[-1] ** 0.5
    A = torch.exp(q @ k.mT / root)
    of_q, of_k = (torch.exp(-x.square().sum(-1) / (2 * root)) for x in (q, k))
    return of_q[..., None] * A * of_k[..., None, :] @ v


@pytest.mark.parametrize(("N", "M"), [(23, None), (9, 14)])
def test_with_all_points_as_landmarks_it_is_the_gaussian_kernel_attention(N: int, M: int | None) -> None:
    inputs = qkv(N, M)
    for sampling in ("random", "strided"):
        module = skyformer(N, M, landmarks=N + (M or N), inverse="exact", ridge=1e-14, sampling=sampling)
        close(module(*inputs), kernelized(*inputs), 1e-9)


def test_more_newton_steps_near_the_exact_inverse() -> None:
    inputs = qkv()
    exact = skyformer(inverse="exact", ridge=1e-4, landmarks=46)(*inputs)
    errors = [
        relative_error(skyformer(iterations=steps, ridge=1e-4, landmarks=46)(*inputs), exact) for steps in (1, 3, 6, 12)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] > 1e-3
    assert errors[3] < 1e-10


def test_rows_are_not_normalised() -> None:
    q, k, v = qkv()
    module = skyformer(landmarks=46, inverse="exact", ridge=1e-14)
    sums = module(q, k, torch.ones_like(v))
    close(sums, kernelized(q, k, torch.ones_like(v)), 1e-9)
    assert (sums - 1).abs().max() > 0.1


def test_landmarks_are_one_point_of_each_run_of_the_queries_and_then_the_keys() -> None:
    q, k = (torch.arange(start, start + 20, dtype=F64).view(1, 1, 20, 1) for start in (0, 20))
    for sampling in ("random", "strided"):
        for seed in range(5):
            module = skyformer(20, landmarks=8, sampling=sampling, seed=seed)
            X, filled = module._sample(q, k, None)
            assert filled is None
            assert (X.flatten() // 5).tolist() == list(range(8))
            if sampling == "strided":
                assert (X.flatten() % 5).tolist() == [2.0] * 8


def test_every_point_of_a_run_may_be_drawn() -> None:
    module = skyformer(20, landmarks=4000)
    counts = torch.bincount(module.place * 5 >> 31, minlength=5)
    assert counts.min() > 700
    assert counts.sum() == 4000


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("text", ["skyformer:landmarks=7,sampling=strided", "kernel:sim=gaussian,order=dense"])
def test_what_all_points_share_is_no_part_of_a_kernel_of_differences(text: str, padded: bool) -> None:
    q, k, v = (torch.randn(2, 2, 40, 32) for _ in range(3))
    mask = torch.arange(40) >= torch.tensor([[7], [0]]) if padded else None
    module = build(text, Shape(2, 2, 40, 32))
    q, k = q + 256, k + 256  # to rows of float32 that float64 holds as they are
    out, exact = (
        module(q, k, v, key_mask=mask),
        module.double().dense(q.double(), k.double(), v.double(), key_mask=mask),
    )
    real = torch.ones(2, 1, 40, 1) if mask is None else mask[:, None, :, None]
    assert float(((out - exact) * real).norm() / (exact * real).norm()) < 1e-4
