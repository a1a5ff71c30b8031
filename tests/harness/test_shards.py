"""A shard is a run of its own: its folder, its rows, its place in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.shard import Shard


@pytest.fixture
def run(tmp_path: Path, small_suite: Path, instant: Any) -> Any:
    def go(shard: Shard | None) -> tuple[RunFolder, list[Record], int]:
        worker = instant()
        plan = make_plan(small_suite, Options("cpu", shard=shard, out=tmp_path / "out", threads=1, rounds=2))
        folder, records = execute(plan, worker=worker)
        return folder, records, len(worker.visits)

    return go


def test_two_shards_of_a_suite_are_two_runs_with_every_cell_once(run: Any) -> None:
    (first, ours, _), (second, theirs, _) = run(Shard(0, 2)), run(Shard(1, 2))
    assert first.path != second.path
    assert first.path.name.endswith("-cpu-0of2")
    assert [folder.environment["shard"] for folder in (first, second)] == ["0/2", "1/2"]
    assert first.environment["suite_digest"] == second.environment["suite_digest"]
    assert {record.seq_len for record in ours} & {record.seq_len for record in theirs} == set()
    assert sorted((r.variant, r.seq_len) for r in ours + theirs) == [
        ("linear", 2),
        ("linear", 4),
        ("softmax", 2),
        ("softmax", 4),
    ]


def test_the_same_shard_goes_on_with_its_run_and_another_split_does_not(run: Any) -> None:
    first, records, visits = run(Shard(0, 2))
    again, same, no_visits = run(Shard(0, 2))
    assert (again.path, same, visits, no_visits) == (first.path, records, 4, 0)
    other, rows, _ = run(Shard(0, 1))
    whole, all_rows, _ = run(None)
    assert len({first.path, other.path, whole.path}) == 3
    assert len(rows) == len(all_rows) == 4
    assert "shard" not in whole.environment


def test_an_empty_shard_is_a_plan_without_cells(small_suite: Path) -> None:
    plan = make_plan(small_suite, Options("cpu", shard=Shard(7, 8)))
    assert (plan.cells, plan.whole) == ([], 4)
