"""Names for the shell to complete, found without importing what a command needs."""

from __future__ import annotations

import re
from pathlib import Path

from attnbench.suite.shipped import shipped_suites

_PACKAGE = Path(__file__).parent.parent
_REGISTERED = re.compile(r"\n@register(?:_input)?\(\s*\"([^\"]+)\"")  # ten times as fast as ^ on every line


def _registered(folder: str) -> list[str]:
    """Names in the ``@register`` lines of a package, read as text: importing them would cost two seconds."""
    files = sorted((_PACKAGE / folder).glob("*.py"))
    return [name for file in files for name in _REGISTERED.findall(file.read_text(encoding="utf-8"))]


def variants(incomplete: str) -> list[str]:
    """Shipped variants that begin so."""
    return [name for name in _registered("attention") if name.startswith(incomplete)]


def suites(incomplete: str) -> list[str]:
    """Shipped suites that begin so; anything else is left to the shell's own files."""
    return [name for name in shipped_suites() if name.startswith(incomplete)]


def names(incomplete: str) -> list[str]:
    """Whatever ``show`` can show."""
    return [name for name in (*_registered("attention"), *_registered("inputs")) if name.startswith(incomplete)]
