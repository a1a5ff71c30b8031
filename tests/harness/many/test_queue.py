"""Lots of comparison groups: which machine gets what, and when."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from attnbench.harness.many.kinds import Kind
from attnbench.harness.many.queue import Queue
from attnbench.harness.plan import Options, make_plan
from attnbench.suite.shard import comparison_group

A, B = cast(Kind, object()), cast(Kind, object())
"""Two kinds of machines."""


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    file = tmp_path / "s.yaml"
    lengths = [*range(1, 41)]
    file.write_text(f"name: s\nsweeps: [{{name: w, matrix: {{variant: [softmax, linear], seq_len: {lengths}}}}}]\n")
    return Queue(make_plan(file, Options("cpu")).cells)


def take(queue: Queue, machine: int, kind: Kind = A, host: str = "a", keeps: str = "", machines: int = 4) -> list[int]:
    lot = queue.take(
        machine, kind=kind, host=host, keeps=keeps.__contains__ if keeps else lambda _: False, machines=machines
    )
    assert all(len({comparison_group(cell) for cell in group.cells}) == 1 for group in lot)
    return [group.cells[0].shape.N for group in lot]


def test_short_sequences_come_first_and_lots_become_smaller_until_each_is_one_group(queue: Queue) -> None:
    lots = []
    while queue.waiting:
        lots.append(take(queue, 1))
    assert [n for lot in lots for n in lot] == [*range(1, 41)]
    sizes = list(map(len, lots))
    assert sizes[0] == 5  # an eighth of what waits, for four machines
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_a_lot_takes_ten_minutes_a_round_at_most(queue: Queue) -> None:
    for group in queue.waiting:
        group.weight = 250.0
    assert len(take(queue, 1, machines=1)) == 2
    queue.waiting[0].weight = 5000.0
    assert len(take(queue, 1, machines=1)) == 1


def test_what_was_given_back_comes_first_and_only_to_its_kind(queue: Queue) -> None:
    lost = take(queue, 1)
    queue.give_back(1)
    assert take(queue, 2, kind=B, host="b")[0] == 6
    assert (lot := take(queue, 3, kind=A, host="c")) == lost[: len(lot)]


def test_a_host_that_is_there_keeps_its_groups(queue: Queue) -> None:
    lost = take(queue, 1, host="a")
    queue.give_back(1)
    assert take(queue, 2, host="b", keeps="a")[0] == 6
    assert (lot := take(queue, 3, host="a", keeps="a")) == lost[: len(lot)]


def test_a_queue_is_empty_when_all_that_was_taken_is_complete(queue: Queue) -> None:
    del queue.waiting[1:]
    (group,) = queue.take(1, kind=A, host="a", keeps=lambda host: False, machines=1)
    assert not queue.is_empty
    assert queue.is_worked_on
    queue.finish(1, group)
    assert queue.is_empty
    assert queue.give_back(1) == []
