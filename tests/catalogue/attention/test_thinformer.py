from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.thinformer import Thinformer, _balance, _products
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built

F64 = torch.float64


def draw(N: int, M: int | None = None, *, B: int = 2, H: int = 2, D: int = 4) -> list[Tensor]:
    return [torch.randn(B, H, n, D, dtype=F64) for n in (N, M or N, M or N)]


def thin(
    options: str, N: int, M: int | None = None, *, B: int = 2, H: int = 2, D: int = 4, seed: int = 0
) -> Thinformer:
    return built(Thinformer, f"thinformer:{options}", Shape(B, H, N, D, kv_len=M), seed=seed).double()


@pytest.mark.parametrize(("g", "N"), [(0, 3), (1, 15), (2, 63), (9, 64)])
def test_too_few_keys_to_thin_give_softmax_attention(g: int, N: int) -> None:
    q, k, v = draw(N)
    torch.testing.assert_close(thin(f"oversampling={g}", N)(q, k, v), exact_attention(q, k, v))
    if g < 9:
        q, k, v = draw(N + 1)
        assert relative_error(thin(f"oversampling={g}", N + 1)(q, k, v), exact_attention(q, k, v)) > 0.1


@pytest.mark.parametrize("g", [0, 1, 2])
@pytest.mark.parametrize("M", [64, 256, 300, 1023])
def test_about_as_many_keys_are_kept_as_promised_and_none_twice(g: int, M: int) -> None:
    _, k, v = draw(1, M, B=1, H=2)
    kept = thin(f"oversampling={g}", 1, M).coreset(k, v)
    count = kept.shape[2]
    assert all(len(set(row)) == count for row in kept.view(-1, count).tolist())
    assert 0 <= int(kept.min()) <= int(kept.max()) < M
    if M in (64, 256):
        assert count == 2**g * M**0.5
    assert 0.5 * 2**g * M**0.5 < count <= 2 * 2**g * M**0.5


