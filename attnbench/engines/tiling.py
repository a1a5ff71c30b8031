"""Cutting many matrices, too large to keep, into pieces that stay in cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attnbench.engines.precision import accumulator
from attnbench.engines.products import writes_gaps


def threads() -> int:
    """How many cores share a tile; 1 for torch.compile, which knows no thread number and splits small tiles itself."""
    return 1 if torch.compiler.is_compiling() else torch.get_num_threads()


def cached(log2: int = 18) -> int:
    """How many entries stay in the caches of all cores in use, 2^log2 in each."""
    return threads() << log2


def fitting(device: torch.device, log2: int = 18) -> int:
    """How many entries a piece has: what stays in a CPU's caches; a GPU wants fewer and larger kernels."""
    return cached(log2) if device.type == "cpu" else 1 << 26


def tiles(
    matrices: int, rows: int, columns: int, most: int, step: int | None = None
) -> Iterator[tuple[slice, int, int]]:
    """Pieces of at most ``most`` entries (but at least one row): several whole matrices, or rows a to b of one.

    Args:
        matrices: how many matrices of ``rows`` × ``columns`` there are.
        rows: rows of each.
        columns: columns of each.
        most: entries of a piece at most.
        step: rows of a piece, instead of as many as fit.

    Yields:
        Which matrices, the first row, and the last row + 1.
    """
    step = min(rows, step or max(1, most // columns))
    together = max(1, most // (rows * columns)) if step == rows else 1
    for first in range(0, matrices, together):
        for a in range(0, rows, step):
            yield slice(first, min(first + together, matrices)), a, min(a + step, rows)


def within(room: Tensor, size: Sequence[int]) -> Tensor:
    """The first numbers of contiguous memory as a tensor of this size."""
    return room.view(-1)[: math.prod(size)].view(size)


CPU_TILE = 2**19
"""2 MiB in float32: the second-level caches of two cores."""

Group = tuple[slice, slice]
"""A range of batch entries and a range of heads."""


def tile_elements(device: torch.device) -> int:
    """How many elements a tile of features may have: a GPU wants fewer and larger kernels."""
    return CPU_TILE * (max(1, threads() // 2) if device.type == "cpu" else 64)


def head_groups(x: Tensor, elements: int) -> list[Group]:
    """Cut the pairs of ``(B, H, ...)`` into groups, adjacent in memory, whose tiles are within the limit.

    Args:
        elements: how many one pair has in a tile.
    """
    batch, heads = x.shape[:2]
    most = max(1, tile_elements(x.device) // elements)
    if most >= heads:
        step = most // heads
        return [(slice(b, min(b + step, batch)), slice(0, heads)) for b in range(0, batch, step)]
    cuts = [slice(h, min(h + most, heads)) for h in range(0, heads, most)]
    return [(slice(b, b + 1), cut) for b in range(batch) for cut in cuts]


def row_blocks(length: int, rows: int) -> list[slice]:
    """Consecutive ranges of at most ``rows`` tokens."""
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def cut(x: Tensor, group: Group, block: slice = slice(None)) -> Tensor:
    """``(G, c, ·)`` from ``(B, H, N, ·)``: a view where layout and dtype allow it, else a copy of this tile only."""
    return x[(*group, block)].flatten(0, 1).to(accumulator(x.dtype))


def put(x: Tensor, group: Group, block: slice, tile: Tensor) -> None:
    """Inverse of :func:`cut`."""
    target = x[(*group, block)]
    target.copy_(tile.view_as(target))


def fill(out: Tensor, function: Callable[..., Tensor], *inputs: Any) -> None:
    """``function(*inputs, out=out)``, also where ``out`` has gaps, which torch.compile refuses to write to."""
    if torch.compiler.is_compiling():
        out.copy_(function(*inputs))
    else:
        function(*inputs, out=out)


def place(x: Tensor, group: Group, block: slice = slice(None)) -> Tensor | None:
    """View ``(G, c, ·)`` of x into which a product is best written directly; None where it is not."""
    part = x[(*group, block)]
    if part.dtype != accumulator(x.dtype) or torch.compiler.is_compiling():
        return None
    target = part.view(-1, *part.shape[2:])
    return target if target.is_contiguous() or writes_gaps() else None


def put_product(x: Tensor, group: Group, block: slice, left: Tensor, right: Tensor) -> None:
    """Like :func:`put`, with left · right as the tile."""
    target = place(x, group, block)
    product = torch.bmm(left, right, out=target)
    if target is None:
        put(x, group, block, product)


_TILE_SCORES = 5 * 2**16
"""Scores per tile on a CPU: 1.25 MiB of float32, which stays in the caches between the passes over it."""

_COPIED = 2**18
"""How many numbers of keys a step on a CPU may copy to hold several heads: 1 MiB of float32, which caches hold."""

_SHORT = 2**16
"""How many numbers q may have per example so that copying an example takes less time than steps of its own."""


def large_steps(q: Tensor) -> bool:
    """Whether few large steps beat many that fit a cache, even where keys have to be copied for them."""
    return q.device.type != "cpu"


def short_examples(q: Tensor) -> bool:
    """Whether copying the examples end to end, so that a step holds heads of several, beats steps for each of them."""
    return q.shape[0] > 1 and q[0].numel() <= _SHORT


def heads_copied(numbers: int) -> int:
    """How many heads one step on a CPU may hold if it copies ``numbers`` numbers of keys for each."""
    return max(1, _COPIED // numbers)


def learned(q: Tensor) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and q.requires_grad


def tile_scores(q: Tensor) -> int:
    """How many scores one step should hold at most.

    With gradients up to twice as many, for fewer calls, if inputs are long and so take more memory than a tile.
    """
    if large_steps(q):
        return max(2**24, q.numel())
    return max(_TILE_SCORES, min(2 * _TILE_SCORES, q.numel() // 2)) if learned(q) else _TILE_SCORES
