"""Patterns on a video: windows of tiles, and bands that narrow with the distance of frames."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern.radial import Radial
from attnbench.catalogue.attention.pattern.sta import SlidingTile
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.patterns.canvas import sides
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError
from tests.catalogue.attention.small import built, close

F64 = torch.float64
STA = [
    ((2, 3), (1, 2, 2), (2, 1, 1), 0),
    ((3, 2), (2, 2, 1), (1, 2, 1), 4),
    ((2, 2), (2, 2, 2), (3, 3, 3), 0),
    ((3, 3), (2, 2, 2), (3, 1, 1), 2),
    ((1, 1), (2, 1, 1), (3, 1, 1), 0),
]
RADIAL = [(4, 2, 0), (5, 2, 3), (2, 2, 0), (9, 4, 0), (2, 5, 0), (1, 1, 2), (8, 1, 0)]
each_length = pytest.mark.parametrize("n", [1, 7, 23, 60])


def draw(n: int, K: int = 2) -> list[Tensor]:
    sizes = ((2, 4), (K, 4), (K, 3))
    return [torch.randn(2, heads, n, width, dtype=F64) for heads, width in sizes]


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: list[list[int]]) -> Tensor:
    """One softmax of each query over a list of keys."""
    out, G = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64), q.shape[1] // k.shape[1]
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        keys = seen[i]
        out[b, h, i] = (k[b, h // G, keys] @ q[b, h, i] / q.shape[3] ** 0.5).softmax(0) @ v[b, h // G, keys]
    return out


def with_text(n: int, text: int, video: list[list[int]]) -> list[list[int]]:
    of_text = list(range(n - text, n))
    return [one + of_text for one in video] + [list(range(n))] * text


def window(n: int, frame: tuple[int, int], tile: tuple[int, ...], size: tuple[int, ...]) -> list[list[int]]:
    """Tiles by the index of their first tokens: on each axis the window is shifted until it is inside."""
    rows, columns = frame
    places = [(f, r, c) for f, r, c in itertools.product(range(n), range(rows), range(columns))][:n]
    lengths = (places[-1][0] + 1 if places else 0, rows, columns)
    seen = []
    for place in places:
        allowed = []
        for x, length, side, count in zip(place, lengths, tile, size, strict=True):
            tiles = list(range((length + side - 1) // side))
            first = x // side - count // 2
            while first + count > len(tiles):
                first -= 1
            while first < 0:
                first += 1
            allowed.append(set(tiles[first : first + count]))
        seen.append(
            [
                j
                for j, other in enumerate(places)
                if all(y // side in one for y, side, one in zip(other, tile, allowed, strict=True))
            ]
        )
    return seen


def bands(n: int, s: int, block: int) -> list[list[int]]:
    """Blocks of two frames with any two places less than s/r apart; where that is less than a block, the same ones."""
    seen = []
    for i in range(n):
        keys = []
        for j in range(n):
            apart = abs(i // s - j // s)
            r = max([p for p in (1, 2, 4, 8, 16, 32, 64) if p <= apart], default=1)
            ours, theirs = (range(x % s // block * block, x % s // block * block + block) for x in (i, j))
            if s / r >= block:
                near = any(abs(x - y) < s / r for x, y in itertools.product(ours, theirs))
            else:
                every = 1
                while every * s < r * block:
                    every += 1
                near = ours == theirs and apart % every == 0
            if near or apart <= 1 or j < s:
                keys.append(j)
        seen.append(keys)
    return seen


@each_length
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("frame", "tile", "size", "text"), STA)
def test_a_query_sees_a_whole_window_of_tiles(
    frame: tuple[int, int], tile: tuple[int, ...], size: tuple[int, ...], text: int, n: int, kv_heads: int
) -> None:
    options = {name: "x".join(map(str, x)) for name, x in (("frame", frame), ("tile", tile), ("window", size))}
    module = built(SlidingTile, "sta", Shape(2, 2, n, 4, kv_heads=kv_heads, v_dim=3), text=text, **options).double()
    inputs, words = draw(n, kv_heads), min(text, n)
    expected = by_hand(*inputs, with_text(n, words, window(n - words, frame, tile, size)))
    close(module(*inputs), expected)
    close(module.dense(*inputs), expected)


@each_length
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize(("frame", "block", "text"), RADIAL)
def test_bands_narrow_as_frames_move_apart(frame: int, block: int, text: int, n: int, kv_heads: int) -> None:
    shape = Shape(2, 2, n, 4, kv_heads=kv_heads, v_dim=3)
    module = built(Radial, "radial", shape, frame=frame, block=block, text=text).double()
    inputs, words = draw(n, kv_heads), min(text, n)
    expected = by_hand(*inputs, with_text(n, words, bands(n - words, frame, block)))
    close(module(*inputs), expected)
    close(module.dense(*inputs), expected)


def test_each_doubling_of_the_distance_adds_as_many_pairs() -> None:
    """s = 16: a band of 16/r places for r, 2·r frames of it on both sides, and below one place one frame of many."""
    module = built(Radial, "radial:frame=16,block=1", Shape(1, 1, 16 * 129, 1)).double()
    _, kept = module._plan(16 * 129, torch.device("cpu"))
    at = 64 * 16 + 8
    of_one = kept[kept[:, 0] == at, 1]
    apart = (of_one // 16 - 64).abs()
    counts = [int(((apart >= r) & (apart < 2 * r) & (of_one >= 16)).sum()) for r in (2, 4, 8, 16, 32)]
    assert counts == [60, 56, 48, 32, 32]


def test_sides_are_whole_numbers_with_an_x_between() -> None:
    assert sides("6x8x10", 3, "x") == (6, 8, 10)
    for text in ("8", "8x8x8x8", "8x0x8", "8x8x", "axb", "8 x 8 x 8", ""):
        with pytest.raises(UsageError, match=r"sta: option tile=.* must be 3 whole numbers of at least 1 with an x"):
            build("sta", Shape(1, 1, 8, 4), tile=text)


@pytest.mark.parametrize("name", ["sta", "radial"])
def test_a_video_is_not_read_from_left_to_right_and_not_padded(name: str) -> None:
    with pytest.raises(Unsupported, match="frames of a video are made together"):
        build(name, Shape(1, 1, 8, 4, causal=True))
    with pytest.raises(Unsupported, match=r"one video|the same video"):
        build(name, Shape(1, 1, 8, 4, kv_len=9))
    video = build(name, Shape(2, 1, 8, 4))
    with pytest.raises(Unsupported, match="key padding"):
        video(*torch.randn(3, 2, 1, 8, 4), key_mask=torch.ones(2, 8, dtype=torch.bool))
