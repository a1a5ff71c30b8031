"""How often ``attnbench gate`` cries wolf, and what it finds: from runs of the same programs on one machine.

    for i in 1 2 3; do attnbench run quick --rounds 5 --fresh; done
    python -m tests.benchmarks.gate_alarms results/quick/*

Every run is held against every other one. As nothing changed between them, every cell called slower is a false alarm.
Then the new run's times are multiplied by a known factor, and each of its cells made to fail, to see what is found.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

from attnbench.decision.decide import Decision, Question, decide, read_runs
from attnbench.decision.judge import Limits
from attnbench.decision.measured import MeasuredRun
from attnbench.record import Record
from attnbench.status import Status

FACTORS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3)
TIMES = ("time_median_s", "time_ci_low_s", "time_ci_high_s", "time_min_s", "time_iqr_s")


@dataclass(frozen=True)
class Share:
    """Cells with a verdict, among all that were asked."""

    found: int
    of: int
    worst: float
    """The largest share in one pair of runs."""

    def __str__(self) -> str:
        return f"{self.found / self.of:.3f} ({self.found} of {self.of}; worst pair {self.worst:.3f})"


def slowed(run: MeasuredRun, factor: float) -> MeasuredRun:
    """The run as it would be if every call took ``factor`` times as long."""

    def change(row: Record) -> Record:
        times = {name: getattr(row, name) for name in TIMES}
        return replace(row, **{name: None if time is None else time * factor for name, time in times.items()})

    return replace(run, rows={key: change(row) for key, row in run.rows.items()})


def crashed(run: MeasuredRun) -> MeasuredRun:
    """The run as it would be if every cell that was measured had ended its process."""

    def change(row: Record) -> Record:
        return replace(row, status=Status.CRASH, reason="planted") if row.status is Status.OK else row

    return replace(run, rows={key: change(row) for key, row in run.rows.items()})


def share(
    runs: Sequence[MeasuredRun],
    question: Question,
    measure: str,
    verdict: str,
    change: Callable[[MeasuredRun], MeasuredRun] = lambda run: run,
) -> Share:
    """How many cells of all ordered pairs of runs have this verdict, the new one being changed."""
    counts = [counted(decide(change(new), [old], question), measure, verdict) for old, new in permutations(runs, 2)]
    worst = max(found / of for found, of in counts)
    return Share(sum(found for found, _ in counts), sum(of for _, of in counts), worst)


def counted(decision: Decision, measure: str, verdict: str) -> tuple[int, int]:
    """Cells with this verdict, and cells that have this measure on both sides."""
    asked = [one for one in decision.findings if one.measure == measure and one.pair.old and one.pair.new]
    if verdict == "broken":
        asked = [one for one in asked if one.pair.old and one.pair.old.status is Status.OK]
    return sum(one.verdict == verdict for one in asked), len(asked)


def report(runs: Sequence[MeasuredRun], question: Question) -> list[str]:
    """The lines to print."""
    limit = question.limits.time
    plain = [decide(new, [old], question) for old, new in permutations(runs, 2)]
    apart = max(abs((decision.common or 1.0) - 1) for decision in plain)
    closed = sum(any(one.verdict == "slower" for one in decision.failures) for decision in plain)
    lines = [
        f"{len(runs)} runs of the same programs, {len(plain)} ordered pairs, {plain[0].times} timed cells each, "
        f"{plain[0].rounds} rounds",
        f"runs as a whole differ by up to {apart:.1%}",
        f"false alarms at {limit:g}: {share(runs, question, 'time', 'slower')}; {closed} of {len(plain)} gates closed",
    ]
    for factor in FACTORS[1:]:
        found = share(runs, question, "time", "slower", lambda run, factor=factor: slowed(run, factor))  # type: ignore[misc]
        lines.append(f"found at x{factor:g}: {found}")
    lines.append(f"unsure of no change: {share(runs, question, 'time', 'unsure')}")
    lines.append(f"memory called worse: {share(runs, question, 'memory', 'worse')}")
    lines.append(f"broken found: {share(runs, question, 'status', 'broken', crashed)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--fail-above", type=float, default=1.05)
    parser.add_argument("--relative-to", default=None)
    given = parser.parse_args(arguments)
    if len(given.runs) < 2:
        parser.error("give two runs or more")
    question = Question(limits=Limits(time=given.fail_above), relative_to=given.relative_to)
    for line in report(read_runs(given.runs), question):
        print(line)


if __name__ == "__main__":
    main()
