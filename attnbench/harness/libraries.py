"""Choose the matrix-product libraries: reuse an older run's choice instead of probing again.

If two libraries are about as fast, probes disagree from day to day, and rows of different libraries are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from attnbench.errors import CorruptResults, ResultsError, UsageError
from attnbench.harness.wire.process import Process, Products
from attnbench.measure.machine import class_facts, describe, products_of
from attnbench.results.runs import find_runs, newest_run
from attnbench.results.store import RunFolder
from attnbench.text import one_line

_MACHINE = ("processor", "instructions", "system", "torch")


def products_like(path: Path, *, device: str, process: Process) -> Products:
    """The libraries of the run after ``--like``: a run's folder, or a suite's for its newest run.

    Raises UsageError without such a run, if it lacks its libraries or is of another machine, or if none are chosen
    here; CorruptResults if it is damaged.
    """
    if device != "cpu" or process != "tuned":
        raise UsageError("--like is for the tuned process on a CPU, where a library is chosen; leave it out")
    try:
        folder = newest_run(path)
    except ResultsError as error:
        raise UsageError(f"--like {error}") from None
    except OSError as error:
        said = f"--like {one_line(str(path))}: cannot be read ({error.strerror}); give the folder of a run"
        raise UsageError(said) from None
    environment = folder.environment
    chosen = _chosen(environment)
    if chosen is None:
        raise UsageError(f"--like {path}: the run does not tell which libraries multiplied; leave --like out")
    here, there = class_facts({"environment": describe(device)}), class_facts(environment)
    differ = [name for name in _MACHINE if name in here.keys() & there.keys() and here[name] != there[name]]
    if differ:
        said = "; ".join(f"{name} {there[name]}, here {here[name]}" for name in differ)
        raise UsageError(f"--like {path}: measured on another machine ({said}); leave --like out")
    return chosen


def products_before(folder: RunFolder) -> Products | None:
    """The libraries of the rows in ``folder``, else of the suite's newest other run on such a machine; None for a
    probe."""
    environment = folder.environment
    if (own := _chosen(environment)) is not None:
        return own
    facts = {**environment, "environment": describe("cpu")}
    for other in reversed(find_runs(folder.path.parent)):
        with suppress(CorruptResults):  # whoever reads that run is told
            before = other.environment
            chosen = _chosen(before)
            if chosen is not None and class_facts(before) == class_facts(facts):
                return chosen
    return None


def _chosen(environment: Mapping[str, Any]) -> Products | None:
    found = products_of(environment)
    known = found.keys() == set(Products._fields) and set(found.values()) <= {"default", "oneDNN"}
    known = known and environment.get("process") == "tuned"  # as shipped there is no choice
    return Products(**cast("dict[str, Any]", found)) if known else None
