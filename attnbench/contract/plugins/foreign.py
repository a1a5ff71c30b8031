"""Import other people's code, which may raise anything, end Python or print."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import NoReturn

from attnbench.errors import UsageError, said


@contextmanager
def told(plugin: str, remedy: str = "") -> Iterator[None]:
    """Turn any exception of a plug-in's import into one line, and send its output to stderr.

    A call of ``os._exit`` becomes an error too; it would end the command with success. The current folder is restored.
    """
    real, here, folder, depth = os._exit, os.getpid(), Path.cwd(), sys.getrecursionlimit()

    def leave(status: int) -> NoReturn:
        if os.getpid() != here:  # a process that the plug-in started may end as it likes
            real(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = leave
    try:
        with redirect_stdout(sys.stderr):
            try:
                yield
            finally:
                sys.setrecursionlimit(max(depth, sys.getrecursionlimit()))
                os.chdir(folder)  # the user's folder, where results are to go
    except KeyboardInterrupt as error:
        # The command's own interrupts are of another class; a plug-in's must not end the command without a word.
        if type(error) is not KeyboardInterrupt or signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise
        raise UsageError(f"plug-in {plugin}{_line(error, plugin)}: {said(error)}{remedy}") from error
    except UsageError as error:
        raise UsageError(f"plug-in {plugin}{_line(error, plugin)}: {error}{remedy}") from error
    except BaseException as error:  # SystemExit, too
        what = f"{type(error).__name__}: {error.msg}" if isinstance(error, SyntaxError) else said(error)
        if isinstance(error, ModuleNotFoundError):
            remedy = remedy or "; install it, or name the folder that holds it in PYTHONPATH"
        raise UsageError(f"plug-in {plugin}{_line(error, plugin)}: {' '.join(what.split())}{remedy}") from error
    finally:
        os._exit = real


def module_name(path: Path) -> str:
    """The name under which a file is imported; within its package, if it has one."""
    own = f"attnbench_plugin{path.resolve().as_posix().translate(_IN_NAMES)}"
    return ".".join([*home_of(path)[1], own])


_IN_NAMES = str.maketrans({"/": "_s", ".": "_d", "_": "_u"})
"""Characters of a path in the name of its module, so that no two files share one."""


def home_of(path: Path) -> tuple[Path, list[str]]:
    """The folder that holds the package of a file, and the package's name; its own folder and no name without one."""
    folder, package = path.resolve().parent, list[str]()
    with suppress(OSError):
        levels = re.findall(r"^\s*from (\.+)", path.read_text(errors="replace"), re.MULTILINE)
        while (folder / "__init__.py").is_file() or len(package) < len(max(levels, default="")):
            folder, package = folder.parent, [folder.name, *package]
    return folder, package


def _line(error: BaseException, file: str) -> str:
    path = Path(file).resolve()
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    lines = [line for name, line in places if Path(name).resolve() == path]
    return f":{lines[-1]}" if lines else ""
