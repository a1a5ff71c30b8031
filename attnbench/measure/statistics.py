"""Conclusions from samples: medians with exact intervals, paired ratios, verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
FEWEST = 6
"""With fewer samples than this no pair of order statistics covers the median with 95 %."""
FEWEST_VISITS = 3
"""With fewer visits than this to each of two programs, the spread of their medians allows no conclusion."""
MODES = 0.3
"""Difference of the modes in which a machine may run: two visits in one mode look exact."""
BETWEEN_RUNS = 0.02
"""Difference of two runs of one program, unless older runs show it."""
_KNOWN_BETWEEN = 8
"""Fewest differences between older runs that estimate it."""
_FARTHEST = 600.0
"""Largest logarithm of a ratio that is worth telling from infinity."""
FASTER_BAND = math.log(1.01)
"""A difference counts only if the whole interval lies beyond 1 %."""
SAME_BAND = math.log(1.02)
"""Two times are called the same if the whole interval lies within 2 %."""
LOOKS = (FEWEST_VISITS, 6, 9)
"""Processes for a ratio: three, and three more each time they leave it undecided."""
LEAST_SPREAD = 0.005
"""Least spread of processes, half a percent: by chance three may agree better than processes do."""
BUSY_MACHINE = "busy machine"
SAID = {
    "withheld": "no verdict and no ratio, for the reason given; both times stand as they were measured",
    BUSY_MACHINE: "other programs had the cores, but the difference is larger than the noise of the machine",
    "inconclusive": "the interval that holds for all ratios together, wider than one ratio's own, allows a difference "
    "in either direction, or one below the noise of the machine",
    "same": "the whole interval that holds for all ratios together lies within 2 %",
}
"""Meanings of verdict words that do not say it themselves."""
OF_MEDIAN = 1.25
"""Spread of a median of normal numbers over that of their mean."""
_NORMAL_IQR = 2 * NormalDist().inv_cdf(0.75)
_NORMAL_REACH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)

Numbers = NDArray[np.float64]
Ends = tuple[float, float, int]
"""Both ends of a row's 95 % interval in seconds, and its number of visits."""
Verdict = Literal["faster", "slower", "same", "inconclusive"]


class Said(NamedTuple):
    """The statement on a ratio of two times."""

    word: Verdict | Literal["withheld"]
    why: str = ""
    """The reason to withhold it, or :data:`BUSY_MACHINE` for a verdict in spite of that."""


def judged(interval: tuple[float, float] | None, noise: float = 0.0, *, busy: str = "", doubt: str = "") -> Said:
    """The one rule by which a verdict on a ratio is given, given with a mark, or withheld with the reason.

    Args:
        interval: ends of the interval of time A over time B; None if there is none.
        noise: the machine's noise floor, as a share; a difference within it is none.
        busy: disturbance by other programs, in words. A difference beyond the noise floor is given all the same, and
            marked.
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


def effective(samples: Sequence[float]) -> float:
    """The number of independent samples that say as much of the median, if neighbours are alike.

    As of a first-order autoregression: n (1 - r) / (1 + r), with r the correlation of neighbours, corrected for a short
    series (Kendall 1954). At most n.
    """
    n, apart = len(samples), np.asarray(samples, dtype=np.float64) - np.mean(samples)
    if not np.ptp(samples):
        return float(n)
    alike = float(apart[1:] @ apart[:-1]) / float(apart @ apart)
    r = min(max(0.0, alike + (1 + 3 * alike) / n), 1.0)
    return n * (1 - r) / (1 + r)


def interval_of_visit(samples: Sequence[float]) -> tuple[float, float] | None:
    """Interval of the median of one visit's samples, with alike neighbours; None below six effective ones.

    The ends are the quantiles of the interval of as many independent samples.
    """
    worth = int(effective(samples)) if len(samples) else 0
    if worth < FEWEST:
        return None
    tail = _rank(worth, CONFIDENCE) / (worth - 1)
    low, high = np.quantile(samples, (tail, 1 - tail))
    return float(low), float(high)


def error_interval(error: float, deviation: float | None, draws: float | None) -> tuple[float, float]:
    """Interval of the median error of ``draws`` with this standard deviation, cut at 0; a single draw has no width.

    It is Student's t of their mean, wider by :data:`OF_MEDIAN`.
    """
    if deviation is None or draws is None or not draws > 1:
        return error, error
    half = OF_MEDIAN * student(draws - 1) * deviation / math.sqrt(draws)
    return max(0.0, error - half), error + half


def interval_over_rounds(rounds: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Interval of the median of samples from several visits: Student's t on the logarithms of the visits' medians.

    Samples of one visit share its process, memory and moment, so they do not predict the next visit. None for fewer
    than two visits.
    """
    middles = [median(one) for one in rounds if len(one)]
    if len(middles) < 2 or min(middles) <= 0:
        return None
    logs = np.log(middles)
    half = student(len(logs) - 1) * math.sqrt(float(logs.var(ddof=1)) / len(logs))
    low, high = ends_of(float(logs.mean()), half)
    among = median([sample for one in rounds for sample in one])
    return min(low, among), max(high, among)


