"""`make selfcheck` is run by hand, for most of an hour; that it can begin is looked at here."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LIVE = sorted(Path(__file__).with_name("benchmarks").glob("live_*.py"))


@pytest.mark.parametrize("file", LIVE, ids=lambda file: file.stem)
def test_each_file_of_selfcheck_finds_what_it_imports(file: Path) -> None:
    assert any(name.startswith("test_") for name in runpy.run_path(str(file)))
