"""Two environments that are one: how often ``compare A@X A@X`` and ``run --beside X`` with ``gate`` cry wolf.

    python -m tests.benchmarks.live_beside docs/data/beside-rates.csv

writes the rates that docs/gate.md shows; SELFCHECK_RUNS=20 makes a tenth as many tables, for a look.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from attnbench.answers.gate import decide
from attnbench.answers.gate.verdict import Tolerance
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.outside.interpreter import Interpreter
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute_beside
from attnbench.results.measurements import load

TABLES = max(1, int(os.environ.get("SELFCHECK_RUNS", "200")) // 10)
VARIANTS = ("softmax", "sdpa", "linear", "performer")
LENGTHS = (256, 512, 1024)
HEADS = {"heads": 2, "head_dim": 32}
ROUNDS = 5
FILE = Path(__file__).resolve().parents[2] / "docs/data/beside-rates.csv"


class Rates(NamedTuple):
    """Verdicts that call one of two equal environments faster or slower; ``alarms`` among ``ratios``."""

    command: str
    alarms: int
    ratios: int
    wrong_tables: int
    tables: int


def of_compare(tables: int, min_time: float = 1.0) -> Rates:
    """Tables of one variant at three lengths."""
    alarms, ratios, wrong = 0, 0, 0
    for place in range(tables):
        sides = [f"{VARIANTS[place % len(VARIANTS)]}@{sys.executable}"] * 2
        question = CompareQuestion(sides, LENGTHS, HEADS, "cpu", error=False, threads=1, min_time=min_time)
        (rows,) = question.prepare().answer().rows.values()
        found = sum(row.verdict in ("faster", "slower") for row in rows)
        alarms, ratios, wrong = alarms + found, ratios + sum(row.ratio is not None for row in rows), wrong + bool(found)
    return Rates("compare", alarms, ratios, wrong, tables)


def of_gate(tables: int, rounds: int = ROUNDS) -> Rates:
    """Gates of the suite ``quick``; with a limit of 1, which is the one that any difference fails."""
    alarms, ratios, wrong = 0, 0, 0
    for _ in range(tables):
        with tempfile.TemporaryDirectory() as out:
            options = Options("cpu", threads=1, rounds=rounds, out=Path(out), beside=Interpreter.of(sys.executable))
            here, there = (load(folder.path) for folder, _ in execute_beside(make_plan("quick", options)))
            question = decide.GateQuestion(("time",), limits=Tolerance(time=1.0))
            found = decide.decide(here, [there], question)
        called = sum(one.verdict in ("faster", "slower") for one in found.findings)
        alarms, ratios, wrong = alarms + called, ratios + found.known, wrong + (not found.passed)
    return Rates("run --beside and gate --fail-above 1", alarms, ratios, wrong, tables)


def read() -> list[Rates]:
    """The rates in the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return [Rates(row["command"], *(int(row[name]) for name in Rates._fields[1:])) for row in csv.DictReader(file)]


def measured() -> Iterator[Rates]:
    """Rates of both commands."""
    yield of_compare(TABLES)
    yield of_gate(TABLES)


# A gate takes two to three minutes, for its suite runs ten times.
@pytest.mark.parametrize(("rates", "tables"), [(of_compare, TABLES), (of_gate, max(1, TABLES // 10))])
def test_equal_environments_are_called_different_in_one_table_of_twenty_at_most(
    rates: Callable[[int], Rates], tables: int
) -> None:
    found = rates(tables)
    print(f"\n{found}")
    assert found.ratios
    assert found.wrong_tables <= max(1, found.tables // 10)  # of 20 more than two come once in thirteen times


if __name__ == "__main__":
    with Path(sys.argv[1]).open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(Rates._fields)
        for rates in measured():
            writer.writerow(rates)
            out.flush()
