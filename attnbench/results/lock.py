"""Lock a folder for one process, by a lock that the system frees when its holder ends, and a command for one run."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from attnbench.errors import Locked, cannot_write
from attnbench.files import make_folder, refuse_other_than_file
from attnbench.text import one_line


@contextmanager
def held(folder: Path, name: str = ".", *, patience: float = 0.0) -> Iterator[None]:
    """Lock ``folder``, or the part of it that ``name`` stands for, against other processes, for ``patience`` seconds.

    The file ``{name}writer`` names the holder of the lock; the next process overwrites that of a killed one. Raises
    Locked with the number of the other process, and CannotCreate, also for a link in the lock's place.
    """
    writer = folder / f"{name}writer"
    try:
        refuse_other_than_file(writer)
        lock = FileLock(folder / f"{name}lock", timeout=patience)
        lock.acquire()
    except Timeout:
        raise Locked(
            f"another attnbench run{_holder(writer)} writes to {folder}; wait for it or choose another --out"
        ) from None
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        with suppress(OSError):  # a full disk is reported when a row cannot be written
            since = datetime.now(UTC).isoformat(timespec="seconds")
            writer.write_text(f"process {os.getpid()}, since {since}\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            writer.unlink()
        lock.release()


def _holder(writer: Path) -> str:
    for _ in range(20):
        time.sleep(0.05)  # the holder may have taken the lock just now and be about to write
        with suppress(OSError, ValueError):
            if said := one_line(writer.read_text(encoding="utf-8")[:100]):
                return f" ({said})"
    return ""


@contextmanager
def once(out: Path, arguments: Mapping[str, object]) -> Iterator[None]:
    """Lock ``out`` against the same command, before the folder of its rows is known. Raises Locked and CannotCreate."""
    missing = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]  # noqa: PTH110  # which is no error either if it cannot be told
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


def _invocation(arguments: Mapping[str, object]) -> str:
    """A key that is equal for two commands with the same arguments and the same content of their files."""
    names = [str(name) for value in arguments.values() for name in (value if isinstance(value, list) else [value])]
    return hashlib.sha256(repr([arguments, *map(digest, names)]).encode()).hexdigest()[:16]


def digest(source: str) -> str:
    """Digest of a suite's or plug-in's content; empty if ``source`` names no file, or one too large to be either."""
    try:
        path = Path(source)
        small = path.is_file() and path.stat().st_size <= 2**20
        return hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
    except (OSError, ValueError):
        return ""
