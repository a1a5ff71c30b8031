"""Sizes of pieces that stay in a cache, and functions that cut tensors into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.products import writes_gaps
from attnbench.contract.compiled import on_cpu


def threads() -> int:
    """Cores that share a tile; 1 for torch.compile, which knows no thread number and splits small tiles itself."""
    return 1 if torch.compiler.is_compiling() else torch.get_num_threads()


class Tuned(NamedTuple):
    """Numbers in a piece of one kind of work."""

    cpu: int
    """Numbers on a CPU, for each ``cores`` cores."""
    cores: int | None = None
    """Cores that share that; None: all."""
    gpu: int = 1 << 26
    """Numbers on a GPU, which needs fewer and larger kernels. A guess: only numbers for CPUs have been tuned."""
    tuned: str = ""
    """Date of the tuning; ``guessed`` without one."""


TUNED = {
    # user and its entry: numbers on a CPU, cores that share them, numbers on a GPU, and when it was tuned
    "linear.features": Tuned(1 << 19, 2, 1 << 25, "2026-11-20"),  # recurrent and efficient cut their heads alike
    "recurrent.kept": Tuned(1 << 18, None, 1 << 18, "2026-11-23"),
    "noise.rows": Tuned(1 << 15, 1, 1 << 24, "guessed"),
    "pair_scores.hidden": Tuned(1 << 18, 1, 1 << 24, "guessed"),
    "patterns.scores": Tuned(5 << 16, None, 1 << 24, "2026-11-21"),  # memory-compressed too
    "patterns.full_rows": Tuned(1 << 19, None, 1 << 24, "2026-11-21"),
    "patterns.copied_keys": Tuned(1 << 18, None, 1 << 18, "2026-11-23"),
    "patterns.short_example": Tuned(1 << 16, None, 1 << 16, "2026-11-23"),  # low_rank too
    "low_rank.weights": Tuned(1 << 18, 1, 1 << 26, "2026-11-20"),
    "aft.blocks": Tuned(1 << 18, None, 1 << 23, "2026-11-20"),
    "blocks.scores": Tuned(1 << 18, 1, 1 << 24, "guessed"),
    "chunked.logits": Tuned(1 << 19, 1, 1 << 24, "2026-11-20"),  # on a CPU its options say how many
    "clustered.products": Tuned(1 << 18, 1, 1 << 26, "2026-11-20"),
    "flex.places": Tuned(1 << 20, 1, 1 << 24, "guessed"),
    "gathered.listed": Tuned(1 << 18, 1, 1 << 24, "guessed"),
    "hyperattention.weights": Tuned(1 << 18, 1, 1 << 26, "2026-11-20"),
    "kv_budget.received": Tuned(1 << 22, None, 1 << 24, "guessed"),
    "monarch.factors": Tuned(1 << 18, None, 1 << 24, "2026-11-20"),
    "pooling.tokens": Tuned(1 << 18, 1, 1 << 26, "2026-11-20"),
    "reformer.weights": Tuned(1 << 18, 1, 1 << 24, "2026-11-21"),
    "routing.ranks": Tuned(1 << 17, 1, 1 << 26, "2026-11-20"),
    "routing.products": Tuned(1 << 16, 1, 1 << 26, "2026-11-20"),
    "routing.weights": Tuned(1 << 16, 1, 1 << 26, "2026-11-20"),
    "sinkhorn.weights": Tuned(1 << 19, 1, 1 << 26, "2026-11-20"),  # small ones cost more in calls than in misses
    "synthesizer.weights": Tuned(1 << 21, None, 1 << 26, "2026-11-20"),
    "thinformer.products": Tuned(1 << 17, 1, 1 << 26, "2026-11-21"),
    "topk.logits": Tuned(1 << 19, 1, 1 << 26, "2026-11-20"),
    "topk.values": Tuned(1 << 18, 1, 1 << 26, "2026-11-20"),
}
"""The fastest sizes found, for each user. 2^18 numbers in float32 are 1 MiB, half of a core's cache."""


