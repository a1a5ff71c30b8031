"""Shards of a suite: each cell in one of them, and what is compared together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import UsageError
from attnbench.harness.outside.trainers import phases
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.trainings import trained
from attnbench.suite.cell import Cell, Training
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite
from attnbench.suite.shard import Shard, comparison_group, groups, parse_shard, part, weight


@pytest.mark.parametrize("text", ["0/1", "0/4", "3/4", " 1/2 ", "9999/10000"])
def test_a_shard_is_written_from_0(text: str) -> None:
    assert str(parse_shard(text)) == text.strip()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2/2", "shards count from 0, so the last one is 1/2"),
        ("0/0", "a suite has 1 to 10000 shards"),
        ("0/10001", "a suite has 1 to 10000 shards"),
        ("a/b", "'a/b' is not I/K; write 0/4"),
        ("", "is not I/K"),
        ("-1/2", "is not I/K"),
        ("1", "is not I/K"),
        ("1/2/3", "is not I/K"),
        ("٣/٤", "is not I/K"),
        ("9" * 5000 + "/1", "is not I/K"),
    ],
)
def test_what_is_no_shard_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_shard(text)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 120


def cells_of(name: str) -> list[Cell]:
    return expand(load_suite(name), device="cpu")


@pytest.mark.parametrize(("name", "of"), [("quick", 1), ("quick", 3), ("headline", 2), ("catalogue", 7)])
def test_shards_of_a_shipped_suite_are_the_suite_and_no_group_is_in_two(name: str, of: int) -> None:
    cells = cells_of(name)
    parts = [part(cells, Shard(index, of)) for index in range(of)]
    assert sorted(cell.cell_id for one in parts for cell in one) == sorted(cell.cell_id for cell in cells)
    assert all([cell for cell in cells if cell in set(one)] == one for one in parts)  # in the suite's order
    standing = [{comparison_group(cell) for cell in one} for one in parts]
    assert sum(map(len, standing)) == len(set().union(*standing))


def test_two_cells_that_differ_by_the_variant_alone_are_in_one_group_and_others_are_not() -> None:
    cell = Cell("s", "w", Spec("softmax"), Shape(seq_len=64))
    same = [
        replace(cell, variant=Spec("performer", (("features", 64),))),
        replace(cell, sweep="other", measure=("error",), error_draws=3),
    ]
    assert len(groups([cell, *same])) == 1
    others = [
        replace(cell, shape=Shape(seq_len=128)),
        replace(cell, shape=Shape(seq_len=64, causal=True)),
        replace(cell, dtype="float16"),
        replace(cell, seed=1),
        replace(cell, compile=True),
        replace(cell, pass_="training"),
    ]
    assert len(groups([cell, *others])) == len(others) + 1


def scored(**axes: Any) -> Suite:
    matrix = {"variant": ["softmax", "identity"], "task": ["recall", "copy"], "seq_len": [16, 32]}
    sweep = {"name": "w", "level": "model", "pass": "training", "measure": "score", "training": {"sweep_seeds": 1}}
    more = {"include": [{"seq_len": 16, "seed": [0]}]}
    return Suite.of({"name": "s", "sweeps": [{**sweep, "matrix": {**matrix, **axes}}], **more}, Origin())


def test_trainings_whose_scores_share_a_column_are_in_one_group() -> None:
    cells = expand(scored(seed=[1, 2], learning_rate=[0.001, 0.01]))
    problems: dict[object, set[Cell]] = {}
    for cell in cells:
        (one,) = trained([Record.of(cell, Status.OK, score=0.5)])
        problems.setdefault(one.problem, set()).add(comparison_group(cell))
    assert len(problems) == 4
    assert all(len(found) == 1 for found in problems.values())


@pytest.mark.parametrize("of", [2, 3, 4])
def test_a_shard_trains_at_every_rate_what_the_whole_suite_trains_at_every_rate(of: int) -> None:
    cells = expand(scored(seed=[1, 2], learning_rate=[0.001, 0.01]))  # n = 16 has seed 0 as well
    first, late = phases(cells)
    assert {cell.seed for cell in late if cell.shape.N == 16} == {1, 2}
    assert {cell.seed for cell in late if cell.shape.N == 32} == {2}
    found = [phases(part(cells, Shard(index, of))) for index in range(of)]
    assert {cell for one, _ in found for cell in one} == set(first)
    assert {cell for _, one in found for cell in one} == set(late)


lengths = st.lists(st.integers(1, 2**17), min_size=1, max_size=30, unique=True)


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(1, 40), st.integers(1, 4))
def test_the_fullest_shard_exceeds_the_mean_by_one_group_at_most(sizes: list[int], of: int, variants: int) -> None:
    cells = [Cell("s", "w", Spec(f"v{v}"), Shape(seq_len=n)) for n in sizes for v in range(variants)]
    loads = [sum(map(weight, part(cells, Shard(index, of)))) for index in range(of)]
    heaviest = max(sum(map(weight, group)) for group in groups(cells))
    assert max(loads) <= sum(loads) / of + heaviest + 1e-6
    assert sum(load > 0 for load in loads) == min(of, len(sizes))


def test_the_split_does_not_depend_on_the_order_in_which_a_set_is_walked() -> None:
    cells = cells_of("quick")
    assert [part(cells, Shard(1, 3)) for _ in range(3)] == [part(list(cells), Shard(1, 3))] * 3


def test_a_training_weighs_what_its_steps_weigh() -> None:
    cell = Cell("s", "w", Spec("softmax"), Shape(seq_len=64), training=Training(steps=100))
    longer = replace(cell, training=Training(steps=100, pretrain_steps=100))
    assert weight(longer) - 1 == 2 * (weight(cell) - 1) > 0


@pytest.mark.parametrize("name", ["quick", "headline"])
def test_a_shipped_suite_is_balanced_between_two_machines(name: str) -> None:
    cells = cells_of(name)
    halves = [sum(map(weight, part(cells, Shard(index, 2)))) for index in range(2)]
    heaviest = max(sum(map(weight, group)) for group in groups(cells))
    assert abs(halves[0] - halves[1]) <= heaviest


def test_a_suite_from_a_file_gives_the_same_shards_as_its_copy(tmp_path: Path) -> None:
    copy = tmp_path / "quick.yaml"
    copy.write_text(load_suite("quick").to_yaml())
    assert part(cells_of(str(copy)), Shard(0, 2)) == part(cells_of("quick"), Shard(0, 2))
