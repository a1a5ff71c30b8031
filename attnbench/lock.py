"""One process at a time in a folder: a lock that the system frees when its holder ends, and who holds it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from attnbench.errors import CannotCreate, Locked
from attnbench.files import refuse_other_than_file
from attnbench.record import one_line


@contextmanager
def held(folder: Path, name: str = ".", *, patience: float = 0.0) -> Iterator[None]:
    """Lock ``folder``, or what ``name`` stands for in it, against other processes.

    The file ``{name}writer`` says who holds the lock; the next process overwrites what a killed one left in it.

    Args:
        name: prefix of the names of the lock's files.
        patience: seconds to wait for another process.

    Raises:
        Locked: another process holds it; the message gives its number.
        CannotCreate: nothing can be written there, or a link is in its place.
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
        raise CannotCreate(f"cannot write in {folder}: {error.strerror}") from error
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
    """Who holds the lock, for people; empty where the file does not say."""
    for _ in range(20):
        time.sleep(0.05)  # the holder may have taken the lock just now and be about to write
        with suppress(OSError, ValueError):
            if said := one_line(writer.read_text(encoding="utf-8")[:100]):
                return f" ({said})"
    return ""
