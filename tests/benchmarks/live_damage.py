from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DAMAGE = Path(__file__).parents[1] / "run" / "test_damage.py"


def test_a_thousand_damages_to_a_run_give_no_wrong_number_without_a_word() -> None:
    command = [sys.executable, "-m", "pytest", "-q", str(DAMAGE)]
    done = subprocess.run(command, env={**os.environ, "ATTNBENCH_CASES": "1000"}, capture_output=True, text=True)
    print(done.stdout[-2000:])
    assert done.returncode == 0
    assert "1011 passed" in done.stdout
