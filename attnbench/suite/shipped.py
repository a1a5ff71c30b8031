"""The suites that come with attnbench, by name. Imports nothing, for fast completion in a shell."""

from __future__ import annotations

from pathlib import Path


def shipped_folder() -> Path:
    """Folder of the shipped suites: inside the package once installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "suites"
    return installed if installed.is_dir() else package.parent / "suites"


def shipped_suites() -> list[str]:
    """Names of the shipped suites, without reading them."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))