def ends_of(middle: float, half: float) -> tuple[float, float]:
    """Ends of an interval of a time or ratio, from that of its logarithm."""
    low, high = (math.exp(max(-_FARTHEST, min(_FARTHEST, end))) for end in (middle - half, middle + half))
    return low, high


def spread_of_visits(rows: Iterable[Ends]) -> tuple[float, int]:
    """Variance of the logarithm of a visit's time by all these rows, and its degrees of freedom.

    Few visits may agree by chance, so it is a variance that the true one exceeds with 20 % (if visits are normal). Both
    are 0 without a row of several visits.
    """
    from scipy.special import chdtri  # takes a moment; scipy.stats takes a second

    several = [(visits - 1, _variance(low, high, visits)) for low, high, visits in rows if visits > 1]
    freedom = sum(each for each, _ in several)
    return (sum(each * own for each, own in several) / float(chdtri(freedom, 0.8)) if several else 0.0), freedom


def _variance(low: float, high: float, visits: int) -> float:
    """Variance of a visit's logarithm, from the interval of a row of several visits."""
    return (math.log(high / low) / 2 / student(visits - 1)) ** 2 * visits


def joint_ratio(a: Ends, b: Ends, family: int, shared: tuple[float, int]) -> tuple[float, float]:
    """Ends of the interval of A over B that holds together with those of ``family`` such ratios (Welch 1947).

    The interval has at least the far ends of both: those of older rows came from samples. Below
    :data:`FEWEST_VISITS` visits it has :data:`MODES` at least.

    Args:
        shared: the spread of visits that the rows beside them show, as :func:`spread_of_visits` gives it. A row whose
            own visits agree better has this one: three visits in one mode of the machine look exact.
    """
    half, middle = math.log(a[1] / a[0] * b[1] / b[0]) / 2, math.log(a[0] / b[0] * a[1] / b[1]) / 2
    fewest = min(a[2], b[2])
    if fewest > 1 and (half or shared[0]):
        pairs = [(_variance(*one), one[2] - 1, one[2]) for one in (a, b)]
        parts = [(max((own, freedom), shared), visits) for own, freedom, visits in pairs]
        total = sum(spread / visits for (spread, _), visits in parts)
        freedom = total**2 / sum((spread / visits) ** 2 / known for (spread, known), visits in parts)
        half = max(half, student(freedom, family) * math.sqrt(total))
    if fewest < FEWEST_VISITS:
        half = max(half, math.log1p(MODES))
    return ends_of(middle, half)


@cache
def student(freedom: float, family: int = 1) -> float:
    """Half of the 95 % interval of a mean in standard errors (Student 1908), of which ``family`` hold together."""
    tail = (1 - CONFIDENCE) / 2 / family
    if freedom == 1:
        return 1 / math.tan(math.pi * tail)
    if freedom == 2:  # three visits, as most rows have: their processes need not load scipy
        return (1 - 2 * tail) / math.sqrt(2 * tail * (1 - tail))
    from scipy.special import stdtrit  # takes a moment; scipy.stats takes a second

    return float(stdtrit(freedom, 1 - tail))


@cache
def _rank(n: int, confidence: float) -> int:
    """Largest k for which the tails beyond x_k and x_{n-1-k} together hold at most 1 - confidence; -1: none."""
    k, ways, below = -1, 1, 1  # of 2**n orders of heads and tails: those with k + 1 heads, and with at most that many
    while k < n and below / 2 ** (n - 1) <= 1 - confidence:
        k += 1
        ways = ways * (n - k) // (k + 1)
        below += ways
    return k


