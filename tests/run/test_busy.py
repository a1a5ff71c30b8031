"""``attnbench compare`` while other programs have the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = """
import time
from torch import nn
from attnbench import register

for name in ("own-slow", "own-slower"):
    @register(name, family="reference", source="-", formula="-", cost="-")
    class Slow(nn.Module):
        def __init__(self, shape):
            super().__init__()

        def forward(self, q, k, v, *, key_mask=None):
            time.sleep(30)
            return v
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nobody tells the load")
@pytest.mark.usefixtures("forks")
def test_a_busy_machine_is_told_also_where_no_variant_came_to_its_turns(tmp_path: Path) -> None:
    own = tmp_path / "slow.py"
    own.write_text(SLOW)
    command = [
        sys.executable,
        "-m",
        "attnbench",
        "compare",
        "own-slow",
        "own-slower",
        "--n",
        "16",
        "--timeout",
        "1",
        "--unchecked",
    ]
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
    try:
        done = subprocess.run([*command, "--plugin", str(own)], capture_output=True, text=True, timeout=200)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert done.returncode == 1
    assert "the machine is busy" in " ".join(done.stderr.split())
