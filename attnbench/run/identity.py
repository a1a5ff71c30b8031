"""What decides the numbers of a run: two commands that agree in it go on with one another's rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnbench.cell import METHOD_VERSION, Cell
from attnbench.plugins import provenance
from attnbench.record import SCHEMA_VERSION
from attnbench.run.plan import Plan
from attnbench.run.process import environment_for

_ARITHMETIC = re.compile(
    r"(ATEN|CUBLAS|CUDNN|DNNL|GOMP|KMP|MALLOC|MKL|NVIDIA_TF32|OMP|ONEDNN|OPENBLAS|PYTORCH|TORCH|TORCHINDUCTOR|VECLIB)_.*"
    r"|LD_PRELOAD"
)
_NO_ARITHMETIC = re.compile(r".*(VERBOSE|LOGS?|DISPLAY|SETTINGS|HOME|DIR|PATH)(_.*)?")
"""Among those: what is printed, and where files lie."""


def identity(plan: Plan, machine_id: str) -> dict[str, Any]:
    """Everything that decides the numbers of a run, as ``environment.json`` shows it."""
    return {
        "method_version": METHOD_VERSION,
        "schema_version": SCHEMA_VERSION,
        "machine_id": machine_id,
        "threads": plan.settings.threads,
        "process": plan.settings.process,
        "rules": asdict(plan.rules),
        "cells": _digest("".join(sorted(cell.cell_id for cell in plan.cells)).encode()),
        "variables": variables(environment_for(plan.settings.threads)),
        "input_files": input_files(plan.cells),
        "plugins": provenance(plan.options.plugins),
    }


def run_key(facts: dict[str, Any]) -> str:
    """Equal for two invocations whose rows may stand in one folder."""
    return _digest(json.dumps(facts, sort_keys=True).encode())


def variables(environment: dict[str, str]) -> dict[str, str]:
    """Those variables that change how, or how fast, the libraries below torch compute."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _ARITHMETIC.fullmatch(name) and not _NO_ARITHMETIC.fullmatch(name)
    }


def input_files(cells: Iterable[Cell]) -> dict[str, str]:
    """The digest of each file that an option of a cell's variant or inputs names, by the name as it is written."""
    specs = {spec for cell in cells for spec in (cell.variant, cell.inputs)}
    names = sorted({value for spec in specs for _, value in spec.options if isinstance(value, str)})
    digests = {}
    for name in names:
        with suppress(OSError, ValueError, RuntimeError):  # not the name of a file at all
            path = Path(name).expanduser()
            if path.is_file():
                with path.open("rb") as file:
                    digests[name] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return digests


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
