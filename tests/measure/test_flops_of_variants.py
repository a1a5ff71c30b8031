"""The counted FLOPs of exact and sparse variants against closed forms: 4·D for each pair of a row and a key.

Tiles of a sliding window have some rows, of which every one meets the keys that any of them sees: the documented cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import products
from attnbench.contract.problem.shape import Shape
from attnbench.measure.flops import count, predict
from tests.pairwise import pairwise

H, D = 2, 16
ROWS = 32
"""Rows of a tile of a sliding window, if products read overlapping keys in place."""
SCORES = 5 * 2**16
"""Most scores that one tile holds."""

Pairs = Callable[[int], int]


def every(n: int) -> int:
    return n * n


def window(n: int, before: int, after: int, rows: int | None = None) -> int:
    """Tiles of ``rows`` (or ROWS) rows, each with the keys from ``before`` its first row to ``after`` its last."""
    rows = rows or ROWS
    tiles = [(i, min(n, i + rows)) for i in range(0, n, rows)]
    return sum((stop - i) * (min(n, stop + after) - max(0, i - before)) for i, stop in tiles)


def around_global(n: int, side: int, g: int) -> int:
    """``g`` rows see everything; the others their window of the others, copied beside the g."""
    return g * n + window(n - g, side, side, 64) + (n - g) * g


def bigbird(n: int, block: int, drawn: int) -> int:
    """The first and last block see all; inner ones the first, the last, three around their own and those drawn."""
    total = n // block
    return block**2 * (2 * total + 2 * (4 + drawn) + (total - 4) * (5 + drawn))


def fixed(n: int) -> int:
    """Causal: blocks of 16 see themselves and the 4 summaries of each block in their tile but its last."""
    blocks = n // 16
    most = SCORES // (16 * (16 + 4 * blocks))
    tiles = [(t, min(blocks, t + most)) for t in range(0, blocks, most)]
    return sum((stop - t) * 16 * (16 + 4 * (stop - 1)) for t, stop in tiles)


def fixed_both_ways(n: int) -> int:
    """12 rows of each block see it and all but the last 4 summaries, 4 all that follows and the summaries before."""
    blocks = n // 16
    ordinary = blocks * 12 * (16 + 4 * (blocks - 1))
    return ordinary + sum(4 * (n - 16 * t + 4 * t) for t in range(blocks))


def summary(n: int) -> int:
    """Causal: the first 12 tokens see themselves, all others the summaries; summaries also those of their block."""
    blocks = n // 16
    seen = 4 * (blocks - 1)
    return 12 + 12 * (blocks - 1) * seen + 4 * blocks * (4 + seen)


CLOSED_FORMS: dict[str, Pairs] = {
    "softmax": every,
    "sdpa": every,
    "chunked": every,
    "local:window=40": lambda n: window(n, 40, 40),
    "local:window=40,dilation=2": lambda n: 2 * window(n // 2, 40, 40),
    "local:block=32,look_around=1": lambda n: n * 3 * 32 - 2 * 32**2,
    "sparse:pattern=strided,length=16": lambda n: n * 3 * 16 - 2 * 16**2 + n * n // 16,
    "sparse:pattern=stride,length=16": lambda n: n * n // 16,
    "longformer:window=40,global_tokens=3": lambda n: around_global(n, 40, 3),
    "etc:window=40,global_tokens=3,max_distance=0": lambda n: around_global(n, 40, 3),
    "bigbird:block=16,random_blocks=2": lambda n: bigbird(n, 16, 2),
    # Scores of all pairs; the values of those chosen are added up without a product.
    "topk:keys=8": lambda n: n * n // 2,
}
CAUSAL: dict[str, Pairs] = {
    "softmax": every,
    "sdpa": lambda n: n * (n + 1) // 2,
    "chunked": lambda n: n * (n + 256) // 2,
    "local:window=40": lambda n: window(n, 40, 0),
    "local:block=32,look_around=1": lambda n: sum(32 * (32 + min(i, 32)) for i in range(0, n, 32)),
    # The band of two blocks; and the columns of all blocks, but the first and each one's own and the one before it.
    "sparse:pattern=strided,length=16": lambda n: n * 2 * 16 - 16**2 + (n - 16) * (n // 16 - 2),
    "sparse:pattern=stride,length=16": lambda n: n * n // 16,  # up to 64 rows of a class are one tile
    "sparse:pattern=fixed,length=16,summary=4": fixed,
    "sparse:pattern=summary,length=16,summary=4": summary,
}


def call(variant: str, n: int, causal: bool) -> Callable[[], object]:
    module = build(variant, Shape(heads=H, seq_len=n, head_dim=D, causal=causal)).requires_grad_(False)
    q, k, v = torch.randn(3, 1, H, n, D).unbind()
    return lambda: module(q, k, v)


LIBRARIES = {
    "keys in place": ("highest", False, 32),
    "keys copied": ("medium", False, 64),
    "windows in place": ("medium", True, 32),
}
FORMS = [
    *((name, form, False) for name, form in CLOSED_FORMS.items()),
    *((name, form, True) for name, form in CAUSAL.items()),
]


def shown(value: object) -> str:
    return f"{value[0]}{'-causal' * value[2]}" if isinstance(value, tuple) else str(value)


@pytest.fixture
def _products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both libraries of float32 products, one of which copies the keys of a window for every tile, so larger ones."""
    before = torch.get_float32_matmul_precision()
    precision, in_place, rows = LIBRARIES[request.param]
    torch.set_float32_matmul_precision(precision)
    monkeypatch.setattr(sys.modules[__name__], "ROWS", rows)
    with products.windows_in_place(in_place):
        yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize(
    ("_products", "n", "form"), pairwise(list(LIBRARIES), [256, 1024], FORMS), indirect=["_products"], ids=shown
)
def test_counted_and_predicted_flops_are_the_closed_form(form: tuple[str, Pairs, bool], n: int) -> None:
    variant, pairs, causal = form
    wanted = 4 * D * H * pairs(n)
    assert count(call(variant, n, causal)).matmul_flops == wanted
    assert predict(lambda: call(variant, n, causal)).matmul_flops == wanted


@pytest.mark.parametrize("n", [256, 1024])
def test_counted_flops_of_the_fixed_pattern_both_ways_are_the_closed_form(n: int) -> None:
    # Its many small steps are more than a prediction follows.
    counted = count(call("sparse:pattern=fixed,length=16,summary=4", n, causal=False))
    assert counted.matmul_flops == 4 * D * H * fixed_both_ways(n)
