from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["ATTNBENCH_PLUGINS"] = ""  # installed plug-ins must not decide a test
if not any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg")):
    # Kernels are interpreted. Only heeded before triton is imported, as torch does for the conftest.py of a folder.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from tests.pairwise import Case, covering, each_once

gc.disable()  # until tests are collected: nothing of what is imported is garbage, and to look takes a third of the time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background; children too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no":
        return  # it starts the processes that test, and they would wait for it to import torch
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # a driver without a GPU
    torch.set_num_threads(1)  # small tensors: a second thread waits more than it works


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, by what was missing, in place of a line for each place: the last thing before the count."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        terminalreporter.section("skipped, and what would run it", bold=True)
    for reason, times in sorted(reasons.items(), key=lambda item: (not item[0].startswith("needs"), item)):
        terminalreporter.write_line(f"{times:5} {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores to use, for a test waits a tenth of its time; up to eight: each imports torch."""
    return min(8, len(os.sched_getaffinity(0)) + 1)


@pytest.fixture
def forks() -> Iterator[None]:
    """For a test that is not about the start of the processes that it starts."""
    from tests.forked import forks

    with forks():
        yield


@pytest.fixture(scope="session", autouse=True)
def _steps() -> None:
    """A test follows a call to its end, and a run in it does not look who else is there, unless it says otherwise."""
    from attnbench.measure import flops, machine

    flops.STEPS, machine.LOOK = 10**6, 0.0


@pytest.fixture(scope="session", autouse=True)
def _buffered() -> Iterator[None]:
    """Nothing waits for a disk: a process that is killed loses nothing that it has written, a machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _has_a_core() -> Iterator[Any]:
    """No thread waits for a core, though the tests take each other's; a test that is about that says ``may_wait``."""
    from attnbench.measure.standstill import Moment

    with pytest.MonkeyPatch.context() as patch:
        counted = Moment.delay_until
        patch.setattr(Moment, "delay_until", lambda start, end: 0.0)
        yield counted


@pytest.fixture
def may_wait(_has_a_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that is about waiting for a core."""
    from attnbench.measure.standstill import Moment

    monkeypatch.setattr(Moment, "delay_until", _has_a_core)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    from attnbench.cli.screen import console

    console._out.cache_clear()  # rich asks how wide a terminal is once, and another test may have said
    console._err.cache_clear()
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # for a GPU that is not there torch would write down the whole stack, for milliseconds
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """A process of xdist says of a test that passes only that it did: to say more of 18,000 takes seconds."""
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "sendevent"):
            plugin.sendevent = partial(_send, plugin.sendevent)


def _send(send: Callable[..., None], event: str, **given: Any) -> None:
    report = given.get("data", {})
    report |= {"keywords": {}} if "keywords" in report else {}  # the longest part of a report; nobody reads it
    is_part = report.get("when") in ("setup", "teardown") and report["outcome"] == "passed" and report["duration"] < 0.1
    if not is_part and event not in ("logstart", "logfinish"):
        send(event, **given)


_seen = {"modules": 0, "tests": 0}


def pytest_runtest_setup() -> None:
    """What was imported is no garbage. Measuring memory or work looks for that first, 0.3 s in all that torch makes."""
    _seen["tests"] += 1
    stays = _seen["tests"] % 100 == 0  # of what hundreds of tests leave in torch and pytest a million objects stay
    if stays:
        gc.collect()
    if stays or len(sys.modules) > _seen["modules"]:  # what tests import late, such as the compiler, is large as well
        gc.freeze()
        _seen["modules"] = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for cases in _products_of_axes(items):
        independent = any(item.get_closest_marker("independent") for item in cases.values())
        chosen = (each_once if independent else covering)(list(cases))
        for case in cases.keys() - chosen:
            cases[case].add_marker(pytest.mark.slow)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


def _products_of_axes(items: list[pytest.Item]) -> Iterable[dict[Case, pytest.Item]]:
    """The items of each test that has three or more axes, or some that are independent, by their value on each."""
    found: dict[str, dict[Case, pytest.Item]] = {}
    for item in items:
        given: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        axes = [_names(mark) for mark in item.iter_markers("parametrize")]
        axes += [[name] for name in given if not any(name in names for names in axes)]  # of fixtures
        if (len(axes) > 2 or item.get_closest_marker("independent")) and not item.get_closest_marker("slow"):
            case = tuple(tuple(id(given[name]) for name in names) for names in axes)  # values need not have a hash
            found.setdefault(item.nodeid.partition("[")[0], {})[case] = item
    return found.values()


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
