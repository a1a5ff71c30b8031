"""The faster of two variants at each length, its lead, and the length from which it leads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations, zip_longest
from typing import Any

from attnbench.contract.inputs import doubt
from attnbench.harness.compare.length import Length, measure_again, measure_length, without_error
from attnbench.harness.inside.execute import add_parts, hold_to_limits
from attnbench.harness.inside.launch import host_share
from attnbench.harness.outside.interpreter import Interpreter
from attnbench.harness.outside.isolation import Settings, Worker, WorkerFailed
from attnbench.harness.outside.visit import Gate
from attnbench.harness.wire.process import Products, environment_for
from attnbench.measure.cgroup import throttled_periods
from attnbench.measure.crossover import Crossover, crossover
from attnbench.measure.limits import Limits
from attnbench.measure.machine import OtherLoad, thread_warnings, throttling_warning, variables, versions
from attnbench.measure.statistics import (
    LOOKS,
    SAME_BAND,
    Ratio,
    Said,
    interval_over_rounds,
    judged,
    median,
    median_interval,
    paired_ratio,
)
from attnbench.measure.status import STOPPING, Status
from attnbench.measure.time import TimingRules
from attnbench.results.frame.marks import by_host
from attnbench.results.record import COLUMNS, Record, inferred
from attnbench.suite.axes import ALIKE, AXES, IN_ROWS
from attnbench.suite.cell import Cell
from attnbench.text import quantity
from attnbench.units import format_seconds

LONGEST_ERROR = 2**31
"""Logits of exact attention in float64 that take about a minute; errors of longer inputs are not measured."""

BUSY = 0.25
"""Share of the needed cores that other programs may take."""
FALL = 0.8
"""Less than this share of the time for twice the length is impossible."""

_ASKED = tuple(name for name in COLUMNS if name in {"level", "pass", "device", *IN_ROWS} - {"kv_len"})
RATES = ("flops_per_s", "bytes_per_s", "peak_fraction")
"""Columns that are held to the machine's measured rates: on a GPU, and if they were asked for."""
_TOLD = ("batch", "heads", "kv_heads", "head_dim", "v_dim", "dtype", "seed")
_OF_SIDE = (
    *("status", "reason", "laws", "own_form", "time_median_s", "time_ci_low_s", "time_ci_high_s", "peak_bytes"),
    *("error_kind", "rel_error", "trivial_error", "own_error", "own_error_late", "own_error_grad"),
    *("own_error_note", "kernel", "launched", "launch_note", "device_s", "kernels", "first_token_s", "token_s"),
    *("rollback_s", "state_bytes"),
)
"""Columns of each variant in a row, in order."""


@dataclass(frozen=True, slots=True)
class Side:
    """One variant at one length. Times in seconds; None if it did not run."""

    record: Record
    time: float | None
    interval: tuple[float, float] | None

    @property
    def host_share(self) -> float | None:
        """As the column of that name, of the time in turns."""
        return host_share(self.record.device_s, self.time)

    @property
    def by_host(self) -> str:
        """The host's share of its time, in words, if that is most of it; else empty."""
        return by_host(self.record.label, self.record.launched, self.host_share)


