"""The command in a process of its own, with two threads, where no other test has left anything."""

from __future__ import annotations

import subprocess
import sys


def test_laws_hold_in_a_fresh_process_and_nothing_stands_on_stderr_but_how_to_read_the_table() -> None:
    # Parameters under fake tensors; memory that two threads made larger; a profiler that speaks.
    command = [sys.executable, "-m", "attnbench", "check", "gla", "xca", "linformer", "routing", "--threads", "2"]
    laws = [part for law in ("build", "tracing", "memory") for part in ("--law", law)]
    done = subprocess.run([*command, *laws], capture_output=True, encoding="utf-8", timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 variants are what they say they are" in done.stdout
    assert done.stderr == "n^: the measured power of n, and the claimed one\n"
