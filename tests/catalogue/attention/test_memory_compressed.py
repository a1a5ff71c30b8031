from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.low_rank.memory_compressed import MemoryCompressed
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close

F64 = torch.float64


def qkv(N: int = 23, M: int | None = None, D: int = 5) -> list[Tensor]:
    return [torch.randn(2, 3, length, D, dtype=F64) for length in (N, M or N, M or N)]


def compressed(N: int = 23, M: int | None = None, *, causal: bool = False, **options: object) -> MemoryCompressed:
    return built(MemoryCompressed, "memory-compressed", Shape(2, 3, N, 5, kv_len=M, causal=causal), **options).double()


@pytest.mark.parametrize("c", [2, 3, 7])
def test_keys_and_values_are_convolved_head_by_head_with_stride_equal_to_the_kernel(c: int) -> None:
    q, k, v = qkv()
    module = compressed(compression=c)
    rows = []
    for x, kernel in ((k, module.of_keys), (v, module.of_values)):
        assert kernel is not None
        channels = torch.nn.functional.pad(x.mT.flatten(1, 2), (0, -23 % c))
        weight = kernel.permute(0, 3, 2, 1).flatten(0, 1)
        rows.append(torch.nn.functional.conv1d(channels, weight, stride=c, groups=3).unflatten(1, (3, 5)).mT)
    close(module(q, k, v), exact_attention(q, *rows))


@pytest.mark.parametrize("c", [1, 2, 3, 4])
def test_a_causal_query_sees_the_blocks_that_end_at_or_before_it(c: int) -> None:
    q, k, v = qkv()
    module = compressed(compression=c, causal=True)
    seen = []
    for j in range(12):
        one = torch.zeros_like(v)
        one[:, :, j] = 1
        seen.append(module(q, k, one)[0, 0].abs().amax(-1) > 0)  # the output is linear in v
    for i in range(12):
        for j in range(12):
            visible = j < (i + 1) // c * c if i >= c - 1 else i == j
            assert bool(seen[j][i]) is visible, (i, j)


def test_a_causal_query_without_a_block_attends_to_itself_alone() -> None:
    q, k, v = qkv()
    module = compressed(compression=5, causal=True)
    assert torch.equal(module(q, k, v)[:, :, :4], v[:, :, :4])
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[:, :10] = False
    mask[:, 3] = True
    mask[1] = False
    out = module(q, k, v, key_mask=mask)
    assert torch.equal(out[0, :, 3], v[0, :, 3])
    assert not out[0, :, :3].any()
    assert out[0, :, 5].abs().max() > 0
    assert not out[1].any()


def test_averages_are_exact_where_keys_and_values_are_constant_within_blocks() -> None:
    q, k, v = qkv(24)
    k, v = (x[:, :, ::3].repeat_interleave(3, 2) for x in (k, v))
    close(compressed(24, kernel="mean")(q, k, v), exact_attention(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_of_a_block_is_that_of_its_real_keys(causal: bool) -> None:
    q, k, v = qkv()
    mask = torch.rand(2, 23) < 0.6
    ones = torch.where(mask[:, None, :, None], torch.ones_like(v), 7.0)
    out = compressed(compression=4, kernel="mean", causal=causal)(q, k, ones, key_mask=mask)
    close(out, (out != 0).to(F64))


def test_kernels_are_drawn_so_that_sums_keep_their_size() -> None:
    for c in (3, 5):
        for kernel in build(f"memory-compressed:compression={c}", Shape(1, 8, 20, 32)).parameters():
            assert kernel.numel() == 8 * c * 32 * 32
            assert kernel.var().item() == pytest.approx(1 / (c * 32), rel=0.05)
