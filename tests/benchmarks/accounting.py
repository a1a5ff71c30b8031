"""A plug-in that notes in the file $ACCOUNTING when a run measures first, and how long calls took so far.

A line is ``[seconds since the epoch, seconds in calls of cells, in calls that measure the machine, in laws, process]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

spent = {"cells": 0.0, "machine": 0.0, "laws": 0.0}


def note() -> None:
    with Path(os.environ["ACCOUNTING"]).open("a") as file:
        file.write(json.dumps([time.time(), *spent.values(), os.getpid()]) + "\n")


def timed(call: Callable[..., Any], on: str) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **named)
        finally:
            spent[on] += time.perf_counter() - start

    return run


def noted(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **named: Any) -> Any:
        note()
        try:
            return call(*args, **named)
        finally:
            note()

    return run


def account() -> None:
    import attnbench.harness.inside.execute as execute
    import attnbench.harness.inside.pairs as pairs
    import attnbench.laws as laws
    import attnbench.laws.exact_error as error
    import attnbench.measure.limits as limits
    import attnbench.measure.yardstick as yardstick

    real_prepare, real_build = execute.prepare, error.build

    def prepare(*args: Any, **named: Any) -> execute.Call:
        call = real_prepare(*args, **named)
        return replace(call, run=timed(call.run, "cells"), on=lambda number: timed(call.on(number), "cells"))

    def build(*args: Any, **named: Any) -> Any:
        module = real_build(*args, **named)
        module.forward = timed(module.forward, "cells")
        return module

    execute.prepare, error.build = prepare, build
    execute.run_cell = noted(execute.run_cell)
    laws.first_fault = timed(laws.first_fault, "laws")
    yardstick.Yardstick.read = timed(yardstick.Yardstick.read, "machine")
    for module, name in (
        (pairs, "measure_noise"),
        (limits, "matmul_rate"),
        (limits, "windows_rate"),
        (limits, "exp_rate"),
        (limits, "copy_rates"),
    ):
        setattr(module, name, noted(timed(getattr(module, name), "machine")))


if (
    "attnbench.harness.inside.execute" in sys.modules
):  # the process that measures; the command itself has no use for all that
    account()
