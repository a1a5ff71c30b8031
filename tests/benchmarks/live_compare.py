"""What `compare` says of programs whose ratio is known, on a machine with nothing else to do. See `make selfcheck`.

SELFCHECK_RUNS=20 makes each of them shorter, for a look at whether they work.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from attnbench.contract.plugins.discovery import load
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.harness.compare.compare import Contest
from attnbench.harness.outside.isolation import Settings
from attnbench.measure.statistics import Ratio
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell

RUNS = int(os.environ.get("SELFCHECK_RUNS", "200"))
PLUGIN = str(Path(__file__).with_name("known_work.py"))
RULES = TimingRules(min_time=0.3, max_time=3.0, warmup_time=0.05)


def ratios(a: str, b: str, times: int, *, rules: TimingRules = RULES) -> list[Ratio]:
    """As many comparisons of A and B, in one table."""
    load(PLUGIN)
    cells = [
        Cell("s", "w", parse_spec(name), Shape(heads=2, seq_len=256, head_dim=32), measure=("time",)) for name in (a, b)
    ]
    settings = Settings(threads=1, plugins=(PLUGIN,), rates=False)
    result = Contest(cells, [256] * times, settings, rules).answer()
    found = [row.ratio for row in result.rows[a, b] if row.ratio is not None]
    floor = result.environment["noise_floor"]
    print(f"\n{a} / {b}, {result.processes} processes: noise floor {floor:.1%}, {summary(found)}")
    assert len(found) == times
    return found


def summary(found: Sequence[Ratio]) -> str:
    verdicts = Counter(one.verdict for one in found)
    estimates = sorted(one.estimate for one in found)
    return f"{dict(verdicts)}, ratios {estimates[0]:.4f} to {estimates[-1]:.4f}" if found else "nothing"


def test_a_variant_against_itself_gets_at_most_one_verdict_in_a_hundred() -> None:
    names = ("softmax", "sdpa", "linear", "local")
    found = [one for name in names for one in ratios(name, name, max(1, RUNS // len(names)))]
    outside = sum(one.low is not None and one.high is not None and not one.low <= 1 <= one.high for one in found)
    print(f"\nitself: {len(found)} comparisons, {outside} intervals without 1, {summary(found)}")
    assert sum(one.verdict in ("faster", "slower") for one in found) <= max(0, RUNS // 100)


def test_ten_per_cent_more_work_is_found_in_nineteen_of_twenty() -> None:
    times = min(40, RUNS)
    found = ratios("known-work:steps=110", "known-work", times)
    holds = sum(one.low is not None and one.high is not None and one.low <= 1.1 <= one.high for one in found)
    print(f"\n1.10: {times} comparisons, {holds} intervals with 1.10, {summary(found)}")
    assert sum(one.verdict == "slower" for one in found) >= 0.95 * times


def test_two_per_cent_more_work_is_never_called_less() -> None:
    found = ratios("known-work:steps=102", "known-work", min(40, RUNS))
    print(f"\n1.02: {summary(found)}")
    assert not any(one.verdict == "faster" for one in found)
