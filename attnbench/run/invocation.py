"""The same command given twice: told in the time that it takes to look at a few files, before torch is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from attnbench.store import WRITER, RunFolder


def invocation_of(arguments: Mapping[str, object]) -> str:
    """Equal for two commands with the same arguments and the same files behind them."""
    names = [str(name) for value in arguments.values() for name in (value if isinstance(value, list) else [value])]
    return hashlib.sha256(repr([arguments, *map(digest, names)]).encode()).hexdigest()[:16]


def digest(source: str) -> str:
    """Of a suite's or plug-in's content; empty where ``source`` names no file, or one too large to be either."""
    try:
        path = Path(source)
        small = path.is_file() and path.stat().st_size <= 2**20
        return hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
    except (OSError, ValueError):
        return ""


def refuse_second(out: Path, invocation: str) -> None:
    """Tell before anything slow is imported that the same command is at work already.

    Raises:
        Locked: it is, and writes to a run folder of a suite's folder in ``out``.
    """
    for path in sorted(out.glob(f"*/*/{WRITER}")):
        folder = RunFolder(path.parent)
        if folder.writer()[1] == invocation:
            with folder.lock(invocation):
                pass
