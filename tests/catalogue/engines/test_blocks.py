"""The engine of chosen blocks: exact softmax over exactly the pairs that are listed, at the price of these."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.blocks.block_softmax import attend
from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection, heaviest, largest
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes

B, H, N, D = 2, 4, 23, 4


def draw(kv_heads: int = H, v_dim: int = D, n: int = N) -> list[Tensor]:
    sizes = ((B, H, n, D), (B, kv_heads, n, D), (B, kv_heads, n, v_dim))
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def some_pairs(rows: int, columns: int, share: float = 0.4, n: int = N) -> BlockPairs:
    """Blocks at random: ragged, some rows without any."""
    kept = torch.rand(B * H, -(-n // rows), -(-n // columns)) < share
    head, at, keys = kept.nonzero(as_tuple=True)
    order = torch.randperm(len(head))
    return BlockPairs(rows, columns, (head * kept.shape[1] + at)[order], keys[order])


def by_hand(selection: BlockSelection) -> Tensor:
    """The pairs of tokens that a selection lists, ``(B, H, N, N)``, one pair of blocks after another."""
    seen = torch.zeros(B, H, N, N, dtype=torch.bool)
    for part in selection.parts:
        total = -(-N // part.rows)
        for number, J in zip(part.queries.tolist(), part.keys.tolist(), strict=True):
            b, h, I = number // total // H, number // total % H, number % total
            rows, columns = (slice(x * s, (x + 1) * s) for x, s in ((I, part.rows), (J, part.columns)))
            seen[b, h, rows, columns] = True
    if selection.causal:
        seen = seen.tril()
    return seen if selection.real is None else seen & selection.real[:, None, None]


def agrees(selection: BlockSelection, inputs: list[Tensor]) -> None:
    """Output and gradients are those of a dense softmax over the listed pairs."""
    q, k, v = inputs
    out = attend(q, k, v, selection)
    wanted = masked_attention(q, *(of_query_heads(x, H) for x in (k, v)), by_hand(selection))
    if selection.real is not None:  # the output of a padded query may be anything
        out, wanted = (x * selection.real[:, None, :, None] for x in (out, wanted))
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    direction = torch.randn_like(out)
    found, expected = (torch.autograd.grad(x, inputs, direction) for x in (out, wanted))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (4, 4), (5, 3), (3, 5), (8, 1), (23, 23), (64, 64)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_softmax_over_the_listed_pairs_forward_and_backward(
    rows: int, columns: int, causal: bool, padded: bool
) -> None:
    real = torch.rand(B, N) < 0.7 if padded else None
    agrees(BlockSelection((B, H, N), causal, (some_pairs(rows, columns),), real), draw())


@pytest.mark.parametrize("most", [1, 200, 3000])
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (6, 2), (4, 4)])
def test_how_it_is_cut_into_ranges_and_steps_changes_nothing(
    most: int, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling.TUNED, "blocks.scores", tiling.Tuned(most))
    agrees(BlockSelection((B, H, N), True, (some_pairs(rows, columns, 0.8),)), draw())


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (6, 2), (4, 4)])
def test_heads_of_queries_read_the_head_of_keys_that_they_share(kv_heads: int, rows: int, columns: int) -> None:
    real = torch.arange(N) < torch.tensor([[19], [N]])
    agrees(BlockSelection((B, H, N), True, (some_pairs(rows, columns),), real), draw(kv_heads, v_dim=7))


def test_several_lists_share_one_softmax() -> None:
    blocks = some_pairs(4, 4, 0.3)
    kept = torch.zeros(B * H * 6, 24, dtype=torch.bool)
    for number, J in zip(blocks.queries.tolist(), blocks.keys.tolist(), strict=True):
        kept[number, 4 * J : 4 * J + 4] = True
    queries, keys = (~kept[:, :N] & (torch.rand(B * H * 6, N) < 0.3)).nonzero(as_tuple=True)
    agrees(BlockSelection((B, H, N), True, (blocks, BlockPairs(4, 1, queries, keys))), draw())


def test_an_empty_selection_gives_zero_and_no_gradient() -> None:
    none = torch.zeros(0, dtype=torch.long)
    inputs = draw()
    out = attend(*inputs, BlockSelection((B, H, N), True, (BlockPairs(4, 4, none, none),)))
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), inputs):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("queries", [slice(0, N), slice(0, 1), slice(5, 14), slice(22, 23)])
def test_the_pairs_of_some_queries_are_those_of_the_lists(queries: slice) -> None:
    for parts in ((some_pairs(5, 3),), (some_pairs(1, 4),), (some_pairs(6, 6), some_pairs(6, 1))):
        for causal in (False, True):
            selection = BlockSelection((B, H, N), causal, parts, torch.rand(B, N) < 0.7)
            assert torch.equal(selection.pairs(queries), by_hand(selection)[:, :, queries])


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (128, 64), (64, 128)])
def test_products_are_those_of_the_kept_pairs_of_blocks_and_no_others(rows: int, columns: int) -> None:
    n = 1024
    q, k, v = (torch.randn(1, 1, n, 32, requires_grad=True) for _ in range(3))
    for share in (0.1, 0.4, 1.0):
        kept = torch.rand(1, n // rows, n // columns) < share
        _, at, keys = kept.nonzero(as_tuple=True)
        selection = BlockSelection((1, 1, n), False, (BlockPairs(rows, columns, at, keys),))
        one = 2 * rows * columns * 32
        assert count(lambda s=selection: attend(q, k, v, s)).matmul_flops == 2 * one * len(keys)  # type: ignore[misc]
        out = attend(q, k, v, selection)
        backward = count(lambda out=out: torch.autograd.grad(out.sum(), (q, k, v)))  # type: ignore[misc]
        assert backward.matmul_flops == 5 * one * len(keys)


def test_single_queries_share_products_at_little_waste() -> None:
    n, blocks = 2048, 32
    at = torch.arange(n).repeat_interleave(4)
    keys = torch.rand(n, blocks).argsort(1)[:, :4].flatten()
    q, k, v = (torch.randn(1, 1, n, 32) for _ in range(3))
    counted = count(lambda: attend(q, k, v, BlockSelection((1, 1, n), False, (BlockPairs(1, 64, at, keys),))))
    needed = 2 * 2 * n * 4 * 64 * 32
    assert needed <= counted.matmul_flops <= 1.3 * needed


def test_memory_is_linear_in_the_kept_blocks() -> None:
    peaks = []
    for n in (1024, 4096):
        at = torch.arange(n).repeat_interleave(2)
        selection = BlockSelection(
            (1, 1, n), True, (BlockPairs(1, 64, at, torch.arange(n).repeat_interleave(2) // 64 // 2),)
        )
        inputs = [torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3)]
        peak = peak_tensor_bytes(lambda i=inputs, s=selection: attend(*i, s).sum().backward())  # type: ignore[misc]
        assert peak is not None
        peaks.append(peak)
    assert math.log(peaks[1] / peaks[0], 4) < 1.05


# The choice


def test_the_fewest_that_hold_a_share_are_the_largest_in_falling_order() -> None:
    masses = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
    every, none = torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.bool)
    for share, kept in ((0.3, [1]), (0.4001, [1, 3]), (0.84, [1, 3, 4]), (0.9, [0, 1, 3, 4]), (1.0, [0, 1, 2, 3, 4])):
        found = heaviest(masses, share, allowed=every, forced=none)
        assert found[0].nonzero()[:, 0].tolist() == kept, share
    forced = torch.tensor([[False, False, True, False, False]])
    assert heaviest(masses, 0.4, allowed=every, forced=forced)[0].nonzero()[:, 0].tolist() == [1, 2]
    assert heaviest(masses, 0.3, allowed=every, forced=none, least=2)[0].nonzero()[:, 0].tolist() == [1, 3]
    assert heaviest(masses, 0.3, allowed=~forced, forced=forced)[0].nonzero()[:, 0].tolist() == [1]


def test_a_larger_share_keeps_all_that_a_smaller_one_keeps() -> None:
    masses = torch.rand(50, 20) ** 8
    allowed, forced = torch.rand(50, 20) < 0.8, torch.rand(50, 20) < 0.1
    kept = [heaviest(masses, share / 20, allowed=allowed, forced=forced) for share in range(1, 21)]
    assert all(bool((fewer <= more).all()) for fewer, more in pairwise(kept))
    assert torch.equal(kept[-1], allowed)
    total = (masses * allowed).sum(1)
    assert all(bool(((masses * one).sum(1) >= share / 20 * total - 1e-6).all()) for share, one in enumerate(kept, 1))


def test_forced_entries_count_among_the_largest() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    every = torch.ones(1, 4, dtype=torch.bool)
    forced = torch.tensor([[False, False, False, True]])
    assert largest(scores, 2, allowed=every, forced=forced).tolist() == [[True, False, False, True]]
    assert largest(scores, 9, allowed=~forced, forced=forced).tolist() == [[True, True, True, False]]
    assert not largest(scores, 0, allowed=every, forced=forced).any()
