"""Tiles of the patterns that several variants contain: bands along the diagonal, and rows that see everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnbench.catalogue.engines.patterns.keys import Beside, SharedKeys, Window
from attnbench.catalogue.engines.patterns.tiles import Blocks, Keys, Mask, Tile, batches, minus_infinity
from attnbench.catalogue.engines.products import copies
from attnbench.catalogue.engines.tiling import budget, large_steps, learned, short_examples, threads, tile_scores

ROWS = 64
"""Query rows per product. Fewer waste less in the corners of a window; more use the matrix units better."""


def band_rows(q: Tensor, keys: int) -> int:
    """Query rows per product of a window of ``keys`` keys.

    Half of ROWS if the corners would be a large part of the window, unless keys are copied for every block of rows, or
    gradients of keys are summed over the blocks.
    """
    return ROWS if keys > 512 or not _only_scores(q) else ROWS // 2


def _only_scores(q: Tensor) -> bool:
    return not (large_steps(q) or copies(q) or learned(q))


def blocks_per_tile(q: Tensor, blocks: int, scores: int, *, least: int = 1) -> int:
    """Number of the ``blocks`` equal query blocks of q ``(B, H, N, D)``, ``scores`` scores each, in one tile."""
    most = max(1, tile_scores(q) // scores)
    heads = q.shape[0] * q.shape[1] if q.is_contiguous() or short_examples(q) else q.shape[1]
    if least == 1 and not large_steps(q) and blocks * -(-heads // most) < heads * -(-blocks // most):
        return 1  # one block of many heads at a time makes fewer steps than many blocks of one head
    if most >= blocks:
        return max(least, blocks)
    # Tiles of one size, a multiple of the number of cores: else all would wait for the one with a block more.
    alike, cores = -(-blocks // -(-blocks // most)), threads()
    return max(least, min(most, -(-alike // cores) * cores))


def full_rows(q: Tensor, rows: Blocks) -> Iterator[Tile]:
    """Tiles in which the rows of these blocks see every key."""
    n = q.shape[2]
    # As many as the limit on scores allows: all keys are read again for every tile.
    most = max(ROWS, (tile_scores(q) if large_steps(q) else budget("patterns.full_rows", q.device)) // n)
    if rows.count > 1 and rows.count * rows.size <= most:
        yield Tile(rows, (SharedKeys(Blocks(0, n)),))
        return
    for start in range(rows.start, rows.start + rows.count * rows.step, rows.step):
        for first, size in batches(start, start + rows.size, most):
            yield Tile(Blocks(first, size), (Window(Blocks(0, n)),))


def triangle(q: Tensor, column: int, size: int) -> tuple[Mask]:
    """The causal mask of ``size`` rows and as many columns from ``column`` on."""
    i = torch.arange(size, device=q.device)
    return ((column, minus_infinity(i > i[:, None], q)),)


def band(
    q: Tensor,
    reach: tuple[int, int],
    *,
    tokens: range | None = None,
    step: int | None = None,
    also: Callable[[Blocks], tuple[Keys, ...]] | None = None,
    rows: int | None = None,
    least: int = 1,
) -> Iterator[Tile]:
    """Tiles of a band over some tokens.

    Args:
        reach: tokens before it and after it that a token sees.
        tokens: the band's tokens; None: all.
        step: distance in tokens between the blocks of one tile; None: ``rows``, the longest block.
        also: further keys for the query blocks of a tile.
        rows: query rows per product; None: :func:`band_rows`.
        least: fewest blocks in a tile, if there are that many; above 1, one head at a time.
    """
    tokens = range(q.shape[2]) if tokens is None else tokens
    length, start, stride = len(tokens), tokens.start, tokens.step
    before, after = (min(one, length) for one in reach)
    known: dict[tuple[int, int, int], tuple[Mask, ...]] = {}
    rows = rows or band_rows(q, before + after)
    step = step or rows
    for offset, size in batches(0, min(step, length), rows):
        inner = range(-((offset - before) // step), (length - after - size - offset) // step + 1)
        outer = ((t, 1) for t in range(-((offset - length) // step)) if t not in inner)
        held = max(1, size * (before + size + after) // (2 if also is None and _only_scores(q) else 1))
        most = blocks_per_tile(q, len(inner), held, least=least)
        for t, count in (*batches(inner.start, inner.stop, most), *outer):
            i = t * step + offset
            own = range(i, min(length, i + size))
            keys = range(max(0, i - before), min(length, own.stop + after))
            form = (i - keys.start, len(own), len(keys))
            if form not in known:
                known[form] = tuple(_corners(q, *form, before, after))
            window = Window(Blocks(start + keys.start * stride, len(keys), count, step * stride, stride), known[form])
            queries = Blocks(start + i * stride, len(own), count, step * stride, stride)
            yield Tile(queries, (window, *also(queries)) if also else (window,), by_head=least > 1)


def around_global(q: Tensor, g: int, window: int, dilation: int = 1) -> Iterator[Tile]:
    """Token i sees i ± t·dilation for t = 0 .. window; the first ``g`` tokens see every token and are seen by all."""
    yield from full_rows(q, Blocks(0, g))
    for start in range(g, min(g + dilation, q.shape[2])):
        yield from _behind(q, g, (window, window), range(start, q.shape[2], dilation))


def with_first(q: Tensor, g: int, window: int, *, causal: bool) -> Iterator[Tile]:
    """Token i sees i - window .. i + window and the first ``g`` tokens, but none after itself if causal.

    The rows of the first tokens come first, with the first keys in front; in all others these stand behind the window.
    """
    n = q.shape[2]
    for start, size in batches(0, g, ROWS):
        rows = Blocks(start, size)
        if causal:
            yield Tile(rows, (Window(Blocks(0, start + size), triangle(q, start, size)),))
            continue
        last = max(g, min(n, start + size + window))
        distance = torch.arange(g, last, device=q.device) - torch.arange(start, start + size, device=q.device)[:, None]
        masks = ((g, minus_infinity(distance > window, q)),) if last > g else ()
        yield Tile(rows, (Window(Blocks(0, last), masks),))
    yield from _behind(q, g, (window, 0 if causal else window), range(g, n))


def _behind(q: Tensor, g: int, reach: tuple[int, int], tokens: range) -> Iterator[Tile]:
    """A band over tokens behind the first ``g``; all of its rows see these as well."""
    seen_by_all: tuple[Keys, ...] = (SharedKeys(Blocks(0, g)),) if g else ()
    copied = bool(g) and not large_steps(q)
    # The band covers only the tokens after the first ones, so that these are never counted twice.
    also = (lambda rows: seen_by_all) if g else None
    rows = ROWS if copied else None
    for tile in band(q, reach, tokens=tokens, also=also, rows=rows):
        yield _beside(tile) if copied else tile


def _beside(tile: Tile) -> Tile:
    (window, shared) = tile.keys
    assert isinstance(window, Window)
    assert isinstance(shared, SharedKeys)
    return replace(tile, keys=(Beside(window.blocks, shared.blocks, window.masks),))


def _corners(q: Tensor, shift: int, rows: int, keys: int, before: int, after: int) -> Iterator[Mask]:
    """Masks of the rectangle's corners beyond the band: fewer than ``rows`` columns on either side.

    Its first row is ``shift`` tokens after its first key.
    """
    i = torch.arange(shift, shift + rows, device=q.device)[:, None]
    for columns in (range(shift + rows - 1 - before), range(max(0, shift + after + 1), keys)):
        if columns:
            distance = torch.arange(columns.start, columns.stop, device=q.device) - i
            yield columns.start, minus_infinity((distance < -before) | (distance > after), q)
