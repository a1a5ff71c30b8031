from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.hyperattention.hyperattention import HyperAttention
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built

F64 = torch.float64


def draw(N: int, M: int | None = None, *, B: int = 2, H: int = 2, D: int = 4) -> list[Tensor]:
    return [torch.randn(B, H, n, D, dtype=F64) for n in (N, M or N, M or N)]


def hyper(
    options: str, N: int, M: int | None = None, *, H: int = 2, D: int = 4, seed: int = 0, causal: bool = False
) -> HyperAttention:
    return built(HyperAttention, f"hyperattention:{options}", Shape(2, H, N, D, M, causal), seed=seed).double()


def weights(module: HyperAttention, q: Tensor, k: Tensor) -> Tensor:
    """The implied matrix, a few columns at a time, as the values have no more than D channels."""
    D, M = q.shape[-1], k.shape[-2]
    eye = torch.eye(M, -(-M // D) * D, dtype=F64).expand(*k.shape[:2], -1, -1)
    return torch.cat([module(q, k, part.contiguous()) for part in eye.split(D, -1)], -1)[..., :M]


@pytest.mark.parametrize(
    "options", ["block=23,samples=0", "block=50", "block=3,samples=23", "block=5,samples=90", "bits=3"]
)
@pytest.mark.parametrize(("M", "causal"), [(None, False), (11, False), (None, True)])
def test_one_block_or_a_sample_of_all_keys_is_softmax_attention(options: str, M: int | None, causal: bool) -> None:
    q, k, v = draw(23, M)
    found = hyper(options, 23, M, causal=causal)(q, k, v)
    torch.testing.assert_close(found, exact_attention(q, k, v, causal=causal), rtol=0, atol=1e-12)


def test_without_a_sample_a_query_sees_one_block_of_the_sorted_keys() -> None:
    q, k, _ = draw(24)
    seen = weights(hyper("block=6,samples=0,bits=2", 24), q, k) > 0
    assert torch.equal(seen.sum(-1), torch.full((2, 2, 24), 6))
    assert torch.equal(seen.sum(-2), torch.full((2, 2, 24), 6))


def test_blocks_differ_by_one_token_where_the_length_is_no_multiple() -> None:
    q, k, _ = draw(23)
    seen = weights(hyper("block=6,samples=0,bits=2", 23), q, k) > 0
    assert set(seen.sum(-1).flatten().tolist()) == {5, 6}


def test_a_sampled_key_outside_the_block_weighs_as_many_as_it_stands_for() -> None:
    q, k, _ = draw(24)
    k = torch.zeros_like(k)  # all logits 0, all hashes equal: sorted by position
    got = weights(hyper("block=6,samples=8,bits=2", 24), q, k)
    least = got.masked_fill(got == 0, 1).amin(-1, keepdim=True)
    units = got / least
    assert set(units.round(decimals=9).unique().tolist()) == {0.0, 1.0, 3.0}
    assert torch.equal((units.round() == 1).sum(-1), torch.full((2, 2, 24), 6))


def test_numerator_and_denominator_are_right_on_average_over_the_draws() -> None:
    q, k, _ = draw(12, B=1, H=1)
    module = hyper("block=3,samples=4,bits=2", 12, H=1)
    exact = (q @ k.mT * 0.5).exp()
    total, grid, rounds = torch.zeros_like(exact), 1 << 20, range(32)
    for offsets in rounds:
        module.draws.copy_(torch.full((4,), (2 * offsets + 1) * grid // (2 * len(rounds))))
        got = weights(module, q, k)
        own = got / exact  # 1 / denominator in the own block, times the weight elsewhere
        denominator = 1 / own.masked_fill(own == 0, torch.inf).amin(-1, keepdim=True)
        total += got * denominator
    torch.testing.assert_close(total / len(rounds), exact, rtol=0.13, atol=0)


def test_near_buckets_are_adjacent_in_the_order() -> None:
    module = hyper("bits=5", 64, D=16)
    x = torch.randn(1, 1, 400, 16, dtype=F64)
    order = module._order(x, None)[0, 0]
    signs = (x[0, 0] @ module.projections > 0)[order]
    steps = (signs[1:] != signs[:-1]).sum(-1)
    assert int(steps.max()) <= 2  # 1, or 2 past a bucket that is empty
    assert int((steps > 0).sum()) == len({tuple(row) for row in signs.tolist()}) - 1
    assert torch.equal(module._order(3 * x, None)[0, 0], order)  # only the direction counts
    for a, b in itertools.pairwise(order.tolist()):
        assert a < b or bool((signs[order == a] != signs[order == b]).any())


@pytest.mark.parametrize(("N", "causal"), [(64, False), (128, True)])
def test_large_logits_are_found_that_a_sample_alone_misses(N: int, causal: bool) -> None:
    torch.manual_seed(1)
    centres = 3 * torch.randn(4, 16, dtype=F64).repeat(N // 4, 1)
    q, k = (centres + 0.01 * torch.randn(1, 1, N, 16, dtype=F64) for _ in range(2))
    v = torch.randn(1, 1, N, 16, dtype=F64)
    exact, shape = exact_attention(q, k, v, causal=causal), Shape(1, 1, N, 16, causal=causal)

    def error(options: str) -> float:
        outputs = [build(f"hyperattention:{options}", shape, seed=s)(q, k, v) for s in range(3)]
        return sum(relative_error(out, exact) for out in outputs) / 3

    assert error("block=16,samples=8,bits=8") < 1e-3
    assert error("block=1,samples=23") > 0.3
    assert causal or relative_error(build("mean-value", shape)(q, k, v), exact) > 0.8


def test_against_the_mean_of_values_it_loses_at_small_and_wins_at_large_gaussian_logits() -> None:
    # Independent Gaussian logits are the worst case of sampling: the sum is spread over all keys. The paper promises
    # nothing there; with a logit standard deviation of 4 a few keys carry the sum.
    N, D = 256, 32
    shape, q, k, v = Shape(1, 2, N, D), *(torch.randn(1, 2, N, D) for _ in range(3))
    ratios = {}
    for std in (1, 2, 4):
        exact = exact_attention(std * q, k, v)
        error = [
            relative_error(build("hyperattention:block=64,samples=64", shape, seed=s)(std * q, k, v), exact)
            for s in range(3)
        ]
        ratios[std] = sum(error) / 3 / relative_error(build("mean-value", shape)(std * q, k, v), exact)
    assert ratios[1] > ratios[2] > ratios[4]
    assert ratios[4] < 1 < ratios[1]


@pytest.mark.parametrize(
    ("causal", "block", "by_samples", "by_block"),
    [(False, 4, (4, 16, 63), (2, 16, 32)), (True, 2, (2, 6, 20, 32), (2, 8, 32, 64))],
)
def test_error_falls_with_samples_and_with_the_block(
    causal: bool, block: int, by_samples: tuple[int, ...], by_block: tuple[int, ...]
) -> None:
    q, k, v = draw(64, B=1, H=4, D=8)
    exact = exact_attention(q, k, v, causal=causal)

    def error(options: str) -> float:
        outputs = [hyper(options, 64, H=4, D=8, seed=s, causal=causal)(q, k, v) for s in range(6)]
        return sum(relative_error(out, exact) ** 2 for out in outputs)

    of_samples = [error(f"block={block},samples={m}") for m in by_samples]
    assert of_samples[0] > 2 * of_samples[1] > 4 * of_samples[2]
    of_block = [error(f"block={b},samples={4 if causal else 8}") for b in by_block]
    assert of_block[0] > 1.5 * of_block[1] > 2 * of_block[2]
    assert not causal or max(of_samples[3], of_block[3]) < 1e-20


def test_seeds_decide_the_projections_and_the_sample() -> None:
    q, k, v = draw(40)
    for options in ("block=4,samples=0", "block=1,samples=4,bits=1"):
        first, again, other = (hyper(options, 40, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first(q, k, v), again(q, k, v))
        other.projections.copy_(first.projections)
        assert torch.equal(first(q, k, v), other(q, k, v)) == ("samples=0" in options)
        assert not torch.equal(first(q, k, v), hyper(options, 40, seed=1)(q, k, v))
