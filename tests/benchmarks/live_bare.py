"""How much of a variant's time its products and exponentials alone would take. See `make selfcheck`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnbench.cell import Cell
from attnbench.measure.time import TimingRules
from attnbench.plugins import load
from attnbench.run.compare import Contest
from attnbench.run.isolation import Settings
from attnbench.shape import Shape
from attnbench.spec import parse_spec

PLUGIN = str(Path(__file__).with_name("bare.py"))
NAMES = ("performer", "linear", "efficient", "local", "longformer", "bigbird", "linformer", "nystrom", "reformer")


@pytest.mark.parametrize("name", NAMES)
def test_no_variant_is_faster_than_its_own_products_and_exponentials(name: str) -> None:
    load(PLUGIN)
    shape = Shape(heads=8, seq_len=4096, head_dim=64)
    pair = name, f"bare:of={name}"
    cells = [Cell("s", "w", parse_spec(one), shape, measure=("time",)) for one in pair]
    rules = TimingRules(min_time=0.5, max_time=5.0, warmup_time=0.1)
    settings = Settings(threads=len(os.sched_getaffinity(0)), plugins=(PLUGIN,), rates=False)
    (row,) = Contest(cells, [4096], settings, rules).answer().rows[pair]
    assert row.ratio is not None
    assert row.ratio.high is not None
    print(f"\n{name}: {row.ratio.estimate:.2f} times its bare products, {row.ratio.low:.2f} to {row.ratio.high:.2f}")
    assert row.ratio.high >= 1
