"""What `compare` says on a machine all of whose cores are busy with other programs. See `make selfcheck`."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.compare.compare import CompareRow, Comparison, Contest
from attnbench.harness.outside.isolation import Settings
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell

LENGTHS = (128, 256, 512, 1024)
RULES = TimingRules(min_time=0.3, max_time=3.0, warmup_time=0.05)


@contextmanager
def busy_loops(count: int = 2 * (os.cpu_count() or 1)) -> Iterator[None]:
    """Programs, two for each core, that never sleep, in sessions of their own, as those of other users are.

    With one for each core the scheduler now and then leaves a core to the worker for a whole length.

    Linux divides its cores between sessions first. Those of this test's session would get one share together, and the
    worker, whose session is another, a core that nobody disturbs.
    """
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measured(a: str, b: str, threads: int, lengths: Sequence[int] = LENGTHS, rules: TimingRules = RULES) -> Comparison:
    shape = Shape(heads=2, seq_len=lengths[0], head_dim=32)
    cells = [Cell("s", "w", Spec(name), shape, measure=("time",)) for name in (a, b)]
    contest = Contest(cells, lengths, Settings(threads=threads, rates=False), rules)
    found = contest.answer()
    for row in found.rows[a, b]:
        print(f"\n{threads} threads, n = {row.n}: {row.verdict}, {row.ratio}, {row.withheld}", end="")
    print(f"\n{found.crossovers[a, b].note}; {found.warnings}")
    return found


def widest(rows: list[CompareRow]) -> float:
    """The logarithm of the widest interval's upper end over its lower one."""
    ends = [(row.ratio.low, row.ratio.high) for row in rows if row.ratio]
    return max((math.log(high / low) for low, high in ends if low and high), default=0.0)


@pytest.fixture(autouse=True)
def no_priority() -> None:
    """Let no later child of this process rank itself before other programs, as root's worker otherwise does."""
    drop_from_bounding_set, right_to_rank = 24, 23  # PR_CAPBSET_DROP, CAP_SYS_NICE
    ctypes.CDLL(None).prctl(drop_from_bounding_set, right_to_rank, 0, 0, 0)


@pytest.mark.parametrize("threads", [1, os.cpu_count() or 1])
@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_a_variant_against_itself_on_a_busy_machine_gets_no_false_verdict(name: str, threads: int) -> None:
    quiet = widest(measured(name, name, threads).rows[name, name])
    assert quiet > 0
    with busy_loops():
        found = measured(name, name, threads)
    rows = found.rows[name, name]
    assert not {"faster", "slower"} & {row.verdict for row in rows}
    assert found.crossovers[name, name].n is None
    assert {row.verdict for row in rows} == {"withheld"} or widest(rows) >= 2 * quiet


def test_a_busy_machine_is_said_to_be_busy_and_impossible_times_bring_no_verdict() -> None:
    with busy_loops():
        found = measured("softmax", "linear", os.cpu_count() or 1)
    rows = found.rows["softmax", "linear"]
    assert any("the machine is busy" in warning for warning in found.warnings)
    believed = [row for row in rows if row.verdict in ("faster", "slower")]
    assert all(one.a.time and two.a.time and one.a.time < two.a.time for one, two in pairwise(believed))
