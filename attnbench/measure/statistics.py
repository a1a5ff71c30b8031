"""What may be concluded from samples: medians with exact intervals, paired ratios, verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

CONFIDENCE = 0.95
FEWEST = 6
"""With fewer samples than this no pair of order statistics covers the median with 95 %."""
FEWEST_VISITS = 3
"""With fewer visits than this to each of two programs, the spread of their medians allows no conclusion."""
FASTER_BAND = math.log(1.01)
"""A difference counts only where the whole interval lies beyond 1 %."""
SAME_BAND = math.log(1.02)
"""Two times are called the same where the whole interval lies within 2 %."""
LOOKS = (FEWEST_VISITS, 6, 9)
"""How many processes measure a ratio: three, and three more each time they leave it undecided."""
LEAST_SPREAD = 0.005
"""By chance three processes may agree better than processes do: their spread counts as half a percent at least."""
BUSY_MACHINE = "busy machine"
SAID = {
    "withheld": "no verdict and no ratio, for the reason given; both times stand as they were measured",
    BUSY_MACHINE: "other programs had the cores, but the difference is larger than the noise of the machine",
    "inconclusive": "the interval allows a difference in either direction, or one below the noise of the machine",
    "same": "the whole interval lies within 2 %",
}
"""What the words of a verdict mean that do not say it themselves."""
_NORMAL_IQR = 2 * NormalDist().inv_cdf(0.75)
_NORMAL_REACH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

Verdict = Literal["faster", "slower", "same", "inconclusive"]


class Said(NamedTuple):
    """What is said of a ratio of two times."""

    word: Verdict | Literal["withheld"]
    why: str = ""
    """Why it is withheld; of a verdict that is given although others had the cores, :data:`BUSY_MACHINE`."""


def judged(interval: tuple[float, float] | None, noise: float = 0.0, *, busy: str = "", doubt: str = "") -> Said:
    """The one rule by which a verdict on a ratio is given, given with a mark, or withheld with the reason.

    Args:
        interval: ends of the interval of time A over time B; None if there is none.
        noise: the machine's noise floor, as a share; a difference within it is none.
        busy: how much other programs disturbed the samples, in words; empty if they did not. A difference beyond the
            noise floor is given all the same, and marked.
        doubt: another reason against the times, which no interval outweighs.
    """
    if doubt or interval is None:
        return Said("withheld", doubt or f"a verdict needs {FEWEST_VISITS} processes")
    low, high = map(math.log, interval)
    band = max(FASTER_BAND, math.log1p(noise))
    if high < -band or low > band:
        return Said("faster" if high < 0 else "slower", BUSY_MACHINE * bool(busy))
    if busy:
        return Said("withheld", f"the machine was busy ({busy})")
    return Said("same" if low > -SAME_BAND and high < SAME_BAND else "inconclusive")


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

    Samples of one visit share the machine's state of that moment, so the exact interval of all samples does not show a
    drift. It is widened to the exact interval of the visits' medians, or to their range if there are fewer than six
    visits. None for fewer than six samples.
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
    k, ways, below = -1, 1, 1  # of 2**n orders of heads and tails: those with k + 1 heads, and with at most that many
    while k < n and below / 2 ** (n - 1) <= 1 - confidence:
        k += 1
        ways = ways * (n - k) // (k + 1)
        below += ways
    return k


def expected_half_width(samples: Sequence[float]) -> float:
    """Half the width that :func:`median_interval` would have on average for normal samples of this spread.

    It is a rule to stop by. It does not depend on where the median is, so stopping by it favours no value.
    """
    sigma = interquartile_range(samples) / _NORMAL_IQR
    return _NORMAL_REACH * sigma * math.sqrt(math.pi / (2 * len(samples)))


def interquartile_range(samples: Sequence[float]) -> float:
    """Distance between the quartiles; 0 for one sample."""
    low, high = np.percentile(samples, (25, 75))
    return float(high - low)


def median(samples: Sequence[float]) -> float:
    """The middle sample, or the mean of the two in the middle; NaN where one is NaN, or where there is none."""
    if not len(samples) or math.isnan(sum(samples)):
        return float(np.median(samples))
    ordered, half = sorted(samples), len(samples) // 2  # numpy takes ten times as long for some hundred samples
    return float(ordered[half] if len(samples) % 2 else (ordered[half - 1] + ordered[half]) / 2)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of A over time of B, from pairs measured next to each other in several processes."""

    estimate: float
    low: float | None
    high: float | None
    """Ends of the 95 % interval of this ratio; None below three processes."""
    pairs: int
    joint: tuple[float, float] | None
    """Ends of the interval that holds with 95 % together with those of all other ratios of the table at each look."""
    noise: float = 0.0
    """How much faster than itself this machine finds one program (:func:`noise_floor`), as a share."""
    processes: int = 0

    @property
    def verdict(self) -> Verdict:
        """What may be said of A against B on a quiet machine, by the joint interval; none is ``inconclusive``."""
        word = judged(self.joint, self.noise).word
        return "inconclusive" if word == "withheld" else word

    @property
    def undecided(self) -> bool:
        """Whether more processes may decide it: there are too few, or the estimate alone would be a verdict."""
        alone = judged((self.estimate, self.estimate), self.noise).word
        return self.verdict == "inconclusive" and (self.joint is None or alone != "inconclusive")


