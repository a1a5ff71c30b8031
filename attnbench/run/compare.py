"""Which of two variants is faster at each length, by how much, and from which length on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from attnbench.axes import ALIKE, AXES, IN_ROWS
from attnbench.cell import Cell
from attnbench.cgroup import throttled_periods
from attnbench.machine import OtherLoad, thread_warnings, throttling_warning, variables
from attnbench.measure.crossover import Crossover, crossover
from attnbench.measure.statistics import Ratio, fewest, median, median_interval, paired_ratio
from attnbench.measure.time import TimingRules
from attnbench.qkv import doubt
from attnbench.record import COLUMNS, Record, inferred
from attnbench.run.different import refuse_equal
from attnbench.run.doubt import Doubts
from attnbench.run.gate import Gate
from attnbench.run.isolation import Settings, Worker
from attnbench.run.length import Length, measure_length, without_error
from attnbench.run.process import environment_for
from attnbench.status import STOPPING, Status

LONGEST_ERROR = 2**31
"""Logits of exact attention in float64 that take about a minute; errors of longer inputs are not measured."""

_ASKED = tuple(name for name in COLUMNS if name in {"level", "pass", "device", *IN_ROWS} - {"kv_len"})
"""Columns that all rows of a comparison share, so that the table itself says what was compared."""
_TOLD = ("batch", "heads", "kv_heads", "head_dim", "v_dim", "dtype", "seed")
"""Axes that the line above a comparison always tells, or never."""


@dataclass(frozen=True, slots=True)
class Side:
    """One variant at one length. Times in seconds; None where it did not run."""

    record: Record
    time: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Row:
    """One pair at one length."""

    n: int
    a: Side
    b: Side
    ratio: Ratio | None
    """Time of A over time of B; None where one of them did not run."""
    withheld: str = ""
    """Why no verdict is given although both ran."""
    disturbed: int = 0
    """Turns in which another process took the core."""
    stopped: int = 0
    """Turns in which the measuring process stood still, which were left out."""

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same``, ``inconclusive``, ``withheld``, or how the side that failed ended."""
        if self.ratio is not None:
            return "withheld" if self.withheld else self.ratio.verdict
        failed = self.a if self.a.record.status is not Status.OK else self.b
        return f"{failed.record.label} {failed.record.status}"


