"""How many matrices that are too large to keep are cut into pieces that stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def threads() -> int:
    """How many cores share a tile. torch.compile knows no number of threads, and takes small tiles apart itself."""
    return 1 if torch.compiler.is_compiling() else torch.get_num_threads()


def cached(log2: int = 18) -> int:
    """Entries that stay in the caches of all cores in use, 2^log2 in each."""
    return threads() << log2


def fitting(device: torch.device, log2: int = 18) -> int:
    """Entries of a piece: those that stay in the caches of a CPU; a GPU wants fewer and larger kernels."""
    return cached(log2) if device.type == "cpu" else 1 << 26


def tiles(
    matrices: int, rows: int, columns: int, most: int, step: int | None = None
) -> Iterator[tuple[slice, int, int]]:
    """Pieces of at most ``most`` entries (but at least one row): several whole matrices, or rows a to b of one.

    Args:
        matrices: how many of ``rows`` × ``columns`` there are.
        rows: of each.
        columns: of each.
        most: entries of a piece.
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
