"""A command as a user types it, on a screen of 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forked import forks


def in_a_new_process(
    *arguments: str, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The outcome of ``attnbench ARGUMENTS`` in ``folder``, or here, with its output."""
    return subprocess.run(
        [sys.executable, "-m", "attnbench", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", **environment},
        timeout=280,
        check=False,
    )


def attnbench(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in a fork of this process."""
    with forks():
        return in_a_new_process(*arguments, folder=folder, **environment)
