"""What may be concluded from samples: medians with exact intervals, paired ratios, verdicts, crossovers, exponents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np

CONFIDENCE = 0.95
FEWEST = 6
"""Below this no pair of order statistics covers the median with 95 %."""
FASTER_BAND = math.log(1.01)
"""A difference counts only where the whole interval lies beyond 1 %."""
SAME_BAND = math.log(1.02)
"""Two times are called the same where the whole interval lies within 2 %."""
_NORMAL_IQR = 2 * NormalDist().inv_cdf(0.75)
_NORMAL_REACH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

Verdict = Literal["faster", "slower", "same", "inconclusive"]


def median_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Exact order-statistic interval of the median, valid for any continuous distribution; None below six samples."""
    n = len(samples)
    if n < FEWEST:
        return None
    k = _rank(n, confidence)
    ordered = sorted(samples)
    return (ordered[k], ordered[n - k - 1]) if k >= 0 else None


def interval_over_rounds(rounds: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Interval of the median of samples from several visits, between which the machine may have changed its speed.

    Samples of one visit share the machine's state of that moment, so that the exact interval of all samples knows
    nothing of a drift. It is widened to the exact interval of the visits' medians, or to their range below six visits.
    None below six samples.
    """
    inside = median_interval([sample for one in rounds for sample in one])
    middles = [median(one) for one in rounds if one]
    if inside is None:
        return None
    low, high = median_interval(middles) or (min(middles), max(middles))
    return min(inside[0], low), max(inside[1], high)


@cache
def _rank(n: int, confidence: float) -> int:
    """The largest k for which the tails beyond x_k and x_{n-1-k} together hold at most 1 - confidence; -1: none."""
    k, ways, below = -1, 1, 1  # of 2**n orders of heads and tails: those with k + 1 heads, and with at most so many
    while k < n and below / 2 ** (n - 1) <= 1 - confidence:
        k += 1
        ways = ways * (n - k) // (k + 1)
        below += ways
    return k


def expected_half_width(samples: Sequence[float]) -> float:
    """Half the width that :func:`median_interval` has on average for samples of this spread, were they normal.

    A rule to stop by: it knows nothing of where the median is, so that stopping by it favours no value.
    """
    sigma = interquartile_range(samples) / _NORMAL_IQR
    return _NORMAL_REACH * sigma * math.sqrt(math.pi / (2 * len(samples)))


def interquartile_range(samples: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for one sample."""
    low, high = np.percentile(samples, (25, 75))
    return float(high - low)


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the two in the middle."""
    return float(np.median(samples))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of A over time of B, from pairs measured next to each other."""

    estimate: float
    low: float | None
    high: float | None
    pairs: int
    noise: float = 0.0
    """By how much this machine finds one program faster than itself (:func:`noise_floor`), as a share."""

    @property
    def verdict(self) -> Verdict:
        """What may be said of A against B; ``inconclusive`` without an interval, or below the noise floor."""
        if self.low is None or self.high is None:
            return "inconclusive"
        low, high = math.log(self.low), math.log(self.high)
        band = max(FASTER_BAND, math.log1p(self.noise))
        if high < -band:
            return "faster"
        if low > band:
            return "slower"
        if low > -SAME_BAND and high < SAME_BAND:
            return "same"
        return "inconclusive"


def noise_floor(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The difference that one program timed as A and as B shows: the far end of the interval of its ratio, minus 1.

    None with fewer than six pairs. Between machines and moments it compares; no difference below it is a finding.
    """
    same = paired_ratio(a, b)
    if same.low is None or same.high is None:
        return None
    return max(same.high, 1 / same.low) - 1


def paired_ratio(a: Sequence[float], b: Sequence[float], *, noise: float = 0.0) -> Ratio:
    """Median of a_i / b_i on the log scale, with its exact interval; swapping a and b gives the reciprocal.

    Args:
        noise: the machine's noise floor, below which no verdict is given.

    Raises:
        ValueError: unequal numbers of samples, none, or a time that is not positive and finite.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"need as many samples of each, got {len(a)} and {len(b)}")
    if not all(math.isfinite(t) and t > 0 for t in (*a, *b)):
        raise ValueError("a time is not positive and finite")
    logs = [math.log(x) - math.log(y) for x, y in zip(a, b, strict=True)]
    interval = median_interval(logs)
    low, high = (None, None) if interval is None else (math.exp(interval[0]), math.exp(interval[1]))
    return Ratio(math.exp(median(logs)), low, high, len(logs), noise)


@dataclass(frozen=True, slots=True)
class Crossover:
    """The length at which A and B take the same time. Infinite ends: the interval leaves the measured range."""

    n: float | None
    """None: not in range."""
    low: float
    high: float
    note: str
    """Who is faster where."""


def crossover(
    lengths: Sequence[int],
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    *,
    names: tuple[str, str],
    noise: float = 0.0,
    draws: int = 2000,
    seed: int = 0,
) -> Crossover:
    """Where time A / time B passes through 1, by interpolation in log n, with a bootstrap interval over the pairs.

    Never extrapolates: a curve that does not cross within the lengths gives ``n=None``.

    Args:
        lengths: increasing.
        a: for each length the samples of A; ``b`` likewise, paired.
        names: what to call A and B in the note.
        noise: as of :func:`paired_ratio`; the note says where the faster one is not faster by its verdict.
    """
    logs = [np.log(np.asarray(x)) - np.log(np.asarray(y)) for x, y in zip(a, b, strict=True)]
    x = np.log(np.asarray(lengths, dtype=float))
    point = np.array([np.median(one) for one in logs])
    if len(lengths) == 0:
        return Crossover(None, math.inf, math.inf, "no length was measured for both")
    signs = np.sign(point)
    changes = int(np.count_nonzero(np.diff(signs)))
    if changes == 0:
        verdicts = [paired_ratio(x, y, noise=noise).verdict for x, y in zip(a, b, strict=True)]
        close = [str(n) for n, one in zip(lengths, verdicts, strict=True) if one not in ("faster", "slower")]
        winner = names[0 if point[0] < 0 else 1]
        found = f"{winner} is faster throughout"
        if len(close) == len(lengths):
            found = "neither is faster by more than chance"
        elif close:
            found = f"{winner} is faster, at n = {', '.join(close)} by no more than chance"
        return Crossover(None, math.inf, math.inf, f"not in range: {found}")
    rng = np.random.default_rng(seed)
    resampled = np.stack(
        [np.median(rng.choice(one, size=(draws, len(one))), axis=1) for one in logs], axis=1
    )  # (draws, lengths)
    rising = point[0] < 0  # A faster at short lengths
    crossings = np.array([_first_crossing(x, row) for row in resampled])
    # A draw that never crosses has its crossing beyond one end: which, its sign tells.
    beyond = np.isnan(crossings)
    late = (resampled[:, 0] < 0) == rising
    crossings[beyond & late] = math.inf
    crossings[beyond & ~late] = -math.inf
    low, high = np.quantile(crossings, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2), method="nearest")
    first, second = names if rising else names[::-1]
    note = f"{first} is faster below, {second} above"
    if changes > 1:
        note = f"first of {changes} crossings; {note}"
    with np.errstate(over="ignore"):
        return Crossover(float(np.exp(_first_crossing(x, point))), float(np.exp(low)), float(np.exp(high)), note)


def _first_crossing(x: np.ndarray, y: np.ndarray) -> float:
    """The x at which the polygon (x, y) first changes sign; NaN where it does not."""
    change = np.flatnonzero(np.diff(np.sign(y)))
    if len(change) == 0:
        return math.nan
    i = int(change[0])
    return float(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1]))
