from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.pattern.bigbird import BigBird, random_blocks
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.patterns import bands, keys, pattern_softmax
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.patterns import draw, is_softmax_under
from tests.catalogue.attention.small import built
from tests.pairwise import pairwise


def made(n: int, block: int, wanted: int, seed: int = 0, H: int = 2) -> BigBird:
    return built(BigBird, f"bigbird:block={block},random_blocks={wanted}", Shape(2, H, n, 4), seed=seed)


def plan(f: BigBird, n: int) -> list[list[set[int]]]:
    """Blocks seen by chance, [head][block]; checks that there are as many as wanted or left, all new."""
    total = -(-n // f.block)
    heads, wanted = f.draws.shape[1:]
    chosen: list[list[set[int]]] = [[set() for _ in range(total)] for _ in range(heads)]
    if total < 4:
        return chosen
    table = random_blocks(f.draws[:total])
    for i in range(1, total - 1):
        seen = {0, i - 1, i, i + 1, total - 1}
        taken = min(wanted, total - len(seen))
        for h in range(heads):
            row = table[i, h, :taken].tolist()
            chosen[h][i] = set(row)
            assert len(chosen[h][i]) == taken
            assert not chosen[h][i] & seen
            assert chosen[h][i] < set(range(total))
    return chosen


def dense(f: BigBird, n: int) -> Tensor:
    """(H, n, n): the pattern from its definition."""
    total = -(-n // f.block)
    i, j = torch.arange(n)[:, None] // f.block, torch.arange(n) // f.block
    allowed = ((i - j).abs() <= 1) | (i == 0) | (j == 0) | (i == total - 1) | (j == total - 1)
    heads = []
    for row in plan(f, n):
        table = torch.zeros(total, total, dtype=torch.bool)
        for block, seen in enumerate(row):
            table[block, list(seen)] = True
        heads.append(allowed | table[i, j])
    return torch.stack(heads)


@pytest.mark.parametrize(("n", "block", "wanted"), pairwise([1, 5, 64, 65, 97, 150], [1, 4, 16, 64], [0, 1, 3, 20]))
def test_it_is_softmax_under_the_dense_mask_with_each_key_counted_once(n: int, block: int, wanted: int) -> None:
    f = made(n, block, wanted)
    is_softmax_under(f, dense(f, n), n, padded=False)


def test_a_shorter_shape_draws_the_same_plan_from_the_same_seed() -> None:
    long, short = made(400, 4, 3, seed=5), made(222, 4, 3, seed=5)
    assert plan(long, 222) == plan(short, 222)
    q, k, v = draw(222)
    assert torch.equal(long(q, k, v), short(q, k, v))


def test_the_seed_decides_and_heads_draw_apart() -> None:
    one, again, other = made(400, 4, 3, seed=1), made(400, 4, 3, seed=1), made(400, 4, 3, seed=2)
    assert plan(one, 400) == plan(again, 400)
    assert plan(one, 400) != plan(other, 400)
    assert plan(one, 400)[0] != plan(one, 400)[1]


def test_a_change_of_dtype_keeps_the_plan() -> None:
    f = made(400, 4, 3)
    before = plan(f, 400)
    assert plan(f.to(torch.bfloat16), 400) == before


@pytest.mark.parametrize(("block", "left"), [(1, [3, 4, 5, 6]), (3, [1, 5, 6]), (5, [1, 2, 3]), (6, [1, 2, 3, 4])])
def test_every_pair_of_free_blocks_is_as_likely_as_any_other(block: int, left: list[int]) -> None:
    draws = 3000
    table = random_blocks(torch.randint(2**53, (8, draws, 2)))[block]
    found = [tuple(sorted(row)) for row in table.tolist()]
    pairs = list(combinations(left, 2))
    expected = draws / len(pairs)
    spread = (draws / len(pairs) * (1 - 1 / len(pairs))) ** 0.5
    assert set(found) == set(pairs)
    assert all(abs(found.count(pair) - expected) < 5 * spread for pair in pairs)


@pytest.mark.parametrize("n", [24, 27])
def test_many_heads_in_one_step_give_what_one_at_a_time_gives(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    f, inputs = made(n, 4, 2), draw(n)
    weight = torch.randn_like(inputs[0])
    expected = [f(*inputs), *torch.autograd.grad((f(*inputs) * weight).sum(), inputs)]
    for module in (pattern_softmax, bands, keys, tiling):
        monkeypatch.setattr(module, "large_steps", lambda q: True)
    output = f(*inputs)
    for got, wanted in zip([output, *torch.autograd.grad((output * weight).sum(), inputs)], expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-13)
