"""Code and data behind the numbers: the files that a process used, and if they have changed since."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from attnbench.contract.plugins import discovery as plugins
from attnbench.errors import Exit, UsageError
from attnbench.results.manifest import digest

OURS = "attnbench"
"""Stands for all files of this package that may decide a number."""
SOURCES = "sources"
"""Fact of a run: its code and data; and the folder in it with copies of the plug-ins and of their data."""
_PACKAGE = Path(__file__).parents[1]
_SHOWS = {"api", "cli", "figures", "answers"}
"""Folders of this package that measure nothing."""
_MOST_BYTES = 2**28
"""A larger file is known by its size and time of last change; reading it would take longer than a second."""
_OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib")
_opened: set[str] = set()
"""Absolute, as text: a process opens and maps hundreds, and they are looked through after each of its answers."""
hooks = list[str]()
"""Audit hooks that others added since :func:`listen`: no list of them can be had."""

Seen = Mapping[str, Sequence[str]]
"""Name of each file -> digest of its content, and its size and time of last change; both empty if it cannot be read."""


class Changed(UsageError):
    """Code or data has changed since rows of the run were measured."""

    exit_code = Exit.FAILED


def look(names: Iterable[str], before: Seen) -> dict[str, list[str]]:
    """The present state of these files; only one with another size or time is read."""
    return {name: _look(name, before.get(name, ("", ""))) for name in names}


def _look(name: str, before: Sequence[str]) -> list[str]:
    try:
        files = _ours() if name == OURS else [Path(name).expanduser()]
        facts = [file.stat() for file in files]
        stamp = digest(repr([(fact.st_size, fact.st_mtime_ns) for fact in facts]))
        if stamp == before[1]:
            return list(before)
        if sum(fact.st_size for fact in facts) > _MOST_BYTES:
            return [stamp, stamp]
        sizes = b"".join(b"%d " % fact.st_size for fact in facts)
        return [digest(sizes + b"".join(one.read_bytes() for one in files)), stamp]
    except OSError:
        return ["", ""]


def _ours() -> list[Path]:
    return sorted(file for file in _PACKAGE.rglob("*.py") if file.relative_to(_PACKAGE).parts[0] not in _SHOWS)


def changed(before: Seen) -> list[str]:
    """The names of the files that have changed."""
    now = look(before, before)
    return [name for name, seen in before.items() if now[name][0] != seen[0]]


def listen() -> None:
    """Note each file that Python opens for reading from now on; this lasts as long as the process."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    read = event == "sqlite3.connect" or (event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
    if read and isinstance(arguments[0], str | bytes):
        _opened.add(str(Path(os.fsdecode(arguments[0])).absolute()))
    elif event == "sys.addaudithook":
        hooks.append(event)


def note_mapped() -> None:
    """Note each file that is in memory now: libraries, and tensors that no Python opened."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        _opened.update(f"/{line.partition('/')[2]}" for line in lines)


def used(since: float) -> set[str]:
    """Names of the plug-ins' files of this process, and of the data that it read.

    Files that were written after ``since`` (seconds since 1970) are left out: they come of the measuring itself.
    """
    names = {_name(path) for path in plugins.files()}
    for path in map(Path, filter(_may_decide, _opened.copy())):
        with suppress(OSError):
            if path.is_file() and path.stat().st_mtime < since:
                names.add(_name(path))
    return names


@cache
def _may_decide(file: str) -> bool:
    if file.startswith(_OF_THE_SYSTEM) or file.endswith(".pyc") or plugins.is_versioned(file):
        return False
    is_of_programs = file.startswith(f"{Path.home()}/.")  # settings and caches
    return not is_of_programs and "/torchinductor" not in file


def _name(path: Path) -> str:
    home = Path.home()
    return str(Path("~", path.relative_to(home))) if path.is_relative_to(home) else str(path)


class Watch:
    """The files that a process used and will use, compared with those of an earlier process of the same run."""

    def __init__(self, before: Seen, given: Iterable[str], *, listens: bool) -> None:
        """Begin with the files known from the run, and those ``given`` to cells; ``listens`` if code is foreign."""
        self._listens, self._since = listens, time.time()
        self.seen = {name: list(one) for name, one in before.items()}
        self._given, self._held = [OURS, *given], list(self.seen)
        if listens:
            listen()

    def notice(self) -> None:
        """Note files that may be used no longer when the request is done."""
        if self._listens:
            note_mapped()

    def news(self) -> dict[str, list[str]]:
        """Files used since the last call. Raises Changed if one has changed."""
        self.notice()
        names = {*self._given, *(used(self._since) if self._listens else ())} - self.seen.keys()
        held, self._held = self._held, [name for name in (*self._held, *names) if name != OURS]  # that is loaded now
        if altered := changed({name: self.seen[name] for name in held}):
            more = f" and {len(altered) - 1} more" * (len(altered) > 1)
            raise Changed(
                f"{said(altered[0])}{more} changed since this run began to measure, and rows of two programs are not "
                "mixed; give the same command again, which measures anew"
            )
        new = look(names, {})
        self.seen |= new
        return new


def said(name: str) -> str:
    """The file, for people."""
    return "attnbench's own code" if name == OURS else name
