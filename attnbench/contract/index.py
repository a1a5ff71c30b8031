"""The index of the shipped variants, inputs and tasks: the facts that ``show`` tells, without torch.

``python -m tests.docs.index`` writes it after a change of the catalogue, and a test holds it to the code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attnbench.contract.plugins.discovery import installed

_PACKAGE = Path(__file__).parents[1]
FILE = _PACKAGE / "catalogue" / "index.json"

Index = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""``variant``, ``input`` or ``task`` -> name -> facts as plain data. ``hidden``: no list of names has it."""


@cache
def read() -> Index:
    """The index as it is written, whatever has changed since; empty if it cannot be read."""
    try:
        known: Index = json.loads(FILE.read_bytes())
    except (OSError, ValueError):
        return {}
    return known


@cache
def shipped() -> Index:
    """The index if it is all there is; empty if it was made of other code, or a plug-in is installed."""
    return {} if installed() or read().get("code", {}).get("digest") != {"sha256": code()} else read()


def code() -> str:
    """Digest of the code from which the facts follow."""
    files = [_PACKAGE / "cli" / "show.py", *(_PACKAGE / "contract").rglob("*.py"), *FILE.parent.rglob("*.py")]
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
