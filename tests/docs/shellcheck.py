"""The linter of shell scripts, on the path or beside Python, where pip installs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)

needs_shellcheck = pytest.mark.skipif(_PROGRAM is None, reason="needs shellcheck: make .venv/installed-all")


def shellcheck(script: Path) -> None:
    """Print each fault of the script, and fail if there is one."""
    assert _PROGRAM is not None
    subprocess.run([_PROGRAM, str(script)], check=True)
