"""How often ``attnbench gate`` cries wolf, and what it finds: from runs of the same programs on one machine.

    for i in 1 2 3; do attnbench run quick --rounds 5 --fresh; done
    python -m tests.benchmarks.gate_alarms results/quick/*

Every run is held against every other one, in both orders. As nothing changed between them, every cell called slower is
a false alarm. Then all cells of the new run are made slower by a known factor, and in the end made to fail, to see what
is found. With ``--relative-to`` the variant that ratios are divided by stays as it was, as a user's would, and its
cells are not counted. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path

from attnbench.answers.gate.decide import Decision, GateQuestion, decide, read_runs
from attnbench.answers.gate.verdict import ENOUGH_ROUNDS, Ruling, Tolerance
from attnbench.measure.status import Status
from attnbench.results.measurements import MeasuredRun
from attnbench.results.record import Record

FACTORS = (1.05, 1.1, 1.15, 1.2, 1.3)
TIMES = ("time_median_s", "time_ci_low_s", "time_ci_high_s", "time_min_s", "time_iqr_s")
Change = Callable[[MeasuredRun], MeasuredRun]


@dataclass(frozen=True)
class Share:
    """Comparisons with a verdict, among all that were made: one for each cell of each ordered pair of runs."""

    found: int
    of: int
    worst: float
    """The largest share in one pair of runs."""
    pairs: int
    """Pairs of runs in which there is one at least."""

    @property
    def most(self) -> float:
        """Upper end of the exact one-sided 95 % interval of the share, if comparisons were independent."""
        from scipy.stats import beta

        return 1.0 if self.found == self.of else float(beta.ppf(0.95, self.found + 1, self.of - self.found))

    def __str__(self) -> str:
        return f"{self.found / self.of:.1%} ({self.found} of {self.of})"


def slowed(run: MeasuredRun, factor: float, but: str | None = None) -> MeasuredRun:
    """The run as it would be if every call took ``factor`` times as long, except those of the variant ``but``."""

    def change(row: Record) -> Record:
        if but is not None and is_of(row, but):
            return row
        times = {name: getattr(row, name) for name in TIMES}
        return replace(row, **{name: None if time is None else time * factor for name, time in times.items()})

    changed = {row.cell_id for row in run.rows.values() if but is None or not is_of(row, but)}
    samples = {
        cell_id: {
            round_: [{**one, "seconds": one["seconds"] * factor} for one in taken] for round_, taken in of.items()
        }
        if cell_id in changed
        else of
        for cell_id, of in run.samples.items()
    }
    return replace(run, rows={key: change(row) for key, row in run.rows.items()}, samples=samples)


def crashed(run: MeasuredRun) -> MeasuredRun:
    """The run as it would be if every cell that was measured had ended its process."""

    def change(row: Record) -> Record:
        return replace(row, status=Status.CRASH, reason="planted") if row.status is Status.OK else row

    return replace(run, rows={key: change(row) for key, row in run.rows.items()})


def is_of(row: Record, variant: str) -> bool:
    """Whether a row is of this variant, by name or label."""
    return variant in (row.variant, row.label)


def share(
    runs: Sequence[MeasuredRun],
    question: GateQuestion,
    measure: str,
    verdict: str,
    change: Change = lambda run: run,
) -> Share:
    """How many comparisons of all ordered pairs of runs have this verdict, the new one being changed.

    Raises:
        ValueError: the runs have no cell with this measure.
    """
    counts = [counted(decide(change(new), [old], question), measure, verdict) for old, new in permutations(runs, 2)]
    found, of = (sum(column) for column in zip(*counts, strict=True))
    if not of:
        raise ValueError(f"no two runs have a {measure} to compare")
    worst = max(found / of for found, of in counts if of)
    return Share(found, of, worst, sum(found > 0 for found, _ in counts))


def counted(decision: Decision, measure: str, verdict: str) -> tuple[int, int]:
    """Cells with this verdict, and cells that could have it."""
    asked = [one for one in decision.findings if one.measure == measure and _could(one, decision, verdict)]
    return sum(one.verdict == verdict for one in asked), len(asked)


def _could(one: Ruling, decision: Decision, verdict: str) -> bool:
    """Whether both sides were measured. What times are divided by is not judged; what had failed cannot break."""
    old, new, reference = one.pair.old, one.pair.new, decision.question.relative_to
    if old is None or new is None or (one.measure == "time" and reference is not None and is_of(new, reference)):
        return False
    return verdict != "broken" or old.status is Status.OK


def report(
    runs: Sequence[MeasuredRun], limits: Tolerance, relative_to: str | None, *, as_measured: bool = False
) -> list[str]:
    """The lines to print: what was compared, a table, and what else was called worse.

    Args:
        relative_to: the variant of the second pair of columns; None for none.
    """
    question = GateQuestion(limits=limits, as_measured=as_measured)
    ways = [question, *([replace(question, relative_to=relative_to)] if relative_to else [])]
    plain = [decide(new, [old], question) for old, new in permutations(runs, 2)]
    rounds = sorted({one.rounds or 0 for one in plain})
    cells = sorted({one.times for one in plain})
    apart = max(abs((one.common or 1.0) - 1) for one in plain)
    lines = [
        f"{len(runs)} runs of the same programs, {len(plain)} ordered pairs, {_range(cells)} timed cells each, "
        f"{_range(rounds)} rounds; as a whole the runs differ by up to {apart:.1%}.",
        "",
    ]
    if rounds[0] < ENOUGH_ROUNDS:
        lines[:0] = [f"**With fewer than {ENOUGH_ROUNDS} rounds these figures are not those of the gate.**", ""]
    head = [f"called slower at {limits.time:g}", "worst pair"]
    columns = ["every cell made", *(column for way in ways for column in _headed(head, way))]
    lines += [_line(columns), _line(["---"] * len(columns))]
    unchanged = [share(runs, way, "time", "slower") for way in ways]
    lines.append(_row("no slower (false alarms)", unchanged))
    for factor in FACTORS:
        found = [
            share(runs, way, "time", "slower", partial(slowed, factor=factor, but=way.relative_to)) for way in ways
        ]
        lines.append(_row(f"{factor:g} times as slow", found))
    lines += ["", *(_alarms(one, len(plain), way) for one, way in zip(unchanged, ways, strict=True))]
    others = [("memory", "worse", "more memory"), ("error", "worse", "more error"), ("status", "broken", "broken")]
    lines += [f"- False alarms of {said}: {one}." for one, said in _others(runs, question, others)]
    lines.append(f"- Times that nobody changed and that are unsure: {share(runs, question, 'time', 'unsure')}.")
    broken = share(runs, question, "status", "broken", crashed)
    lines.append(f"- Of cells that were made to fail, called broken: {broken}.")
    return lines


def _headed(head: Sequence[str], way: GateQuestion) -> list[str]:
    return [f"{column}, `--relative-to {way.relative_to}`" if way.relative_to else column for column in head]


def _others(
    runs: Sequence[MeasuredRun], question: GateQuestion, asked: Sequence[tuple[str, str, str]]
) -> list[tuple[Share, str]]:
    """Shares of the measures that these runs have."""
    found = []
    for measure, verdict, said in asked:
        try:
            found.append((share(runs, question, measure, verdict), said))
        except ValueError:
            continue
    return found


def _alarms(one: Share, pairs: int, way: GateQuestion) -> str:
    how = f" with `--relative-to {way.relative_to}`" if way.relative_to else ""
    bound = f"were they independent, {one.most:.2%} could not be excluded"
    return f"- False alarms{how}: {one} of comparisons ({bound}); {one.pairs} of {pairs} gates would close."


def _row(what: str, found: Sequence[Share]) -> str:
    return _line([what, *(cell for one in found for cell in (str(one), f"{one.worst:.1%}"))])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--fail-above", type=float, default=1.05)
    parser.add_argument("--relative-to", default="softmax", help="'' for the table without it")
    parser.add_argument("--as-measured", action="store_true", help="without the yardstick")
    given = parser.parse_args(arguments)
    if len(given.runs) < 2:
        parser.error("give two runs or more")
    for line in report(
        read_runs(given.runs),
        Tolerance(time=given.fail_above),
        given.relative_to or None,
        as_measured=given.as_measured,
    ):
        print(line)


if __name__ == "__main__":
    main()
