"""Commands in forks of the process that tests: milliseconds, where a new Python imports torch for seconds.

For tests in which the start of a process is not the subject; they say ``usefixtures("forks")``.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, reload
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from attnbench import plugins
from attnbench.cli import console
from attnbench.measure import flops
from attnbench.qkv import INPUTS
from attnbench.task import TASKS
from attnbench.variant import VARIANTS

_PYTHON = sys.executable
"""As it is before a test puts another program in its place."""

_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]  # what one may override

_LATE = (
    *(f"attnbench.cli.{name}" for name in ("check", "compare", "list_", "plan", "run", "screen", "show")),
    *(f"attnbench.run.{name}" for name in ("compare", "laws", "protocol", "runner", "scoring", "traces")),
    *("attnbench.attention", "attnbench.inputs", "attnbench.plots", "attnbench.tasks", "attnbench.training.score"),
    *("pandas", "rich.progress", "rich.table"),
)
"""What commands and measuring processes import when they need it."""


@contextmanager
def forks() -> Iterator[None]:
    """Commands that are started here are forks of this process. What they measure with is a process of its own.

    A fork of a process whose torch has used several threads waits for ever once it uses several itself.
    """
    _load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        yield


@cache
def _load() -> None:
    """Import here what otherwise every fork would import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _LATE:
            import_module(name)
        flops.predict(lambda: lambda: torch.ones(1) + 1)  # loads what torch traces with


class Forked(subprocess.Popen[Any]):
    """A process; one that runs a command of ours or a text in Python is a fork of this one that is made like new.

    Whatever a test has patched stays patched in it.
    """

    def _execute_child(self, *arguments: Any) -> None:
        asked = _SIGNATURE.bind(self, *arguments).arguments
        if not _is_ours(asked["args"]):
            super()._execute_child(*arguments)  # type: ignore[misc]  # as above
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads than this one only read pipes
            self.pid = os.fork()
        if not self.pid:
            _live(asked)
        self._child_created = True
        ends = (asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]  # as above


def _is_ours(command: Any) -> bool:
    if not isinstance(command, list) or command[:1] != [_PYTHON]:
        return False
    rest = _words(command)
    return rest[:1] == ["-c"] or rest[:2] == ["-m", "attnbench"]


def _words(command: list[str]) -> list[str]:
    """What follows the options of Python of which :func:`_begin` takes care."""
    return [word for word in command[1:] if word not in ("-P", "-W", "error")]


def _live(asked: dict[str, Any]) -> NoReturn:
    code = 255
    try:
        _begin(asked)
        code = _end(_words(asked["args"]))
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _begin(asked: dict[str, Any]) -> None:
    """Streams, signals, warnings, folder and environment of a new process, and nothing that tests have registered."""
    if asked["start_new_session"]:
        os.setsid()
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if asked[name] != -1:
            os.dup2(asked[name], number)
    if asked["preexec_fn"] is not None:
        asked["preexec_fn"]()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if asked["cwd"] is not None:
        os.chdir(asked["cwd"])
    if asked["env"] is not None:
        os.environ.clear()
        os.environ.update(asked["env"])
    if "-P" not in asked["args"]:
        sys.path[:0] = [str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    faulthandler.disable()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    warnings.simplefilter("error") if "-W" in asked["args"] else warnings.simplefilter("ignore", DeprecationWarning)
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding=encoding, errors=errors, closefd=False) if _is_open(number) else None  # noqa: SIM115  # lasts
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    )
    reload(console)  # which asks the environment
    for table in (VARIANTS, INPUTS, TASKS):
        table.names()  # filled from home before
        for name, entry in list(table._entries.items()):  # type: ignore[attr-defined]  # of three kinds
            if not entry.make.__module__.startswith("attnbench."):
                del table._entries[name]  # type: ignore[attr-defined]  # as above
    for name in [*plugins._modules, *(name for name in sys.modules if name.startswith("attnbench_plugin_"))]:
        sys.modules.pop(name, None)
    plugins._modules.clear()
    torch.set_num_threads(1)
    gc.freeze()  # else the first collection looks through all that pytest holds


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _end(words: list[str]) -> int:
    """Do what Python would with these arguments, and return the exit code."""
    sys.argv = ["-c", *words[2:]] if words[0] == "-c" else words
    try:
        if words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            from attnbench.cli.app import main

            sys.exit(main(words[2:]))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
