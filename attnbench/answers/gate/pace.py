"""Times of several runs at one speed of the machine, by the yardstick that was read with every sample.

The neighbours of a core change its speed, so that two runs of the same programs may differ by a quarter. The yardstick
(:mod:`attnbench.measure.yardstick`) gives the machine's speed at each sample. Each sample becomes the time that it
would have taken at full speed.

Programs feel a slow-down unequally: one that waits for memory feels less of it than one that computes. So the slope is
fitted for each cell, from how its visits in all runs follow the yardstick, after the difference between the runs was
taken out: the slope cannot hide a regression. Its uncertainty counts if the machine was faster in one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnbench.results.key import Key
from attnbench.results.measurements import MeasuredRun, Visits
from attnbench.results.record import Record

QUICKEST = 0.02
"""Share of the quickest readings that is left out as chance; the next one is the machine's full speed."""
EXPECTED = (0.5, 0.5)
"""Prior slopes: a program that slows down as the mean of the yardstick's two pieces of work."""
WEIGHT = 0.01
"""Weight of the prior: that of visits in which the yardstick varies by a tenth in all."""
UNEQUAL = 0.3
"""Standard deviation of the slopes of programs around the slope that is expected."""

Numbers = NDArray[np.float64]
Visited = Mapping[int, Sequence[Mapping[str, Any]]]
"""Round -> the samples of that visit to a cell, as ``samples.jsonl`` holds them; some of them count."""


def at_one_speed(runs: Sequence[MeasuredRun], *, alike: bool) -> tuple[list[MeasuredRun], list[float]] | None:
    """The runs with their visits at the machine's full speed, and the median share of it that each run had.

    None if a run has times without readings: times are then compared as they are. If all runs are of one kind of
    machine (``alike``) and one torch, the quickest readings of all of them are the full speed. If not, each run has its
    own.
    """
    readings = [_readings(run) for run in runs]
    if not all(map(len, readings)):
        return None
    quickest = [np.quantile(found, QUICKEST, axis=0) for found in readings]
    if alike and len({run.environment.get("environment", {}).get("torch") for run in runs}) == 1:
        quickest = [np.min(quickest, axis=0)] * len(runs)
    slopes = _slopes(runs)
    paced = [_at(run, full, slopes) for run, full in zip(runs, quickest, strict=True)]
    ratios = [full / np.median(found, axis=0) for full, found in zip(quickest, readings, strict=True)]
    return paced, [math.sqrt(math.prod(of_both)) for of_both in ratios]


def as_measured(run: MeasuredRun) -> MeasuredRun:
    """The run with its visits as measured; a row without samples counts as one visit."""
    visits = {
        row.cell_id: _visits_of(_visits(run, row) or _whole(row)) for row in run.rows.values() if row.time_median_s
    }
    return replace(run, visits=visits)


def _whole(row: Record) -> Visited:
    return {0: [{"seconds": row.time_median_s, "calls": 1}]}


def _visits_of(taken: Visited, slower: Numbers | None = None, doubt: Numbers | None = None) -> Visits:
    from attnbench.measure.time import Sample, summarise

    seconds = {round_: summarise([[Sample(**one) for one in found]]).median for round_, found in taken.items()}
    return Visits(seconds, np.zeros(2) if slower is None else slower, np.zeros((2, 2)) if doubt is None else doubt)


def _readings(run: MeasuredRun) -> Numbers:
    """The yardstick at every sample of the run, two numbers each; empty if one sample that counts has none."""
    samples = [one for _, visits in _timed(run) for taken in visits.values() for one in taken]
    whole = all(all(one.get("yardstick") or [0]) for one in samples)
    return np.array([one["yardstick"] for one in samples] if whole else [])


def _timed(run: MeasuredRun) -> Iterator[tuple[Key, Visited]]:
    """Each timed cell with the samples of its visits, if they are not lost; cells of one label are one, as in a
    pair."""
    for key, row in run.rows.items():
        if row.time_median_s is not None and (visits := _visits(run, row)):
            yield key.but(options=row.label), visits


def _visits(run: MeasuredRun, row: Record) -> Visited:
    from attnbench.measure.time import Sample, counting

    rounds = sorted(run.samples.get(row.cell_id, {}).items())
    made = {id(one): Sample(**one) for _, taken in rounds for one in taken if "waited" in one}
    own = set(map(id, counting(list(made.values()))))

    def counts(one: Mapping[str, Any]) -> bool:
        """Tell if it does; samples of older versions do not say whether threads waited."""
        return id(made[id(one)]) in own if "waited" in one else not one.get("stopped")

    counted = {round_: [one for one in taken if counts(one)] for round_, taken in rounds}
    return {round_: taken for round_, taken in counted.items() if taken}


def _slopes(runs: Sequence[MeasuredRun]) -> dict[Key, tuple[Numbers, Numbers]]:
    """Slopes of each cell's time over the two pieces of work, on the log scale, and their covariance."""
    found: dict[Key, list[Numbers]] = {}
    for run in runs:
        for key, visits in _timed(run):
            middles = np.array([_middle(taken) for taken in visits.values()])
            found.setdefault(key, []).append(middles - middles.mean(axis=0))
    return {key: _fitted(np.concatenate(alike)) for key, alike in found.items()}


def _middle(taken: Sequence[Mapping[str, Any]]) -> Numbers:
    """Median of a visit's seconds and of its two readings, in logarithms."""
    numbers = np.log([(one["seconds"], *one["yardstick"]) for one in taken])
    return np.asarray(np.median(numbers, axis=0))


def _fitted(middles: Numbers) -> tuple[Numbers, Numbers]:
    """Least squares towards the expected slope; no slope is below zero, since nothing is faster on a slower machine."""
    from scipy.optimize import nnls  # takes a moment, which only runs with a yardstick pay

    times, readings, root = middles[:, 0], middles[:, 1:], math.sqrt(WEIGHT)
    slope = nnls(np.vstack([readings, root * np.eye(2)]), np.append(times, root * np.array(EXPECTED)))[0]
    left = times - readings @ slope
    variance = max(float(left @ left) / max(1, len(left) - 1), 1e-8)
    known = readings.T @ readings / variance + np.eye(2) / UNEQUAL**2
    return slope, np.asarray(np.linalg.inv(known), dtype=np.float64)


def _at(run: MeasuredRun, full: Numbers, slopes: Mapping[Key, tuple[Numbers, Numbers]]) -> MeasuredRun:
    visits = {}
    for key, row in run.rows.items():
        if row.time_median_s is None:
            continue
        if not (of := _visits(run, row)):
            visits[row.cell_id] = _visits_of(_whole(row))
            continue
        slope, doubt = slopes[key.but(options=row.label)]
        by = full.tolist(), slope.tolist()
        quicker = {round_: [_sample_at(one, *by) for one in taken] for round_, taken in of.items()}
        slower = np.mean([_middle(taken)[1:] for taken in of.values()], axis=0) - np.log(full)
        visits[row.cell_id] = _visits_of(quicker, slower, doubt)
    return replace(run, visits=visits)


def _sample_at(one: Mapping[str, Any], full: Sequence[float], slope: Sequence[float]) -> dict[str, Any]:
    quicker = math.prod((whole / now) ** by for whole, now, by in zip(full, one["yardstick"], slope, strict=True))
    return {**one, **{name: one[name] * float(quicker) for name in ("seconds", "waited") if name in one}}
