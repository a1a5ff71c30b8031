"""The suites that come with attnbench, by name. Imports nothing, so the shell may ask for them while somebody types."""

from __future__ import annotations

from pathlib import Path


def shipped_folder() -> Path:
    """Where the shipped suites lie: inside the package once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "suites"
    return installed if installed.is_dir() else package.parent / "suites"


def shipped_suites() -> list[str]:
    """Names of the shipped suites, without reading them."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))
