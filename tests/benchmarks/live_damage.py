from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DAMAGE = Path(__file__).parents[1] / "harness" / "test_damage.py"


def damaged(times: int) -> None:
    """Run these tests with so many damages, beside those tests that are always the same."""
    command = [sys.executable, "-m", "pytest", "-q", str(DAMAGE)]
    variables = {**os.environ, "ATTNBENCH_CASES": str(times)}
    done = subprocess.run(command, env=variables, cwd=DAMAGE.parents[2], capture_output=True, text=True)
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stderr
    assert f"{times + 11} passed" in done.stdout


def test_a_thousand_damages_to_a_run_give_no_wrong_number_without_a_word() -> None:
    damaged(1000)
