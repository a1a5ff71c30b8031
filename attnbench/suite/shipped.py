"""The suites that come with attnbench, by name. Imports nothing, so that the shell may ask while somebody types."""

from __future__ import annotations

from pathlib import Path


def shipped_folder() -> Path:
    """Where they lie: inside the package once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "suites"
    return installed if installed.is_dir() else package.parent / "suites"


def shipped_suites() -> list[str]:
    """Their names, without reading them."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))
