"""A whole suite twice, on a machine with nothing else to do. See `make selfcheck`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.measure.statistics import median


def agreement(out: Path, **options: Any) -> float:
    """The share of the cells of ``quick`` whose intervals agree in two runs."""
    first, second = (
        execute(make_plan("quick", Options(device="cpu", out=out / one, threads=1, **options)))[1] for one in "12"
    )
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.time_median_s and b.time_median_s]
    differences = []
    agreeing = 0
    for a, b in pairs:
        assert a.cell_id == b.cell_id
        assert a.time_median_s is not None
        assert b.time_median_s is not None
        assert a.time_ci_low_s is not None
        assert a.time_ci_high_s is not None
        assert b.time_ci_low_s is not None
        assert b.time_ci_high_s is not None
        assert (a.peak_bytes, a.matmul_flops, a.rel_error) == (b.peak_bytes, b.matmul_flops, b.rel_error)
        differences.append(abs(b.time_median_s / a.time_median_s - 1))
        agree = a.time_ci_low_s <= b.time_ci_high_s and b.time_ci_low_s <= a.time_ci_high_s
        agreeing += agree
        print(f"\n{a.label}: {differences[-1]:.1%} {'agree' if agree else 'DISAGREE'}", end="")
    print(f"\nquick twice: {agreeing} of {len(pairs)} agree, difference in the median {median(differences):.1%}")
    return agreeing / len(pairs)


def test_two_runs_of_quick_agree_within_their_intervals_in_nine_cells_of_ten(tmp_path: Path) -> None:
    assert agreement(tmp_path) >= 0.9
