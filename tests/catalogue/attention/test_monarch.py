from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.low_rank.monarch import Monarch
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built

F64 = torch.float64


def draw(N: int, M: int | None = None, *, B: int = 2, H: int = 2, D: int = 4) -> list[Tensor]:
    return [torch.randn(B, H, n, D, dtype=F64) for n in (N, M or N, M or N)]


def monarch(options: str, N: int, M: int | None = None, *, D: int = 4) -> Monarch:
    return built(Monarch, f"monarch:{options}", Shape(2, 2, N, D, kv_len=M)).double()


def weights(options: str, q: Tensor, k: Tensor) -> Tensor:
    """The implied matrix, as many columns at a time as the values have channels."""
    N, M, D = q.shape[-2], k.shape[-2], q.shape[-1]
    eye = torch.eye(M, -(-M // D) * D, dtype=F64).expand(*k.shape[:2], -1, -1)
    return torch.cat([monarch(options, N, M, D=D)(q, k, part.contiguous()) for part in eye.split(D, -1)], -1)[..., :M]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("block", [1, 23, 31])
@pytest.mark.parametrize("M", [None, 11])
def test_blocks_of_one_token_or_of_all_are_softmax_attention(steps: int, block: int, M: int | None) -> None:
    q, k, v = draw(23, M)
    out = monarch(f"block={block},steps={steps}", 23, M)(q, k, v)
    torch.testing.assert_close(out, exact_attention(q, k, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2])
def test_logits_of_a_part_between_blocks_and_a_part_within_are_met_exactly(steps: int) -> None:
    blocks, b = 6, 4
    across_q, across_k = torch.randn(2, 2, 2, blocks, 1, 3, dtype=F64).expand(-1, -1, -1, -1, b, -1)
    within_q, within_k = torch.randn(2, 2, 2, 1, b, 3, dtype=F64).expand(-1, -1, -1, blocks, -1, -1)
    q, k = (torch.cat(x, -1).flatten(2, 3) for x in ((across_q, within_q), (across_k, within_k)))
    v = torch.randn_like(q)
    out = monarch(f"block={b},steps={steps}", 24, D=6)(2 * q, k, v)
    torch.testing.assert_close(out, exact_attention(2 * q, k, v), rtol=1e-10, atol=1e-10)
    assert relative_error(monarch("block=5", 24, D=6)(2 * q, k, v), exact_attention(2 * q, k, v)) > 0.05


def test_blocks_of_the_matrix_have_rank_one_and_rows_sum_to_one() -> None:
    q, k, _ = draw(24)
    P = weights("block=4,steps=2", q, k)
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 2, 24, dtype=F64))
    by_place = P.view(2, 2, 6, 4, 6, 4).permute(0, 1, 3, 4, 2, 5)  # place j of the query, block k of the key: (l, i)
    singular = torch.linalg.svdvals(by_place)
    assert float((singular[..., 1] / singular[..., 0]).max()) < 1e-12
    assert float(singular[..., 0].min()) > 0


def objective(P: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (P * (q @ k.mT) * q.shape[-1] ** -0.5 - torch.xlogy(P, P)).sum((-1, -2))


@pytest.mark.parametrize(("N", "M"), [(24, 24), (23, 23), (14, 22)])
def test_no_step_lowers_the_sum_that_softmax_maximises(N: int, M: int) -> None:
    q, k, _ = draw(N, M)
    q = 3 * q
    values = torch.stack([objective(weights(f"block=4,steps={t}", q, k), q, k) for t in (1, 2, 3, 6)])
    assert bool((values.diff(dim=0) > -1e-10).all())
    assert bool((values[1] > values[0] + 1e-3).all())
    best = ((q @ k.mT) * q.shape[-1] ** -0.5).logsumexp(-1).sum(-1)
    assert bool((values[-1] < best).all())


def test_starts_with_each_block_looking_at_itself() -> None:
    q, k, _ = draw(12)
    changed = q.clone()
    changed[:, :, 4:8] *= -1  # one step: R of other blocks does not see these queries
    before, after = (weights("block=4,steps=1", x, k) for x in (q, changed))
    moved = (before - after).abs().view(2, 2, 3, 4, 3, 4).amax((0, 1, 3, 5)) > 1e-12
    within = before.view(2, 2, 3, 4, 3, 4)
    own = torch.einsum("bhjd,bhid->bhji", q[:, :, :4], k[:, :, :4]).mul(0.5).softmax(-1)
    torch.testing.assert_close(within[:, :, 0, :, 0] / within[:, :, 0, :, 0].sum(-1, keepdim=True), own)
    assert bool(moved[:, 1].all())


def ratio(q: Tensor, k: Tensor, v: Tensor, options: str = "steps=2") -> float:
    """Error over that of the mean value."""
    exact, shape = exact_attention(q, k, v), Shape(*q.shape)
    mean = relative_error(build("mean-value", shape)(q, k, v), exact)
    return relative_error(build(f"monarch:{options}", shape)(q, k, v), exact) / mean


def test_against_the_mean_of_values_it_wins_at_small_gaussian_logits_and_loses_at_large_ones() -> None:
    # It is nearest in the sense of the Kullback-Leibler divergence, which for a few large logits is not the squared
    # error: it then puts weight on wrong keys, where the mean puts it nowhere.
    q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
    assert ratio(0.5 * q, k, v) < 1
    assert ratio(q, k, v) < 1
    assert ratio(2 * q, k, v) > 1


def test_where_logits_vary_smoothly_with_the_position_it_is_far_better_than_the_mean_of_values() -> None:
    position = torch.arange(256).unsqueeze(1) / 256
    waves = torch.cat([torch.sin(6 * j * position) for j in range(1, 5)] + [torch.cos(6 * position)], 1)
    q, k, v = ((waves @ torch.randn(5, 32)).expand(1, 2, -1, -1) for _ in range(3))
    assert ratio(q, k, v) < 0.1
    assert ratio(q, k, v, "block=4") < 0.05


def test_blocks_are_as_long_as_they_are_many_unless_told_otherwise() -> None:
    assert [monarch("steps=1", n).block for n in (1, 16, 17, 1024)] == [1, 4, 5, 32]