@dataclass(frozen=True, slots=True)
class CompareRow:
    """One pair at one length."""

    n: int
    a: Side
    b: Side
    ratio: Ratio | None
    """Time of A over time of B; None if one of them did not run."""
    said: Said = Said("withheld")
    disturbed: int = 0
    stopped: int = 0
    """Turns that were left out because the measuring process stood still."""
    processes: int = 0
    """Number of processes in which both took turns."""

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same``, ``inconclusive``, ``withheld``, a failed side's status, or empty for one
        variant."""
        if self.ratio is not None:
            return self.said.word
        failed = next((one.record for one in (self.a, self.b) if one.record.status is not Status.OK), None)
        return "" if failed is None else f"{failed.label} {failed.status}"

    @property
    def withheld(self) -> str:
        """The reason against a verdict although both ran."""
        return self.said.why if self.ratio is not None and self.said.word == "withheld" else ""

    @property
    def busy(self) -> str:
        """The mark of a verdict from a busy machine; empty for none."""
        return "" if self.said.word == "withheld" else self.said.why

    @property
    def word(self) -> str:
        """The verdict with its marks."""
        said = [self.verdict + f" ({self.busy})" * bool(self.busy), *(self.by_host if self.shown else ())]
        return "; ".join(said)

    @property
    def by_host(self) -> list[str]:
        """The sides with mostly host time, and its share."""
        return [side.by_host for side in (self.a, self.b) if side.by_host]

    @property
    def shown(self) -> Ratio | None:
        """The ratio, unless it is withheld."""
        return None if self.said.word == "withheld" else self.ratio


@dataclass(slots=True)
class Comparison:
    """All lengths of all pairs, and the crossover length of each pair. One variant alone is a pair with itself."""

    labels: list[str]
    rows: dict[tuple[str, str], list[CompareRow]] = field(default_factory=dict)
    crossovers: dict[tuple[str, str], Crossover] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    without_error: list[int] = field(default_factory=list)
    """Lengths at which an error was asked for but takes too long."""
    warnings: list[str] = field(default_factory=list)

    family: int = 1
    rated: bool = False
    sides: dict[str, dict[str, str | None]] = field(default_factory=dict)
    """Label -> versions of its environment: torch, python, numpy, attnbench."""

    def ratio(self, visit: Length, i: int, j: int) -> Ratio | None:
        """Time of one variant over another's, by position; None if they never took turns."""
        a, b = visit.of_both(i, j)
        noise = self.environment["noise_floor"] or 0.0
        return paired_ratio(a, b, noise=noise, family=self.family) if a else None

    def undecided(self, visit: Length) -> set[int]:
        """Variants of all ratios at one length that more processes may decide; one alone gets three."""
        if len(self.labels) == 1:
            return {0} if 0 < len(visit.times) < LOOKS[0] else set()
        pairs = combinations(range(len(self.labels)), 2)
        found = {pair: ratio for pair in pairs if (ratio := self.ratio(visit, *pair))}
        return {i for pair, ratio in found.items() if ratio.undecided for i in pair}

    @property
    def processes(self) -> list[int]:
        """The numbers of processes behind the rows, in order."""
        return sorted({row.processes for rows in self.rows.values() for row in rows if row.processes})

    @property
    def ok(self) -> bool:
        """True if anything could be measured."""
        return any(side.time is not None for rows in self.rows.values() for row in rows for side in (row.a, row.b))

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain rows for CSV and JSON; unit in the name, None if not measured."""
        rows = []
        for (label_a, label_b), pair in self.rows.items():
            for row in pair:
                ratio = row.shown
                flat: dict[str, Any] = {
                    "a": label_a,
                    "b": None if row.b is row.a else label_b,
                    "seq_len": row.n,
                    "verdict": row.verdict,
                    "ratio": ratio.estimate if ratio else None,
                    "ratio_ci_low": ratio.low if ratio else None,
                    "ratio_ci_high": ratio.high if ratio else None,
                    "pairs": ratio.pairs if ratio else 0,
                }
                for name, label, side in (("a", label_a, row.a), ("b", label_b, row.b)):
                    low, high = side.interval or (None, None)
                    timed = {"time_median_s": side.time, "time_ci_low_s": low, "time_ci_high_s": high}
                    every = {one: timed[one] if one in timed else getattr(side.record, one) for one in _OF_SIDE}
                    every |= {"status": str(side.record.status), "host_share": side.host_share}
                    flat |= {f"{name}_{one}": value for one, value in every.items()}
                    if self.rated:
                        flat |= {f"{name}_{one}": getattr(side.record, one) for one in RATES}
                    flat |= {f"{name}_{one}": version for one, version in self.sides.get(label, {}).items()}
                joint_low, joint_high = (ratio.joint if ratio else None) or (None, None)
                flat |= {"joint_ci_low": joint_low, "joint_ci_high": joint_high, "withheld": row.withheld}
                flat |= {"disturbed": row.disturbed, "stopped": row.stopped, "busy": row.busy}
                flat |= {"processes": row.processes}
                if row.b is row.a:
                    flat |= dict.fromkeys(name for name in flat if name.startswith("b_"))
                columns = row.a.record.to_json()
                flat |= {name: columns[name] for name in _ASKED}
                rows.append(flat)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Rows, crossovers, warnings, the environment, and the number of ratios whose verdicts hold together."""
        machine = {"machine" if name == "environment" else name: fact for name, fact in self.environment.items()}
        return {
            "environment": machine,
            "warnings": self.warnings,
            "comparisons": self.family,
            "rows": self.to_rows(),
            "crossovers": [
                {"a": a, "b": b, "seq_len": one.n, "ci_low": one.low, "ci_high": one.high, "note": one.note}
                for (a, b), one in self.crossovers.items()
            ],
        }


