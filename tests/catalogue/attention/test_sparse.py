from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern.sparse import sparse as sparse
from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.patterns import draw, is_softmax_under
from tests.pairwise import pairwise

assert sparse.Sparse


def factors(n: int, pattern: str, length: int, summary: int = 0) -> tuple[Tensor, Tensor]:
    """A¹ and A² as the paper writes them, both causal."""
    i, j = torch.arange(n)[:, None], torch.arange(n)
    if pattern == "strided":
        first, second = j >= i - length, (i - j) % length == 0
    else:
        first, second = j // length == i // length, j % length >= length - summary
    return first & (j <= i), second & (j <= i)


CASES = [f"pattern=strided,length={length}" for length in (1, 2, 3, 5, 13, 64, 70, 400)]
CASES += [
    f"pattern=fixed,length={a},summary={c}" for a, c in ((1, 1), (3, 1), (5, 5), (13, 2), (64, 8), (70, 3), (400, 9))
]
PARTS = [f"pattern=stride,length={length}" for length in (1, 3, 13, 70, 400)]
PARTS += [f"pattern=summary,length={a},summary={c}" for a, c in ((1, 1), (3, 1), (5, 5), (13, 2), (70, 3))]
SPLIT = [f"{options},heads=split" for options in (*CASES[2:6], *CASES[9:13])]


def expected_mask(n: int, options: str, causal: bool) -> Tensor:
    """(n, n), or (2, n, n) where the two heads differ."""
    given = dict(part.split("=") for part in options.split(","))
    pattern, length, summary = given["pattern"], int(given["length"]), int(given.get("summary", 0))
    full = {"stride": "strided", "summary": "fixed"}.get(pattern, pattern)
    first, second = factors(n, full, length, summary)
    alone = second.clone()
    if full == "fixed":
        for i in range(min(n, length - summary)):
            assert not alone[i].any()
            alone[i, i] = True
    merged = alone if pattern != full else first | second
    allowed = torch.stack([first, alone]) if "heads" in given else merged
    return allowed if causal else allowed | allowed.mT


@pytest.mark.parametrize(("n", "options", "causal"), pairwise([1, 65, 110], CASES + PARTS + SPLIT, [False, True]))
def test_one_softmax_over_the_factors_of_a_head_counts_each_key_once(n: int, options: str, causal: bool) -> None:
    f = build(f"sparse:{options}", Shape(2, 2, n, 4, causal=causal))
    is_softmax_under(f, expected_mask(n, options, causal), n)


@pytest.mark.parametrize(("n", "length"), [(1, 1), (3, 1), (64, 8), (99, 9), (100, 10)])
def test_the_default_length_is_the_root_of_the_sequence(n: int, length: int) -> None:
    f = build("sparse", Shape(1, 1, n, 4))
    assert isinstance(f, sparse.Sparse)
    assert f.length == length


def test_a_summary_longer_than_default_blocks_fills_them() -> None:
    q, k, v = draw(25)
    f = build("sparse:pattern=fixed,summary=8", Shape(2, 2, 25, 4, causal=True))  # blocks of 5
    torch.testing.assert_close(f(q, k, v), exact_attention(q, k, v, causal=True), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_split_heads_are_the_two_parts_side_by_side(pattern: str) -> None:
    q, k, v = draw(50, H=5)
    shape = Shape(2, 5, 50, 4)
    both = build(f"sparse:pattern={pattern},length=6,heads=split" + ",summary=2" * (pattern == "fixed"), shape)(q, k, v)
    near, far = ("local:window=6", "sparse:pattern=stride,length=6")
    if pattern == "fixed":
        near, far = "local:block=6", "sparse:pattern=summary,length=6,summary=2"
    assert torch.equal(both[:, :3], build(near, shape)(q, k, v)[:, :3])
    torch.testing.assert_close(both[:, 3:], build(far, shape)(q, k, v)[:, 3:], rtol=0, atol=1e-12)
