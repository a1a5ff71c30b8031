"""Notice when the same command is given twice, by a look at a few files, before torch is imported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from attnbench.files import make_folder
from attnbench.lock import held


@contextmanager
def once(out: Path, arguments: Mapping[str, object]) -> Iterator[None]:
    """Lock ``out`` against the same command, before it is known in which folder below it the rows will stand.

    Raises:
        Locked: the same command is at work already.
        CannotCreate: ``out`` cannot be made or written.
    """
    missing = [folder for folder in (out, *out.parents) if not _is_there(folder)]
    make_folder(out)
    name = f".{_invocation(arguments)}."
    try:
        with held(out, name):
            try:
                yield
            finally:
                with suppress(OSError):
                    (out / f"{name}lock").unlink()
    finally:
        for folder in missing:
            with suppress(OSError):  # results are in it
                folder.rmdir()


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:
        return True


def _invocation(arguments: Mapping[str, object]) -> str:
    """A key that is equal for two commands with the same arguments and the same files behind them."""
    names = [str(name) for value in arguments.values() for name in (value if isinstance(value, list) else [value])]
    return hashlib.sha256(repr([arguments, *map(digest, names)]).encode()).hexdigest()[:16]


def digest(source: str) -> str:
    """Digest of a suite's or plug-in's content; empty where ``source`` names no file, or one too large to be either."""
    try:
        path = Path(source)
        small = path.is_file() and path.stat().st_size <= 2**20
        return hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
    except (OSError, ValueError):
        return ""