OnLength = Callable[[int, int, Mapping[str, float | str]], object]
Workers = Sequence[Worker]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with the measurements so far."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison


@dataclass(frozen=True, slots=True)
class Contest:
    """Variants to compare, with their lengths and rules."""

    cells: Sequence[Cell]
    lengths: Sequence[int]
    settings: Settings
    rules: TimingRules
    timeout: float = 120.0
    """Seconds for one length, whatever fails there, and for one law."""
    unchecked: bool = False
    family: int | None = None
    """Number of ratios whose verdicts hold together; None for those of this contest."""
    known: Sequence[Record] = ()
    """Rows of settings that were held to their laws before."""
    pythons: Sequence[Interpreter | None] = ()
    """The environment of each cell, None for this one; empty if no cell names one. Cells of one share a process."""

    @property
    def labels(self) -> list[str]:
        """The variants, with the environments after them: ``softmax@.venv-old``."""
        return [f"{cell.variant}{python or ''}" for cell, python in zip_longest(self.cells, self.pythons)]

    def answer(self, on_length: OnLength = lambda n, process, found: None) -> Comparison:
        """Measure; raise WorkerFailed if a worker could not be started before any length was finished, and Stopped,
        with the finished lengths, at Ctrl-C.

        ``on_length``: called before each length with the number of processes so far; after the first process also with
        the median seconds, or the status, of each label.
        """
        labels, pythons = self.labels, self.pythons or [None] * len(self.cells)
        result = Comparison(labels, family=self.family or self.ratios, rated=self.settings.rates)
        visits, throttled = list[Length](), throttled_periods()
        ended: KeyboardInterrupt | WorkerFailed | None = None
        try:
            with ExitStack() as ours:
                of = {one: ours.enter_context(Worker(self.settings, one)) for one in dict.fromkeys(pythons)}
                workers = [of[one] for one in pythons]
                self._visit_all(workers, visits, on_length, result)
                self._visit_again(workers, visits, on_length, result)
        except (KeyboardInterrupt, WorkerFailed) as end:
            if not visits:
                raise
            ended = end
        if "card" in workers[0].state:
            result.environment["card"] = workers[0].state["card"]
        held_back = throttling_warning(throttled_periods() - throttled)
        result.warnings += [held_back] if held_back else []
        if isinstance(ended, WorkerFailed):
            missing = "".join(f"; n = {n} is missing" for n in self.lengths[len(visits) :])
            result.warnings.append(f"{ended}; what earlier processes measured stands{missing}")
        self._conclude(visits, result)
        if isinstance(ended, KeyboardInterrupt):
            raise Stopped(result) from ended
        return result

    def _conclude(self, visits: Sequence[Length], result: Comparison) -> None:
        lengths, labels, first = self.lengths[: len(visits)], result.labels, self.cells[0]
        on_cpu, threads = self.settings.device == "cpu", self.settings.threads
        loads = [busy(visit, threads, os.cpu_count() or 1) if on_cpu else "" for visit in visits]
        # A decoding step may take the same time at every length, so that a quicker core alone can make it fall.
        falls = {} if first.pass_ == "decode" else _falls(lengths, visits)
        about_cores = thread_warnings(threads) if on_cpu else []
        notes = result.environment.get("process_notes", ())
        if "error" in first.measure:
            reads = {read.name: read for one in self.cells for read in one.entry.claims(one.variant).reads}
            notes = [*notes, *filter(None, [doubt(first.inputs, first.shape, [*reads.values()])])]
        result.warnings = [*about_cores, *notes, *result.warnings, *self._doubts(visits, loads, falls)]
        for n, visit in zip(lengths, visits, strict=True):
            for i, record in visit.records.items():
                record.label = labels[i]
            result.warnings += [f"n = {n}: {labels[i]}: {warning}" for i, warning in visit.unchecked]
            for i, record in visit.lost:
                result.warnings.append(f"n = {n}: {labels[i]}: {record.status} in a later process: {record.reason}")
            slow = dict.fromkeys(pairs.slowed for pairs in visit.pairs if pairs.slowed)
            result.warnings += [f"n = {n}: {said}" for said in slow]
            if visit.traces:
                said = f"n = {n}: a variant {visit.traces} while they took turns; do not trust the times"
                result.warnings.append(said)
        for i, j in list(combinations(range(len(labels)), 2)) or [(0, 0)]:
            rows = result.rows.setdefault((labels[i], labels[j]), [])
            for place, (n, visit) in enumerate(zip(lengths, visits, strict=True)):
                of_a, of_b = visit.of_both(i, j)
                ratio = None if i == j else result.ratio(visit, i, j)
                both = ((i, of_a), (j, of_b))
                machine = result.environment if result.rated else {}
                a, b = (_side(visit, one, times if ratio else None, machine) for one, times in both)
                b, verdict = a if i == j else b, Said("withheld")
                if ratio and a.time and b.time:
                    against = falls.get((place, i)) or falls.get((place, j)) or contradicted(ratio, a.time, b.time)
                    verdict = judged(ratio.joint, ratio.noise, busy=loads[place], doubt=against)
                disturbed, stopped = (sum(getattr(p, name) for p in visit.pairs) for name in ("disturbed", "stopped"))
                rows.append(CompareRow(n, a, b, ratio, verdict, disturbed, stopped, len(of_a)))
            if i != j:
                claims = [row.shown for row in rows]
                found = crossover(lengths, claims, names=(labels[i], labels[j]))
                shares = [one for side in ("a", "b") if (one := _most_by_host([getattr(row, side) for row in rows]))]
                result.crossovers[labels[i], labels[j]] = replace(found, note="; ".join([found.note, *shares]))

    def _doubts(
        self, visits: Sequence[Length], loads: Sequence[str], falls: Mapping[tuple[int, int], str]
    ) -> list[str]:
        """One line for each kind of doubt about the times, with the remedy."""
        said = []
        if how := next(filter(None, loads), ""):
            remedy = "try --threads 1" if self.settings.threads > 1 else "close other programs"
            said.append(f"the machine is busy ({how}); times may be wrong by a factor; {remedy}")
        if stopped := sum(pairs.stopped for visit in visits for pairs in visit.pairs):
            said.append(f"{quantity(stopped, 'turn')} left out: the measuring process was stopped meanwhile")
        for variant, text in dict.fromkeys((variant, text) for (_, variant), text in falls.items()):
            said.append(f"{self.labels[variant]} took {text}: impossible; run it again on a quiet machine")
        return said

    def _started(self, workers: Workers, result: Comparison) -> None:
        """Start the processes, all with the libraries of the first one."""
        first, *others = dict.fromkeys(workers)
        threads = self.settings.threads
        facts: dict[str, Any] = {**first.start(), "threads": threads, "variables": variables(environment_for(threads))}
        for worker in others:
            worker.settings = replace(self.settings, products=Products.of(facts))
            facts["noise_floor"] = max(facts["noise_floor"] or 0.0, worker.start()["noise_floor"] or 0.0)
            facts["process_notes"] = [*dict.fromkeys((*facts["process_notes"], *worker.state["process_notes"]))]
        result.environment = facts
        for label, worker in zip(result.labels, workers, strict=True):
            told = versions(worker.state)
            result.sides[label] = {name: told.get(name) for name in ("torch", "python", "numpy", "attnbench")}

    def _visit_all(self, workers: Workers, visits: list[Length], on_length: OnLength, result: Comparison) -> None:
        ran_out: dict[int, Record] = {}
        self._started(workers, result)
        gates = {worker: Gate(self.timeout, unchecked=self.unchecked) for worker in workers}
        for gate in gates.values():
            gate.learn(self.known)
        verdicts = [gates[worker].verdict(worker, cell) for worker, cell in zip(workers, self.cells, strict=True)]
        broken = {i: one for i, one in enumerate(verdicts) if one.status is not Status.OK}
        for n in self.lengths:
            on_length(n, 0, {})
            here = self._at(n)
            if result.without_error or here[0].shape.B * here[0].shape.H * n * n > LONGEST_ERROR:
                here = [without_error(cell) for cell in here]
            known = {i: inferred(here[i], r.seq_len, r.status) for i, r in ran_out.items() if r.seq_len < n}
            known |= {i: verdict.row(here[i]) for i, verdict in broken.items()}
            load = OtherLoad(lambda: sum(worker.seconds_used() for worker in gates))
            visit = measure_length(
                workers, here, self._share, timeout=self.timeout, known=known, unchecked=self.unchecked
            )
            if not visit.pairs:  # no turns were taken, which would have measured it
                visit.others = load.cores()
            if any("error" in cell.measure for cell in self.cells) and not visit.with_error:
                result.without_error.append(n)
            for i, record in visit.records.items():
                record.laws = verdicts[i].laws
                if record.status in STOPPING and i not in visit.unsure and i not in broken:
                    ran_out.setdefault(i, record)
            visits.append(visit)
            sides = {result.labels[i]: _side(visit, i, None) for i in visit.records}
            on_length(n, 0, {label: one.time or str(one.record.status) for label, one in sides.items()})

    def _visit_again(self, workers: Workers, visits: list[Length], on_length: OnLength, result: Comparison) -> None:
        """Repeat undecided ratios in fresh processes, until they are decided or nine have run."""
        process = 1
        for look in LOOKS:
            wanting = [(n, visit, result.undecided(visit)) for n, visit in zip(self.lengths, visits, strict=True)]
            wanting = [(n, visit, which) for n, visit, which in wanting if which]
            while wanting and process < look:
                for worker in dict.fromkeys(workers):
                    worker.stop()
                for n, visit, which in wanting:
                    left = which - {i for i, record in visit.lost if record.status in STOPPING}
                    if len(left) < min(2, len(self.cells)):
                        continue
                    on_length(n, process, {})
                    measure_again(workers, self._at(n), self._share, visit, left, timeout=self.timeout, process=process)
                process += 1

    @property
    def _share(self) -> TimingRules:
        rules, first = self.rules, LOOKS[0]
        return replace(
            rules,
            min_time=rules.min_time / first,
            max_time=rules.max_time / first,
            min_samples=-(-rules.min_samples // first),
            max_samples=-(-rules.max_samples // first),
            width=rules.width * math.sqrt(first),
        )

    def _at(self, n: int) -> list[Cell]:
        return [replace(cell, shape=replace(cell.shape, seq_len=n)) for cell in self.cells]

    @property
    def ratios(self) -> int:
        """The number of pairs at all lengths."""
        return math.comb(len(self.cells), 2) * len(self.lengths)

    @property
    def about(self) -> str:
        """Level, pass, unusual axes, sizes and data type."""
        cell, shape = self.cells[0], self.cells[0].shape
        unusual = [axis for axis in ALIKE if axis not in _TOLD and not AXES[axis].unsaid(cell.at(axis))]
        form = ", ".join([f"{cell.level} {cell.pass_}", *(AXES[axis].in_words(cell.at(axis)) for axis in unusual)])
        more = {"K": shape.K} if shape.G > 1 else {}
        more |= {"E": shape.E} if shape.E != shape.D else {}
        sizes = " ".join(f"{name}={size}" for name, size in ({"B": shape.B, "H": shape.H, "D": shape.D} | more).items())
        return f"{form}, {sizes}, {cell.dtype}"

    def __str__(self) -> str:
        return f"{self.about}, {self.cells[0].inputs}, on {self.cells[0].device}"


def _most_by_host(sides: Sequence[Side]) -> str:
    sides = [side for side in sides if side.by_host]
    most = max(sides, key=lambda side: side.host_share or 0.0, default=None)
    return "" if most is None else f"{most.by_host} at n = {most.record.seq_len}"


def _side(
    visit: Length, i: int, times: Sequence[Sequence[float]] | None, machine: Mapping[str, Any] | None = None
) -> Side:
    """One side, from its ``times`` in the pairs by process, or from all of its own; ``machine`` has the rates."""
    if times is None:
        times = [one[i] for one in visit.times if i in one]
    every, record = [second for one in times for second in one], visit.records[i]
    time = median(every) if every else None
    timed = replace(record, time_median_s=time)
    if shares := visit.prompts.get(i):
        add_parts(timed, sum(shares) / len(shares))
    if machine and "copy_rates" in machine:
        matmul, exp = (machine[name].get(record.dtype) for name in ("matmul_rate", "exp_rate"))
        hold_to_limits(timed, Limits(matmul, exp, machine["copy_rates"]))
    return Side(replace(timed, time_median_s=None), time, interval_over_rounds(times))


def busy(visit: Length, threads: int, cores: int) -> str:
    """The reason why the machine was too busy to compare; empty if it was not.

    ``threads`` are the worker's; ``cores`` are the whole machine's, on which the load of other programs is counted.
    """
    others = [pairs.others for pairs in visit.pairs if pairs.others is not None] or [visit.others or 0.0]
    needed, load = min(threads, cores), median(others)
    if needed + load - cores > BUSY * needed:
        return f"{load:.1f} of {cores} cores"
    disturbed, taken = (sum(getattr(pairs, name) for pairs in visit.pairs) for name in ("disturbed", "taken"))
    return f"{disturbed} of {taken} turns disturbed" if 2 * disturbed > taken else ""


def contradicted(ratio: Ratio, a: float, b: float) -> str:
    """The contradiction between a ratio and two medians, in seconds; empty without one."""
    if ratio.joint is None:
        return ""
    low, high = ratio.joint
    beyond = abs(math.log(a / b) - math.log(min(max(a / b, low), high))) > SAME_BAND
    if beyond or {"faster": a >= b, "slower": a <= b}.get(ratio.verdict, False):
        return f"its medians have a ratio of {a / b:.3g}, its pairs one of {ratio.estimate:.3g}"
    return ""


def _falls(lengths: Sequence[int], visits: Sequence[Length]) -> dict[tuple[int, int], str]:
    """A text for both lengths if a variant's time falls although the length doubles: either may be wrong."""
    found = {}
    for variant in {one for visit in visits for one in visit.records}:
        times = [[t for one in visit.times for t in one.get(variant, [])] for visit in visits]
        intervals = [median_interval(one) for one in times]
        for longer, after in enumerate(intervals):
            halves = (i for i in range(longer) if 2 * lengths[i] <= lengths[longer] and intervals[i])
            shorter = max(halves, key=lambda i: lengths[i], default=None)
            before = None if shorter is None else intervals[shorter]
            if shorter is not None and before and after and after[1] < FALL * before[0]:
                fell = (f"{format_seconds(median(times[i]))} at n = {lengths[i]}" for i in (shorter, longer))
                text = " but ".join(fell)
                found[shorter, variant] = found[longer, variant] = text
    return found
