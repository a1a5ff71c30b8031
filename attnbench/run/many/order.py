"""What each machine is told before it measures: files, settings, rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from attnbench.cell import Cell
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
            "products": plan.settings.products and list(plan.settings.products),
            "dtypes": list(plan.settings.dtypes),
            "models": list(plan.settings.models),
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
