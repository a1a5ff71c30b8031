"""Commands and measuring processes as forks of the process that tests: a new Python imports torch for seconds.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from PIL import Image
from rich.cells import cell_len

from attnbench.cli.screen import console
from attnbench.contract.inputs import INPUTS
from attnbench.contract.plugins import discovery as plugins
from attnbench.contract.plugins.foreign import module_name
from attnbench.contract.task import TASKS
from attnbench.contract.variant import VARIANTS
from attnbench.harness import plan
from attnbench.harness.compare import compare_question
from attnbench.harness.inside import traces, worker
from attnbench.harness.outside.isolation import Worker
from attnbench.harness.swap import request
from attnbench.measure import flops, machine

_PYTHON = sys.executable
"""As it is before a test puts another program in its place."""

_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]  # what one may override

_LATE = (
    *(f"attnbench.cli.{file.stem}" for file in sorted(Path(console.__file__).parents[1].glob("[a-z]*.py"))),
    *(f"attnbench.cli.screen.{file.stem}" for file in sorted(Path(console.__file__).parent.glob("[a-z]*.py"))),
    *(
        f"attnbench.harness.{name}"
        for name in (
            *("compare.compare", "inside.execute", "outside.law_requests", "wire.protocol", "runner"),
            "inside.traces",
        )
    ),
    *(
        "attnbench.figures",
        "attnbench.harness.score.score",
    ),
    "attnbench.api.functions",
    *("attnbench.answers.match.match", "attnbench.laws", "pandas", "rich.progress", "rich.table"),
    *(
        "attnbench.figures.catalogue",
        "attnbench.results.read",
        "attnbench.figures.kit.page",
        "matplotlib.backends.backend_svg",
    ),
    *(
        "attnbench.figures.pictures.picture",
        "attnbench.laws.modules.summary",
        "attnbench.results.lock",
        "matplotlib.style.core",
    ),
    *("pyarrow.pandas_compat", "scipy.special", "attnbench.answers.report.html_page"),
)
"""What commands and measuring processes import when they need it."""


_PLUGIN = module_name(Path("/"))
"""How the name of such a module begins."""


@contextmanager
def forks(watched: bool = False) -> Iterator[None]:
    """Commands that are started here, and what they measure with, are forks of this process.

    Only where they are ``watched`` does a measuring process look for functions that a cell has replaced: each object
    that it looks at is memory that a fork no longer shares.

    A measuring process takes over the limits of a machine instead of measuring them for seconds, and has one thread: a
    fork of a process whose torch has used several threads waits for ever once it uses several itself. One of several
    threads is a process of its own.
    """
    load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Forked)
        patch.setattr(Worker, "_set_up", _set_up)
        if not watched:
            patch.setattr(traces, "functions", dict)
        patch.setattr(traces, "threads_of_torch", frozenset)  # which starts them
        for module in (machine, plan, compare_question, request):
            patch.setattr(module, "default_threads", lambda: 1)
        yield


@cache
def load() -> tuple[list[str], str]:
    """Import here what otherwise every fork of this process would import.

    Returns:
        The modules that are files of plug-ins, and the last of all modules.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _LATE:
            import_module(name)
        for table in (VARIANTS, INPUTS, TASKS):
            table.names()
        flops.predict(lambda: lambda: torch.ones(1) + 1)  # loads what torch traces with
        cell_len("—")  # loads how wide each character is
        Image.preinit()  # what figures are saved with
    return [name for name in sys.modules if name.startswith(_PLUGIN)], next(reversed(sys.modules))


_HANDLED = (signal.SIGTERM, signal.SIGALRM, signal.SIGINT)
"""What commands and tests handle; a process that is told to end as soon as it was started must end in silence."""

_RATES = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 1e13)
_MACHINE = {
    "float32_products": "default",
    "window_products": "default",
    "timer_cost_s": 1e-7,
    "noise_floor": 0.02,
    "matmul_rate": _RATES,
    "exp_rate": _RATES,
    "copy_rates": [[1 << power, 1e12] for power in range(18, 28, 3)],
}
"""What a measuring process would find out about the machine, in two seconds."""

_measured = Worker._set_up


def _set_up(process: Worker) -> Any:
    """Set the process up as one that is started again, which takes over what the first one found."""
    process.state = process.state or _MACHINE  # type: ignore[assignment]  # the part of it that is taken over
    return _measured(process)


class Forked(subprocess.Popen[Any]):
    """A process; one that runs a command of ours or a text in Python is a fork of this one that is made like new.

    Whatever a test has patched stays patched in it.
    """

    def _execute_child(self, *arguments: Any) -> None:
        asked = _SIGNATURE.bind(self, *arguments).arguments
        if not _is_ours(asked["args"], asked["env"] or os.environ):
            super()._execute_child(*arguments)  # type: ignore[misc]  # as above
            return
        awaited = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # by handlers that are not the new process's own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads than this one only read pipes
            self.pid = os.fork()
        if not self.pid:
            _live(asked, awaited)
        signal.pthread_sigmask(signal.SIG_SETMASK, awaited)
        self._child_created = True
        ends = (asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        self._close_pipe_fds(*ends)  # type: ignore[attr-defined]  # as above


def _is_ours(command: Any, environment: Mapping[str, str]) -> bool:
    if not isinstance(command, list) or command[:1] != [_PYTHON]:
        return False
    rest = _words(command)
    if rest[:2] == ["-m", "attnbench.harness.inside.worker"]:
        return environment["OMP_NUM_THREADS"] == "1"
    return rest[:1] == ["-c"] or rest[:2] == ["-m", "attnbench"]


def _words(command: list[str]) -> list[str]:
    """What follows the options of Python of which :func:`_begin` takes care."""
    return [word for word in command[1:] if word not in ("-P", "-W", "error")]


def _live(asked: dict[str, Any], awaited: set[signal.Signals]) -> NoReturn:
    code = 255
    try:
        for number in _HANDLED:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, awaited)
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
    warnings.resetwarnings()
    warnings.simplefilter("error") if "-W" in asked["args"] else warnings.simplefilter("ignore", DeprecationWarning)
    encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding=encoding, errors=errors, closefd=False) if _is_open(number) else None  # noqa: SIM115  # lasts
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "backslashreplace"))
    )
    console._out.cache_clear()  # which has asked the environment
    console._err.cache_clear()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="replace")  # as it does when it is imported
    for table in (VARIANTS, INPUTS, TASKS):
        table.names()  # filled from home before
        for name, entry in list(table._entries.items()):  # type: ignore[attr-defined]  # of three kinds
            if not entry.make.__module__.startswith("attnbench."):
                del table._entries[name]  # type: ignore[attr-defined]  # as above
    for name in [*plugins._modules, *_of_plugins()]:
        sys.modules.pop(name, None)
    plugins._modules.clear()
    if asked := sys.modules.get("attnbench.laws.modules.probed_module"):
        asked.subject_of.cache_clear()  # of modules that are gone now
    torch.set_num_threads(1)
    gc.freeze()  # else the first collection looks through all that pytest holds


def _of_plugins() -> list[str]:
    """The modules that are files of plug-ins. Each name that is looked at is a piece of memory no longer shared."""
    before, last = load()
    since = takewhile(lambda name: name != last, reversed(sys.modules))
    return before + [name for name in since if name.startswith(_PLUGIN)]


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
        elif words[1] == "attnbench.harness.inside.worker":
            worker.main()
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