def budget(work: str, device: torch.device) -> int:
    """Most numbers in a piece of this work, a key of :data:`TUNED`."""
    tuned = TUNED[work]
    if not on_cpu(device):
        return tuned.gpu
    return tuned.cpu if tuned.cores is None else tuned.cpu * max(1, threads() // tuned.cores)


def tiles(
    matrices: int, rows: int, columns: int, most: int, step: int | None = None
) -> Iterator[tuple[slice, int, int]]:
    """Pieces of at most ``most`` entries (but at least one row): several whole matrices, or rows a to b of one.

    ``step`` sets the rows of a piece in place of the most that fit. Yields a slice of matrices, the first row, and the
    last row + 1.
    """
    step = min(rows, step or max(1, most // columns))
    together = max(1, most // (rows * columns)) if step == rows else 1
    for first in range(0, matrices, together):
        for a in range(0, rows, step):
            yield slice(first, min(first + together, matrices)), a, min(a + step, rows)


def within(room: Tensor, size: Sequence[int]) -> Tensor:
    """The start of contiguous memory as a tensor of this size."""
    return room.view(-1)[: math.prod(size)].view(size)


Group = tuple[slice, slice]
"""A range of batch entries and a range of heads."""


def head_groups(x: Tensor, elements: int) -> list[Group]:
    """Cut the pairs of ``(B, H, ...)`` into groups, adjacent in memory, with tiles within the limit.

    ``elements`` is one pair's share of a tile.
    """
    batch, heads = x.shape[:2]
    most = max(1, budget("linear.features", x.device) // elements)
    if most >= heads:
        step = most // heads
        return [(slice(b, min(b + step, batch)), slice(0, heads)) for b in range(0, batch, step)]
    cuts = [slice(h, min(h + most, heads)) for h in range(0, heads, most)]
    return [(slice(b, b + 1), cut) for b in range(batch) for cut in cuts]


_Result = TypeVar("_Result")


def recomputed(work: Callable[..., _Result], *inputs: Any, wanted: bool = True) -> _Result:
    """``work(*inputs)``; if ``wanted``, only the inputs are kept, and the backward pass computes the rest again."""
    if not (wanted and torch.is_grad_enabled()):
        return work(*inputs)
    result: _Result = checkpoint(work, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def row_blocks(length: int, rows: int) -> list[slice]:
    """Consecutive ranges of at most ``rows`` tokens."""
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]


def cut(x: Tensor, group: Group, block: slice = slice(None)) -> Tensor:
    """``(G, c, ·)`` from ``(B, H, N, ·)``: a view if layout and dtype allow it, else a copy of this tile only."""
    return x[(*group, block)].flatten(0, 1).to(accumulator(x.dtype))


def put(x: Tensor, group: Group, block: slice, tile: Tensor) -> None:
    """Inverse of :func:`cut`."""
    target = x[(*group, block)]
    target.copy_(tile.view_as(target))


def fill(out: Tensor, function: Callable[..., Tensor], *inputs: Any) -> None:
    """``function(*inputs, out=out)``, also if ``out`` has gaps, which torch.compile refuses to write to."""
    if torch.compiler.is_compiling():
        out.copy_(function(*inputs))
    else:
        function(*inputs, out=out)


def place(x: Tensor, group: Group, block: slice = slice(None)) -> Tensor | None:
    """View ``(G, c, ·)`` of x for a product's output; None if writing it directly would be slower."""
    part = x[(*group, block)]
    if part.dtype != accumulator(x.dtype) or torch.compiler.is_compiling():
        return None
    target = part.view(-1, *part.shape[2:])
    return target if target.is_contiguous() or writes_gaps() else None


def put_product(x: Tensor, group: Group, block: slice, left: Tensor, right: Tensor) -> None:
    """:func:`put` for the tile left · right."""
    target = place(x, group, block)
    product = torch.bmm(left, right, out=target)
    if target is None:
        put(x, group, block, product)


def large_steps(q: Tensor) -> bool:
    """Return True if few large steps beat many that fit a cache, even with copies of keys."""
    return not on_cpu(q.device)


def short_examples(q: Tensor) -> bool:
    """Return True if copying the examples end to end, for steps with heads of several, beats steps for each of them."""
    return q.shape[0] > 1 and q[0].numel() <= budget("patterns.short_example", q.device)


def learned(*inputs: Tensor) -> bool:
    """Return True if a backward pass may follow."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def tile_scores(q: Tensor) -> int:
    """Most scores in one step; twice as many with gradients of long inputs, which take more memory than a tile."""
    most = budget("patterns.scores", q.device)
    if large_steps(q):
        return max(most, q.numel())
    return max(most, min(2 * most, q.numel() // 2)) if learned(q) else most