def expected_half_width(samples: Sequence[float]) -> float:
    """The average half width of :func:`median_interval` for normal samples of this spread.

    A stopping rule that does not depend on the median, so it favours no value.
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
    processes: int = 0

    @property
    def verdict(self) -> Verdict:
        """The verdict on A against B on a quiet machine, by the joint interval; without one ``inconclusive``."""
        word = judged(self.joint, self.noise).word
        return "inconclusive" if word == "withheld" else word

    @property
    def undecided(self) -> bool:
        """True if more processes may decide it: there are too few, or the estimate alone would be a verdict."""
        alone = judged((self.estimate, self.estimate), self.noise).word
        return self.verdict == "inconclusive" and (self.joint is None or alone != "inconclusive")


@dataclass(frozen=True, slots=True)
class Visited:
    """Median time of each visit to one cell, above 0: in the new run, and in each older one."""

    new: Sequence[float]
    olds: Sequence[Sequence[float]]
    doubt: float = 0.0
    """A variance to be added to that of the logarithm of the ratio."""
    runs: int = 1
    """Number of runs whose visits are the new ones."""

    @property
    def enough(self) -> bool:
        """True if both sides have visits enough for an interval."""
        return min(len(self.new), sum(map(len, self.olds))) >= FEWEST_VISITS


@dataclass(frozen=True, slots=True)
class OverVisits:
    """Ratios of times that were measured in visits of their own, new over old."""

    ratios: tuple[tuple[float, float, float], ...]
    """Ratio of each cell with the ends of its interval. The lower ends hold for all cells together with 95 %, and so do
    the upper ends."""
    between: float | None
    """Standard deviation of logarithms between runs of one program; None if the older runs are too few, and each
    interval is then wider by :data:`BETWEEN_RUNS`, or by the difference of the cell's older runs if that is more."""


def ratios_over_visits(
    cells: Sequence[Visited], *, known: tuple[float, int] | None = None, looks: float = 1
) -> OverVisits:
    """Ratios of times and their joint intervals, by moderated t-tests (Smyth 2004) on logarithms.

    Four differences say little of the spread of one cell, all cells of a run say much: both count, by how alike cells
    vary. Degrees of freedom are those of Welch (1947), and all cells share the 5 % (Bonferroni). Raises ValueError if a
    cell has fewer than :data:`FEWEST_VISITS` visits on a side.

    Args:
        known: spread between runs of one program, and its degrees of freedom; None: of the older runs given here.
        looks: number of such tables that share the 5 %.
    """
    from scipy.special import stdtrit  # takes a moment, which only gates pay

    if not all(cell.enough for cell in cells):
        raise ValueError(f"need {FEWEST_VISITS} visits of each")
    if not cells:
        return OverVisits((), None)
    news = [[np.log(cell.new)] for cell in cells]
    olds = [[np.log(run) for run in cell.olds] for cell in cells]
    pooled = [_pooled(runs) for runs in olds]
    parts = [_variances(news), _variances(pooled), (np.array([cell.doubt for cell in cells]), np.inf)]
    apart = sum(len(runs) - 1 for runs in olds)
    if known is None and apart >= _KNOWN_BETWEEN:
        kept = np.array([len(runs) for runs in olds]) == [len(runs) for runs in pooled]
        known = _between(olds, parts[1][0] * kept), apart
    between = None if known is None else known[0]
    if known is not None:
        between, apart = known
        shares = [1 / cell.runs + 1 / len(runs) for cell, runs in zip(cells, olds, strict=True)]
        parts.append((between**2 * np.array(shares), apart))
    variance = sum(part for part, _ in parts)
    doubted = sum(part**2 / freedom for part, freedom in parts)
    freedom = np.divide(variance**2, doubted, out=np.full(len(cells), np.inf), where=doubted > 0)
    half = stdtrit(freedom, 1 - (1 - CONFIDENCE) / len(cells) / looks) * np.sqrt(variance)
    if between is None:
        half += [max(math.log1p(BETWEEN_RUNS), float(np.ptp([one.mean() for one in runs]))) for runs in olds]
    middle = np.array([_middle(new) - _middle(old) for new, old in zip(news, olds, strict=True)])
    found = np.exp(np.clip([middle, middle - half, middle + half], -_FARTHEST, _FARTHEST))
    return OverVisits(tuple((float(a), float(b), float(c)) for a, b, c in found.T), between)


def spread_between(stretches: Sequence[Sequence[Sequence[float]]]) -> float | None:
    """Spread between runs of one program, on the log scale; None without two runs in a stretch.

    A stretch has the visits of a cell in each of its runs, between which nothing changed.
    """
    logs = [[np.log(run) for run in runs if len(run) >= FEWEST_VISITS] for runs in stretches]
    logs = [runs for runs in logs if len(runs) > 1]
    return _between(logs, _variances(logs)[0]) if logs else None


def _middle(runs: Sequence[Numbers]) -> float:
    return float(np.mean([one.mean() for one in runs]))