def test_kept_keys_weigh_the_same_and_come_from_all_runs() -> None:
    q, k, v = draw(64)
    out = thin("oversampling=1", 64)(torch.zeros_like(q), k, v)
    kept = thin("oversampling=1", 64).coreset(k, v)
    mean = v.gather(2, kept.unsqueeze(-1).expand(-1, -1, -1, 4)).mean(2, keepdim=True)
    torch.testing.assert_close(out, mean.expand_as(out))
    assert torch.equal((kept // 32).sum(-1), torch.full((2, 2), 8))  # 16 of 64, from pairs of neighbouring runs


@pytest.mark.parametrize(("g", "rounds"), [(0, 3), (1, 2), (2, 1)])
def test_keys_that_all_have_copies_beside_them_lose_nothing(g: int, rounds: int) -> None:
    q, k, v = (x.repeat_interleave(2**rounds, 2) for x in draw(64 // 2**rounds))
    module = thin(f"oversampling={g}", 64)
    assert module.coreset(k, v).shape[2] == 64 // 2**rounds
    torch.testing.assert_close(module(q, k, v), exact_attention(q, k, v))


def test_differences_are_those_of_the_kernel_of_keys_and_values() -> None:
    _, k, v = draw(10, B=1, H=1)
    kernel = (k @ k.mT / 2).exp() * (v @ v.mT + 3.0)
    expected = kernel[0, 0].view(5, 2, 5, 2)
    expected = expected[:, 0, :, 0] + expected[:, 1, :, 1] - expected[:, 0, :, 1] - expected[:, 1, :, 0]
    shift, offset = torch.full((1, 1, 1), -2.0, dtype=F64), torch.full((1, 1, 1), 3.0, dtype=F64)
    got = _products((k / 2**0.5).view(1, 5, 2, 4), v.view(1, 5, 2, 4), shift, offset)[0]
    torch.testing.assert_close(got * torch.tensor(2.0, dtype=F64).exp(), expected)


def test_a_pair_is_decided_against_the_sum_of_those_before_it() -> None:
    products = torch.tensor([[4.0, 1.2], [1.2, 1.0]], dtype=F64).expand(20000, 2, 2)
    draws = torch.empty(20000, 2, dtype=F64).uniform_(-1, 1) * 1.5
    first = _balance(products, draws)
    bound = 1.5 * 1.0 * 2.0  # of the second pair: its norm times the largest norm so far
    assert abs(float(first[:, 0].double().mean()) - 0.5) < 0.015
    for before, alpha in ((True, 1.2), (False, -1.2)):
        seen = first[first[:, 0] == before, 1].double().mean()
        assert abs(float(seen) - 0.5 * (1 - alpha / bound)) < 0.015


def test_the_bound_grows_with_certainty_and_with_the_number_of_keys() -> None:
    assert thin("failure=0.1", 8)._wideness(64, 1024, 3) > thin("failure=0.5", 8)._wideness(64, 1024, 3)
    assert thin("failure=0.5", 8)._wideness(64, 4096, 3) > thin("failure=0.5", 8)._wideness(64, 1024, 3)


def sampled(q: Tensor, k: Tensor, v: Tensor, count: int, seed: int) -> Tensor:
    kept = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(seed))[:count]
    return exact_attention(q, k[:, :, kept], v[:, :, kept])


def errors(q: Tensor, k: Tensor, v: Tensor, g: int, count: int) -> tuple[float, float, float]:
    """Mean over seeds of the error of thinning and of a uniform sample of as many keys; that of the mean value."""
    exact, shape = exact_attention(q, k, v), Shape(*q.shape)
    thinned = [relative_error(build(f"thinformer:oversampling={g}", shape, seed=s)(q, k, v), exact) for s in range(6)]
    uniform = [relative_error(sampled(q, k, v, count, s), exact) for s in range(6)]
    return sum(thinned) / 6, sum(uniform) / 6, relative_error(build("mean-value", shape)(q, k, v), exact)


def test_where_keys_and_values_are_of_low_rank_it_beats_a_uniform_sample_and_the_mean_value() -> None:
    position = torch.arange(256).unsqueeze(1) / 256
    waves = torch.cat([torch.sin(6 * j * position) for j in range(1, 5)] + [torch.cos(6 * position)], 1)
    q, k, v = ((waves @ torch.randn(5, 32) * size).expand(1, 2, -1, -1) for size in (0.7, 0.7, 1))
    thinned, uniform, mean = errors(q, k, v, 1, 32)
    assert thinned < 0.6 * uniform
    assert thinned < 0.3 * mean


@pytest.mark.parametrize("std", [1, 2])
def test_independent_gaussian_logits_have_full_rank_and_gain_nothing_over_a_uniform_sample(std: int) -> None:
    # What the theory says: the guarantee is a rank. The mean value is nearer there than any few keys.
    q, k, v = (torch.randn(1, 2, 256, 32) for _ in range(3))
    thinned, uniform, mean = errors(std * q, k, v, 1, 32)
    assert 0.8 * uniform < thinned < 1.25 * uniform
    assert thinned > mean


def test_gradients_are_those_of_attention_to_the_kept_keys() -> None:
    q, k, v = (x.requires_grad_() for x in draw(20, D=3))
    module = thin("oversampling=0", 20, D=3)
    assert torch.autograd.gradcheck(module, (q, k, v), fast_mode=True)
    module(q, k, v).square().sum().backward()
    touched = v.grad.abs().amax(-1) > 0
    assert torch.equal(touched.sum(-1), torch.full((2, 2), 4))


def test_only_the_remainder_is_dropped_before_thinning_and_evenly_over_the_sequence() -> None:
    M = 79
    _, k, v = draw(1, M)
    used = M - M % 32  # 16 runs of an even length
    seen = {int(j) for seed in range(100) for j in thin("oversampling=0", 1, M, seed=seed).coreset(k, v).unique()}
    assert sorted(seen) == [i * M // used for i in range(used)]
    assert thin("oversampling=0", 1, M).coreset(k, v).shape[2] == used // 8


def test_heads_and_examples_share_the_random_numbers() -> None:
    _, k, v = draw(1, 64, B=1, H=1)
    kept = thin("oversampling=0", 1, 64).coreset(k.expand(2, 2, 64, 4), v.expand(2, 2, 64, 4))
    assert torch.equal(kept, kept[:1, :1].expand_as(kept))
