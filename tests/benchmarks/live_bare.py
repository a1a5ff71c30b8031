"""How much of a variant's time its products and exponentials alone would take. See `make selfcheck`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnbench.contract.plugins.discovery import load
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.harness.compare.compare import Contest
from attnbench.harness.outside.isolation import Settings
from attnbench.measure.statistics import Ratio
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell

PLUGIN = str(Path(__file__).with_name("bare.py"))
NAMES = ("performer", "linear", "efficient", "local", "longformer", "bigbird", "linformer", "nystrom", "reformer")


RULES = TimingRules(min_time=0.5, max_time=5.0, warmup_time=0.1)


def beside_its_products(name: str, n: int, rules: TimingRules, threads: int) -> Ratio:
    """The variant's time over that of its bare products."""
    load(PLUGIN)
    pair = name, f"bare:of={name}"
    cells = [Cell("s", "w", parse_spec(one), Shape(heads=8, seq_len=n, head_dim=64), measure=("time",)) for one in pair]
    settings = Settings(threads=threads, plugins=(PLUGIN,), rates=False)
    found = Contest(cells, [n], settings, rules).answer()
    (row,) = found.rows[pair]
    assert row.ratio is not None, (row, found.warnings)
    print(f"\n{name} beside its bare products: {row.ratio}")
    return row.ratio


@pytest.mark.parametrize("name", NAMES)
def test_no_variant_is_faster_than_its_own_products_and_exponentials(name: str) -> None:
    ratio = beside_its_products(name, 4096, RULES, len(os.sched_getaffinity(0)))
    assert ratio.high is not None
    assert ratio.high >= 1
