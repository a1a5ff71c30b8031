"""What each machine is told before it measures, files, settings and rules, and whether it may take part."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from attnbench import __version__
from attnbench.cell import Cell
from attnbench.record import one_line
from attnbench.run.many.engine import Message
from attnbench.run.plan import Plan


@dataclass(frozen=True, slots=True)
class Order:
    """The same for all machines of a run."""

    hello: dict[str, Any]
    """Told first: what decides whether a machine may take part."""
    _settings: dict[str, Any]
    _rules: dict[str, Any]

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """What a plan says of it. Files are named as here, in the folder that is the current one here."""
        folder = Path.cwd()
        plugins = [str(folder / source) if source.endswith(".py") else source for source in plan.options.plugins]
        hello = {
            "folder": str(folder),
            "threads": plan.options.threads,
            "plugins": plugins,
            "cells": [cell.to_json() for cell in _with_files(plan)],
        }
        settings = {
            "device": plan.settings.device,
            "process": plan.settings.process,
            "memory_limit": plan.options.memory_limit,
            "plugins": plugins,
            "files": list(plan.settings.files),
            "products": plan.settings.products and list(plan.settings.products),
            "dtypes": list(plan.settings.dtypes),
            "models": list(plan.settings.models),
            "first_call_timeout": plan.settings.first_call_timeout,
        }
        how = {"cell_timeout": plan.options.cell_timeout, "unchecked": plan.options.unchecked}
        return cls(hello, settings, {"rules": asdict(plan.rules), **how})

    def begin(
        self, threads: int, known: Mapping[str, Any] | None, products: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Told to a machine that may take part.

        Args:
            threads: the machine's.
            known: what it said of itself when it took part before; None where it did not.
            products: the libraries that such machines multiply with; None where it is to find out.
        """
        products = self._settings["products"] or products
        settings = {**self._settings, "threads": threads, "products": products and list(products)}
        return {**self._rules, "settings": settings, "known": known and dict(known)}


def _with_files(plan: Plan) -> list[Cell]:
    """Cells that may read files, one for each variant, input, task and trained model that does."""
    found: dict[object, Cell] = {}
    for cell in plan.cells:
        for spec in (cell.variant, cell.inputs):
            if any(isinstance(value, str) for _, value in spec.options):
                found.setdefault(spec, cell)
        if cell.task is not None:
            found.setdefault((cell.task, cell.shape), cell)
        if cell.pretrained is not None:
            found.setdefault(cell.pretrained, cell)
    return list(found.values())


def ours(base: Mapping[str, Any]) -> dict[str, Any]:
    """What every machine must have.

    Args:
        base: the run's identity, as :func:`attnbench.run.identity.identity` gives it.
    """
    return {
        "attnbench": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "input_files": base["input_files"],
        "plugins": base["plugins"],
    }


def misfit(facts: Message, wanted: Mapping[str, Any]) -> str:
    """Why a machine cannot take part, in one line with the remedy; empty where it can.

    Args:
        facts: what the machine says when it is asked first.
        wanted: as :func:`ours` gives it.
    """
    for name, parts in (("attnbench", 3), ("torch", 3), ("python", 2)):
        theirs, here = (_release(one[name], parts) for one in (facts, wanted))
        if theirs != here:
            return f"it has {name} {one_line(theirs, 40)}, the driver {here}; install the same version on all machines"
    if facts["niceness"] > facts["niceness_of_parent"]:
        levels = facts["niceness"] - facts["niceness_of_parent"]
        return (
            f"the engine runs its processes {levels} levels nicer, so anything else there goes first; set "
            "RAY_worker_niceness=0 before ray start"
        )
    for name in sorted(facts["input_files"].keys() | wanted["input_files"].keys()):
        theirs, here = facts["input_files"].get(name), wanted["input_files"].get(name)
        if theirs != here:
            how = "is missing there" if theirs is None else "has other contents there"
            return f"{one_line(name, 80)} {how}; put the same file at the same place on all machines"
    if sorted(facts["plugins"].values()) != sorted(wanted["plugins"].values()):
        return "its plug-ins are not those of the driver; install the same on all machines"
    return ""


def _release(text: str, parts: int) -> str:
    """``2.13.0+cpu`` -> ``2.13.0``: the build for a GPU and the one without are one version."""
    return ".".join(str(text).partition("+")[0].split(".")[:parts])
