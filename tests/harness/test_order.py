from __future__ import annotations

from itertools import groupby

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.plan import in_order
from attnbench.suite.cell import Cell, Pass

PASSES: tuple[Pass, ...] = ("forward", "training")
CELLS = [
    Cell("s", "w", Spec(variant), Shape(seq_len=n), pass_=pass_)
    for variant in ("softmax", "sdpa", "local", "linear")
    for n in (512, 1024, 2048)
    for pass_ in PASSES
]


def test_every_cell_is_visited_once_in_an_order_that_the_seed_decides() -> None:
    orders = [list(in_order(CELLS, seed)) for seed in "abcabc"]
    assert all(sorted(order, key=repr) == sorted(CELLS, key=repr) for order in orders)
    assert orders[:3] == orders[3:]
    assert len({tuple(order) for order in orders}) == 3


def test_variants_in_the_same_circumstances_are_neighbours_in_any_order() -> None:
    first = set()
    for seed in "abcdefgh":
        runs = [
            (circumstances, [cell.variant.name for cell in cells])
            for circumstances, cells in groupby(in_order(CELLS, seed), key=lambda cell: (cell.shape.N, cell.pass_))
        ]
        assert len(runs) == 6
        assert all(len(set(variants)) == 4 for _, variants in runs)
        first |= {variants[0] for _, variants in runs}
    assert first == {"softmax", "sdpa", "local", "linear"}


def test_a_shorter_length_of_the_same_comes_before_a_longer_one() -> None:
    for seed in "abcd":
        order = list(in_order(CELLS[:-3], seed))
        for variant in ("softmax", "sdpa", "local", "linear"):
            for pass_ in PASSES:
                lengths = [c.shape.N for c in order if c.variant.name == variant and c.pass_ == pass_]
                assert lengths == sorted(lengths)