@dataclass(slots=True)
class Comparison:
    """All lengths of all pairs, and the crossover length of each pair."""

    labels: list[str]
    rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    crossovers: dict[tuple[str, str], Crossover] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    without_error: list[int] = field(default_factory=list)
    """Lengths at which an error was asked for but takes too long to measure."""
    warnings: list[str] = field(default_factory=list)
    """What weakens the numbers, one line each, with the remedy."""

    @property
    def ok(self) -> bool:
        """Whether anything could be measured."""
        return any(side.time is not None for rows in self.rows.values() for row in rows for side in (row.a, row.b))

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain rows for CSV and JSON; unit in the name, None where not measured."""
        rows = []
        for (label_a, label_b), pair in self.rows.items():
            for row in pair:
                ratio = row.ratio
                flat: dict[str, Any] = {
                    "a": label_a,
                    "b": label_b,
                    "seq_len": row.n,
                    "verdict": row.verdict,
                    "ratio": ratio.estimate if ratio else None,
                    "ratio_ci_low": ratio.low if ratio else None,
                    "ratio_ci_high": ratio.high if ratio else None,
                    "pairs": ratio.pairs if ratio else 0,
                }
                for name, side in (("a", row.a), ("b", row.b)):
                    low, high = side.interval or (None, None)
                    flat |= {
                        f"{name}_status": str(side.record.status),
                        f"{name}_reason": side.record.reason,
                        f"{name}_laws": side.record.laws,
                        f"{name}_own_form": side.record.own_form,
                        f"{name}_time_median_s": side.time,
                        f"{name}_time_ci_low_s": low,
                        f"{name}_time_ci_high_s": high,
                        f"{name}_peak_bytes": side.record.peak_bytes,
                        f"{name}_error_kind": side.record.error_kind,
                        f"{name}_rel_error": side.record.rel_error,
                        f"{name}_trivial_error": side.record.trivial_error,
                        f"{name}_kernel": side.record.kernel,
                    }
                joint_low, joint_high = (ratio.joint if ratio else None) or (None, None)
                flat |= {"joint_ci_low": joint_low, "joint_ci_high": joint_high, "withheld": row.withheld}
                flat |= {"disturbed": row.disturbed, "stopped": row.stopped}
                columns = row.a.record.to_json()
                flat |= {name: columns[name] for name in _ASKED}
                rows.append(flat)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Rows, crossovers, warnings and the environment."""
        return {
            "environment": self.environment,
            "warnings": self.warnings,
            "rows": self.to_rows(),
            "crossovers": [
                {"a": a, "b": b, "seq_len": one.n, "ci_low": one.low, "ci_high": one.high, "note": one.note}
                for (a, b), one in self.crossovers.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class Contest:
    """Variants that are to be held against each other, at which lengths and how."""

    cells: Sequence[Cell]
    """One for each variant, at any length."""
    lengths: Sequence[int]
    """Increasing."""
    settings: Settings
    rules: TimingRules
    timeout: float = 120.0
    """Seconds for one length, whatever fails there, and for one law."""
    unchecked: bool = False
    """Whether variants are measured whatever laws they break."""

    def answer(self, on_length: Callable[[int], None] = lambda n: None, *, against_itself: bool = False) -> Comparison:
        """Measure.

        Args:
            on_length: called with each length before it is measured.
            against_itself: the same variant is there twice, to see what difference the machine alone makes.

        Raises:
            UsageError: one variant alone, or the same one twice.
            WorkerFailed: the measuring process could not be started.
        """
        lengths, labels = self.lengths, [cell.variant.label for cell in self.cells]
        if not against_itself:
            refuse_equal(labels, labels)
        result = Comparison(labels)
        pairs = list(combinations(range(len(labels)), 2))
        family = len(pairs) * len(lengths)
        visits = self._visit_all(fewest(family), on_length, result)
        noise = result.environment["noise_floor"]
        on_cpu, decoding = self.settings.device == "cpu", self.cells[0].pass_ == "decode"
        doubts = Doubts(lengths, visits, self.settings.threads, on_cpu=on_cpu, decoding=decoding)
        about_cores = thread_warnings(self.settings.threads) if on_cpu else []
        notes = result.environment.get("process_notes", ())
        first = self.cells[0]
        of_inputs = doubt(first.inputs, first.shape) if "error" in first.measure else ""
        notes = [*notes, of_inputs] if of_inputs else notes
        result.warnings = [*about_cores, *notes, *result.warnings, *doubts.warnings(labels)]
        for n, visit in zip(lengths, visits, strict=True):
            result.warnings += [f"n = {n}: {labels[i]}: {warning}" for i, warning in visit.unchecked]
            if visit.traces:
                said = f"n = {n}: a variant {visit.traces} while they took turns; do not trust the times"
                result.warnings.append(said)
        for i, j in pairs:
            rows = result.rows.setdefault((labels[i], labels[j]), [])
            for place, (n, visit) in enumerate(zip(lengths, visits, strict=True)):
                both = [visit.times[side] for side in (i, j) if side in visit.times]
                ratio = paired_ratio(*both, noise=noise or 0.0, family=family) if len(both) == 2 else None
                withheld = doubts.at(place, (i, j)) if ratio else ""
                disturbed, stopped = (visit.pairs.disturbed, visit.pairs.stopped) if visit.pairs else (0, 0)
                rows.append(Row(n, _side(visit, i), _side(visit, j), ratio, withheld, disturbed, stopped))
            claims = [None if row.withheld else row.ratio for row in rows]
            result.crossovers[labels[i], labels[j]] = crossover(lengths, claims, names=(labels[i], labels[j]))
        return result

    def _visit_all(self, turns: int, on_length: Callable[[int], None], result: Comparison) -> list[Length]:
        """What each length gave. The environment, warnings, and the lengths without an error go to ``result``."""
        visits = []
        ran_out: dict[int, Record] = {}
        with Worker(self.settings) as worker:
            threads = self.settings.threads
            result.environment = {
                **worker.start(),
                "threads": threads,
                "variables": variables(environment_for(threads)),
            }
            gate = Gate(self.timeout, unchecked=self.unchecked)
            verdicts = [gate.verdict(worker, cell) for cell in self.cells]
            broken = {i: one for i, one in enumerate(verdicts) if one.status is not Status.OK}
            throttled = throttled_periods()
            for n in self.lengths:
                on_length(n)
                here = [replace(cell, shape=replace(cell.shape, seq_len=n)) for cell in self.cells]
                if result.without_error or here[0].shape.B * here[0].shape.H * n * n > LONGEST_ERROR:
                    here = [without_error(cell) for cell in here]
                known = {i: inferred(here[i], r.seq_len, r.status) for i, r in ran_out.items() if r.seq_len < n}
                known |= {i: verdict.row(here[i]) for i, verdict in broken.items()}
                load = OtherLoad(worker.seconds_used)
                visit = measure_length(worker, here, self.rules, timeout=self.timeout, fewest=turns, known=known)
                if visit.pairs is None:  # no turns were taken, which would have measured it
                    visit.others = load.cores()
                if any("error" in cell.measure for cell in self.cells) and not visit.with_error:
                    result.without_error.append(n)
                for i, record in visit.records.items():
                    record.laws = verdicts[i].laws
                    if record.status in STOPPING and i not in visit.unsure and i not in broken:
                        ran_out.setdefault(i, record)
                visits.append(visit)
        held_back = throttling_warning(throttled_periods() - throttled)
        result.warnings += [held_back] if held_back else []
        return visits

    def __str__(self) -> str:
        """The circumstances that all variants share, in one line."""
        cell, shape = self.cells[0], self.cells[0].shape
        unusual = [axis for axis in ALIKE if axis not in _TOLD and not AXES[axis].unsaid(cell.at(axis))]
        form = ", ".join([f"{cell.level} {cell.pass_}", *(AXES[axis].in_words(cell.at(axis)) for axis in unusual)])
        more = {"K": shape.K} if shape.G > 1 else {}
        more |= {"E": shape.E} if shape.E != shape.D else {}
        sizes = " ".join(f"{name}={size}" for name, size in ({"B": shape.B, "H": shape.H, "D": shape.D} | more).items())
        return f"{form}, {sizes}, {cell.dtype}, {cell.inputs}, on {cell.device}"


def _side(visit: Length, i: int) -> Side:
    times = visit.times.get(i, [])
    return Side(visit.records[i], median(times) if times else None, median_interval(times))