def ratio_over_visits(new: Sequence[float], old: Sequence[float], doubt: float = 0.0) -> tuple[float, float, float]:
    """Ratio of two times that were measured in visits of their own, and the ends of its 95 % interval.

    Times of visits vary by about the same factor both ways, so that their logarithms are compared, by Welch's unequal
    variances t-test (Welch 1947). It is meant for times at one speed of the machine: those as measured drift together.

    Args:
        new: median of each visit, above 0; at least :data:`FEWEST_VISITS` of them.
        old: the same of what it is compared with.
        doubt: a variance to be added to that of the logarithm of the ratio.

    Raises:
        ValueError: too few visits.
    """
    from scipy.special import stdtrit  # takes a moment, which only gates pay

    if min(len(new), len(old)) < FEWEST_VISITS:
        raise ValueError(f"need {FEWEST_VISITS} visits of each, got {len(new)} and {len(old)}")
    a, b = np.log(new), np.log(old)
    parts = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    variance, middle = float(sum(parts)), float(a.mean() - b.mean())
    freedom = variance**2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1)) if variance else math.inf
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance + doubt)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def noise_floor(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The difference that one program shows if it is timed as A and as B: the far end of its ratio's interval, minus 1.

    The interval is the exact one of the median, within one process; None for fewer than six pairs. It can be compared
    between machines and moments. A smaller difference is no finding.

    Raises:
        ValueError: unequal numbers of samples, none, or a time that is not positive and finite.
    """
    interval = median_interval(_logs(a, b))
    return None if interval is None else math.exp(max(interval[1], -interval[0])) - 1


def paired_ratio(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], *, noise: float = 0.0, family: int = 1
) -> Ratio:
    """Ratio of A to B over processes; swapping a and b gives the reciprocal.

    A process favours one side for as long as it lives, whatever its samples are, and they may depend on each other. So
    each process counts once, by the median of log(a_i / b_i). The interval of their mean is Student's t.

    Args:
        a: seconds by process; the i-th of a process was measured beside the i-th of B in it.
        b: the same of B.
        noise: the machine's noise floor, below which no verdict is given.
        family: how many ratios stand in one table. A table of 24 ratios, each with its own 95 % interval, would claim a
            difference between identical programs about once. The joint intervals share the 5 % among the ratios and
            :data:`LOOKS` (Bonferroni), so that processes may be added to whatever is undecided.

    Raises:
        ValueError: unequal numbers of samples, none, or a time that is not positive and finite.
    """
    middles = [median(_logs(one, other)) for one, other in zip(a, b, strict=True)]
    if not middles:
        raise ValueError("no process")
    middle = math.fsum(middles) / len(middles)

    def ends(missed: float) -> tuple[float, float] | None:
        if len(middles) < FEWEST_VISITS:
            return None
        from scipy.special import stdtrit  # takes a moment, which only a verdict pays

        spread = max(LEAST_SPREAD, float(np.std(middles, ddof=1)))
        half = float(stdtrit(len(middles) - 1, 1 - missed / 2)) * spread / math.sqrt(len(middles))
        return math.exp(middle - half), math.exp(middle + half)

    low, high = ends(1 - CONFIDENCE) or (None, None)
    joint = ends((1 - CONFIDENCE) / family / len(LOOKS))
    return Ratio(math.exp(middle), low, high, sum(map(len, a)), joint, noise, len(middles))


def _logs(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Logarithms of a_i / b_i."""
    if len(a) != len(b) or not a:
        raise ValueError(f"need as many samples of each, got {len(a)} and {len(b)}")
    if not all(math.isfinite(t) and t > 0 for t in (*a, *b)):
        raise ValueError("a time is not positive and finite")
    return [math.log(x) - math.log(y) for x, y in zip(a, b, strict=True)]
