"""A mask of places for FlexAttention: which blocks it computes, and which pairs in them it sees."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.attention.flex.windows import Blocks, listed_blocks, pairs_in, real_keys
from attnbench.engines.flex.blocks import BLOCK
from attnbench.visible import Visible


def blocks(visible: Visible, N: int, M: int) -> tuple[Blocks, Blocks]:
    """The blocks whose every pair is seen, and those with some pair seen, ``(N / 128, M / 128)``."""
    full, some = np.zeros((2, -(-N // BLOCK), -(-M // BLOCK)), dtype=np.bool_)
    for row, start in enumerate(range(0, N, BLOCK)):
        queries = slice(start, min(start + BLOCK, N))
        of_some, of_all = visible.seen_by_some(queries, M), visible.seen_by_all(queries, M)
        some[row, of_some.start // BLOCK : -(-of_some.stop // BLOCK)] = True
        stop = full.shape[1] if of_all.stop == M else of_all.stop // BLOCK  # the last block may have fewer keys
        full[row, -(-of_all.start // BLOCK) : stop] = True
    return full & some, some


def pairs(visible: Visible, N: int, M: int, *, sink: bool = False) -> int:
    """How many pairs the computed blocks hold, those with a sink among them."""
    return pairs_in(blocks(visible, N, M), (N, M), sink=sink)


def block_mask(
    visible: Visible, lengths: tuple[int, int], device: torch.device, key_mask: Tensor | None, *, sink: bool = False
) -> BlockMask:
    """The block mask of N queries and M keys; a key mask ``(B, M)`` is asked in every block."""
    N, M = lengths
    if key_mask is None:
        return _kept(visible, N, M, device, sink=sink)
    full, some = blocks(visible, N, M)
    (first, stop), real = visible.spans(slice(0, N), M, device), real_keys(key_mask, sink=sink)
    return listed_blocks(
        np.zeros_like(full),
        some,
        lambda b, h, i, j: real[b, j] & (first[i] <= j) & (j < stop[i]),
        lengths,
        device,
        sink=sink,
    )


@lru_cache(maxsize=8)
def _kept(visible: Visible, N: int, M: int, device: torch.device, *, sink: bool) -> BlockMask:
    full, some = blocks(visible, N, M)
    with torch.inference_mode(False):  # kept, and gradients may be wanted next time
        first, stop = visible.spans(slice(0, N), M, device)
        return listed_blocks(full, some, lambda b, h, i, j: (first[i] <= j) & (j < stop[i]), (N, M), device, sink=sink)