def _pooled(runs: Sequence[Numbers]) -> Sequence[Numbers]:
    """Each run by itself; all as one if their rounds do not say how visits of one run vary."""
    return runs if sum(len(one) - 1 for one in runs) >= FEWEST_VISITS - 1 else [np.concatenate(runs)]


def _variances(cells: Sequence[Sequence[Numbers]]) -> tuple[Numbers, Numbers]:
    """Variance of each cell's mean by its visits, (cells,), and its degrees of freedom, (cells,).

    That of a cell's visits is moderated by those of all others (limma's empirical Bayes).
    """
    from scipy.special import digamma, polygamma

    freedom = np.array([sum(len(run) - 1.0 for run in runs) for runs in cells])
    squares = np.array([sum(float(((run - run.mean()) ** 2).sum()) for run in runs) for runs in cells])
    own = np.maximum(squares / freedom, 1e-12)
    share = [sum(1 / len(run) for run in runs) / len(runs) ** 2 for runs in cells]
    if len(cells) < FEWEST_VISITS:
        return own * share, freedom
    logs = np.log(own) - digamma(freedom / 2) + np.log(freedom / 2)
    unlike = float(logs.var(ddof=1) - polygamma(1, freedom / 2).mean())
    prior, known = float(squares.sum() / freedom.sum()), float(freedom.sum())
    if unlike > 1 / known:
        known = (1 + math.sqrt(1 + 2 * unlike)) / unlike  # twice the inverse of trigamma, in its first two terms
        prior = math.exp(float(logs.mean() + digamma(known / 2)) - math.log(known / 2))
    moderated = (known * prior + freedom * own) / (known + freedom)
    return moderated * share, np.minimum(known + freedom, freedom.sum())


def _between(olds: Sequence[Sequence[Numbers]], within: Numbers) -> float:
    """Standard deviation between runs beyond that of visits, with a standard error of its square on top."""
    several = [i for i, runs in enumerate(olds) if len(runs) > 1]
    seen = np.array([np.var([run.mean() for run in olds[i]], ddof=1) for i in several])
    freedom = sum(len(olds[i]) - 1 for i in several)
    excess = float(np.mean(seen - within[several] * [len(olds[i]) for i in several]))
    return math.sqrt(max(0.0, excess + float(seen.mean()) * math.sqrt(2 / freedom)))


def noise_floor(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The difference that one program shows if timed as A and as B: the far end of its ratio's interval, minus 1.

    The interval is the exact one of the median, within one process; None for fewer than six pairs. A smaller difference
    is no finding. Raises ValueError as :func:`paired_ratio`.
    """
    interval = median_interval(_logs(a, b))
    return None if interval is None else math.exp(max(interval[1], -interval[0])) - 1


def paired_ratio(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], *, noise: float = 0.0, family: int = 1
) -> Ratio:
    """Ratio of A to B over processes; swapping a and b gives the reciprocal.

    A process favours one side for as long as it lives, and its samples may depend on each other. So each process counts
    once, by the median of log(a_i / b_i). The interval of their mean is Student's t. Raises ValueError for unequal
    numbers of samples, none, or a time that is not positive and finite.

    Args:
        a, b: seconds by process; the i-th of both were measured next to each other.
        noise: the machine's noise floor, below which no verdict is given.
        family: number of ratios in one table. The joint intervals share the 5 % among them and :data:`LOOKS`
            (Bonferroni). With 95 % each, 24 ratios of identical programs would claim a difference about once.
    """
    middles = [median(_logs(one, other)) for one, other in zip(a, b, strict=True)]
    if not middles:
        raise ValueError("no process")
    middle = math.fsum(middles) / len(middles)

    def ends(family: int) -> tuple[float, float] | None:
        if len(middles) < FEWEST_VISITS:
            return None
        spread = max(LEAST_SPREAD, float(np.std(middles, ddof=1)))
        half = student(len(middles) - 1, family) * spread / math.sqrt(len(middles))
        return ends_of(middle, half)

    low, high = ends(1) or (None, None)
    joint = ends(family * len(LOOKS))
    return Ratio(math.exp(middle), low, high, sum(map(len, a)), joint, noise, len(middles))


def _logs(a: Sequence[float], b: Sequence[float]) -> list[float]:
    if len(a) != len(b) or not a:
        raise ValueError(f"need as many samples of each, got {len(a)} and {len(b)}")
    if not all(math.isfinite(t) and t > 0 for t in (*a, *b)):
        raise ValueError("a time is not positive and finite")
    return [math.log(x) - math.log(y) for x, y in zip(a, b, strict=True)]
