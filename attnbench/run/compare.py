"""Which of two variants is faster at each length, by how much, and from which length on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from attnbench.cell import Cell
from attnbench.errors import UsageError
from attnbench.measure.statistics import Crossover, Ratio, crossover, median, median_interval, paired_ratio
from attnbench.measure.time import TimingRules
from attnbench.record import Record, inferred
from attnbench.run.isolation import CellFailed, Settings, Worker
from attnbench.status import STOPPING, Status

LONGEST_ERROR = 2**31
"""Logits of exact attention in float64, some minute of it; the errors of longer inputs are not measured."""


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

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, ``same``, ``inconclusive``, or how the side that failed ended."""
        if self.ratio is not None:
            return self.ratio.verdict
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
    """Lengths at which an error was asked for that takes too long to measure."""

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
                        f"{name}_time_median_s": side.time,
                        f"{name}_time_ci_low_s": low,
                        f"{name}_time_ci_high_s": high,
                        f"{name}_peak_bytes": side.record.peak_bytes,
                        f"{name}_error_kind": side.record.error_kind,
                        f"{name}_rel_error": side.record.rel_error,
                        f"{name}_trivial_error": side.record.trivial_error,
                        f"{name}_kernel": side.record.kernel,
                    }
                rows.append(flat)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Rows, crossovers (infinite ends as null) and the environment."""
        return {
            "environment": self.environment,
            "rows": self.to_rows(),
            "crossovers": [
                {
                    "a": a,
                    "b": b,
                    "seq_len": one.n,
                    "ci_low": one.low if math.isfinite(one.low) else None,
                    "ci_high": one.high if math.isfinite(one.high) else None,
                    "note": one.note,
                }
                for (a, b), one in self.crossovers.items()
            ],
        }


def compare(
    cells: Sequence[Cell],
    lengths: Sequence[int],
    settings: Settings,
    rules: TimingRules,
    *,
    timeout: float = 120.0,
    on_length: Callable[[int], None] = lambda n: None,
    against_itself: bool = False,
) -> Comparison:
    """Measure ``cells`` (one per variant, any length) against each other at every length.

    Args:
        against_itself: ``cells`` holds the same variant twice, to see what the machine makes of it.

    Raises:
        UsageError: fewer than two different variants.
    """
    labels = [cell.variant.label for cell in cells]
    if len(set(labels)) < 2 and not against_itself:
        raise UsageError("compare needs two or more different variants")
    result = Comparison(labels)
    samples: dict[tuple[str, str], list[tuple[int, list[float], list[float]]]] = {}
    with Worker(settings) as worker:
        result.environment = {**worker.start(), "threads": settings.threads}
        noise = worker.state["noise_floor"] or 0.0
        stopped: dict[int, Record] = {}
        for n in lengths:
            on_length(n)
            here = [replace(cell, shape=replace(cell.shape, seq_len=n)) for cell in cells]
            if result.without_error or cells[0].shape.B * cells[0].shape.H * n * n > LONGEST_ERROR:
                here = [_without_error(cell) for cell in here]
            known = {i: inferred(here[i], r.seq_len, r.status) for i, r in stopped.items() if r.seq_len < n}
            sides, times, with_error = _one_length(worker, here, rules, timeout, known)
            if "error" in cells[0].measure and not with_error:
                result.without_error.append(n)
            for i, side in enumerate(sides):
                if side.record.status in STOPPING:
                    stopped.setdefault(i, side.record)
            for i, j in combinations(range(len(cells)), 2):
                pair = (labels[i], labels[j])
                both = times[i] and times[j]
                ratio = paired_ratio(times[i], times[j], noise=noise) if both else None
                result.rows.setdefault(pair, []).append(Row(n, sides[i], sides[j], ratio))
                if both:
                    samples.setdefault(pair, []).append((n, times[i], times[j]))
    for pair in result.rows:
        found = samples.get(pair, [])
        result.crossovers[pair] = crossover(
            [n for n, _, _ in found], [a for _, a, _ in found], [b for _, _, b in found], names=pair, noise=noise
        )
    return result


def _one_length(
    worker: Worker, cells: Sequence[Cell], rules: TimingRules, timeout: float, known: Mapping[int, Record]
) -> tuple[list[Side], list[list[float]], bool]:
    """Sides and paired times of all cells, and whether errors were measured.

    A cell that kills the process is left out and the others asked again; what takes too long is first asked without
    errors, whose exact answer may take longer than any variant.

    Args:
        known: how cells end that are not even tried, by position.
    """
    failed = dict(known)
    answer: dict[str, Any] = {"records": [], "ran": [], "blocks": []}
    while alive := [i for i in range(len(cells)) if i not in failed]:
        try:
            answer = worker.ask(
                {"do": "pairs", "cells": [cells[i].to_json() for i in alive], "rules": _plain(rules)}, timeout
            )
            break
        except CellFailed as failure:
            if failure.status is Status.TIMEOUT and "error" in cells[0].measure:
                cells = [_without_error(cell) for cell in cells]
            else:
                failed |= _find_culprits(worker, cells, alive, rules, timeout, failure)
    records = {i: Record.from_json(row) for i, row in zip(alive, answer["records"], strict=True)} | failed
    times: list[list[float]] = [[] for _ in cells]
    for column, position in enumerate(answer["ran"]):
        times[alive[position]] = [block[column] for block in answer["blocks"]]
    sides = [
        Side(records[i], median(times[i]) if times[i] else None, median_interval(times[i])) for i in range(len(cells))
    ]
    return sides, times, "error" in cells[0].measure


def _without_error(cell: Cell) -> Cell:
    return replace(cell, measure=tuple(what for what in cell.measure if what != "error"))


def _find_culprits(
    worker: Worker,
    cells: Sequence[Cell],
    alive: Sequence[int],
    rules: TimingRules,
    timeout: float,
    together: CellFailed,
) -> dict[int, Record]:
    """Ask for each cell alone, to name the one that died or hung.

    Where none does so alone, it is the slowest of those that took too long together, and all of them otherwise.
    """
    culprits = {}
    seconds: dict[int, float] = {}
    quick = replace(rules, quick=True)
    for i in alive:
        try:
            alone = worker.ask({"do": "pairs", "cells": [cells[i].to_json()], "rules": _plain(quick)}, timeout)
        except CellFailed as failure:
            culprits[i] = Record.of(cells[i], failure.status, failure.reason)
        else:
            seconds[i] = alone["blocks"][0][0] if alone["blocks"] else 0.0
    if culprits:
        return culprits
    if together.status is Status.TIMEOUT:
        slowest = max(seconds, key=lambda i: seconds[i])
        reason = f"the slowest of those not finished together within {timeout:.0f} s; raise --timeout"
        return {slowest: Record.of(cells[slowest], together.status, reason)}
    return {i: Record.of(cells[i], together.status, together.reason) for i in alive}


def _plain(rules: TimingRules) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in TimingRules.__slots__}
