"""The script for a GPU: its sweep, with tiny shapes on this processor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from tests.benchmarks import on_gpu
from tests.test_package import HERE

TINY = ("--device=cpu", "--n", "64", "--heads=2", "--head-dim=16", "--dtype=float32", "--only=sdpa,linear")


@pytest.mark.parametrize("name", sorted({name for name, _ in on_gpu.VARIANTS if not name.startswith("peer.")}))
def test_each_variant_of_the_sweep_has_the_options_that_it_names(name: str) -> None:
    spec = parse_spec(name)
    VARIANTS.get(spec.name).check(dict(spec.options))


def test_each_case_comes_once_and_the_default_form_before_the_others() -> None:
    found = list(on_gpu.cases([64, 128], set()))
    assert len({json.dumps(case) for case in found}) == len(found) == 6 * len(on_gpu.VARIANTS)
    forms = [case["form"] for case in found]
    assert forms == sorted(forms)


def rows(out: Path, *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, on_gpu.__file__, str(out), *TINY, *more]
    subprocess.run(command, cwd=HERE, check=True, capture_output=True, timeout=120)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_the_sweep_writes_a_row_for_each_case_and_says_what_cannot_be(tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.jsonl", "--warm=1")
    status = {(row["variant"], row["pass"], row["level"], row["form"]): row["status"] for row in found}
    assert status["linear", "training", "operator", "torch"] == status["sdpa", "forward", "layer", "auto"] == "ok"
    assert status["sdpa:backend=cudnn", "forward", "operator", "auto"] == "unsupported"
    assert all(row["eager_ms"] > 0 for row in found if row["status"] == "ok")


@pytest.mark.slow
def test_a_case_that_is_late_ends_and_the_next_one_begins(tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.jsonl", "--each=0.01", "--minutes=0.1")
    assert len(found) > 5
    assert {row["status"] for row in found} == {"timeout"}
