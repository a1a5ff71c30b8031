"""Facts that decide the numbers of a run. Commands with equal facts continue each other's rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from stat import S_ISREG
from typing import Any

from attnbench.contract.plugins.discovery import libraries, provenance
from attnbench.contract.task import TASKS, HasFiles, make_task
from attnbench.errors import AttnbenchError
from attnbench.harness.plan import Plan, files_named
from attnbench.harness.wire.process import environment_for
from attnbench.measure.machine import variables
from attnbench.results.manifest import FRESH, digest
from attnbench.results.record import SCHEMA_VERSION
from attnbench.suite.cell import METHOD_VERSION, Cell
from attnbench.text import without_secrets

_MOST_FILES = 1000
_MOST_BYTES = 2**28


def identity(plan: Plan, machine_id: str) -> dict[str, Any]:
    """Everything that decides the numbers of a run, as ``environment.json`` shows it."""
    found = libraries(plan.options.plugins, trained=any(cell.pretrained is not None for cell in plan.cells))
    return {
        "method_version": METHOD_VERSION,
        "schema_version": SCHEMA_VERSION,
        "machine_id": machine_id,
        "threads": plan.settings.threads,
        "process": plan.settings.process,
        "rules": asdict(plan.rules),
        FRESH: "round",
        "clean": "run delay",  # older versions counted samples of threads that waited for a core
        "cells": digest("".join(sorted(cell.cell_id for cell in plan.cells))),
        **({"shard": str(plan.options.shard)} if plan.options.shard else {}),
        **({"unchecked": True} if plan.options.unchecked else {}),
        **({"repeats": plan.options.repeats} if plan.options.repeats else {}),
        **({"products": list(plan.settings.products)} if plan.settings.products else {}),
        "variables": variables(environment_for(plan.settings.threads)),
        "input_files": read_files(plan.cells),
        **({"libraries": found} if found else {}),
        "plugins": provenance(plan.options.plugins),
    }


def run_key(facts: dict[str, Any]) -> str:
    """A key that is equal for invocations with rows for one folder."""
    return digest(json.dumps(facts, sort_keys=True))


def read_files(cells: Sequence[Cell]) -> dict[str, str]:
    """Digests of all data that cells read, by a name without the user's home."""
    found = input_files(cells) | task_files(cells) | model_files(cells)
    return {without_secrets(name): one for name, one in found.items()}


def input_files(cells: Iterable[Cell]) -> dict[str, str]:
    """Digests of the files that options of variants or inputs name, by the name as written."""
    digests = {}
    for name in files_named(cells):
        with suppress(OSError), Path(name).expanduser().open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return digests


def task_files(cells: Iterable[Cell]) -> dict[str, str]:
    """Digests of the files of each task, by the task with every option that has a value.

    They cover names and contents; beyond a thousand files, or 256 MiB, names, sizes and times of last change instead: a
    change that keeps all three goes unseen, and a copy of the files begins a new run. The column ``data_digest`` always
    covers the contents. Files that are missing or refused have no digest; the rows of the task say so.
    """
    digests = dict[str, str]()
    for spec, shape in dict.fromkeys((cell.task, cell.shape) for cell in cells if cell.task is not None):
        with suppress(Exception):  # somebody else's task may raise anything, and its row will tell
            if (label := TASKS.get(spec.name).complete(spec).label) not in digests:
                task = make_task(spec, shape)
                files = list(task.files()) if isinstance(task, HasFiles) else []
                if files:
                    digests[label] = _digest_of(files)
    return digests


def model_files(cells: Iterable[Cell]) -> dict[str, str]:
    """Digests of each trained model's files and its text, by their names, as in :func:`task_files`."""
    models = list(dict.fromkeys(cell.pretrained for cell in cells if cell.pretrained is not None))
    if not models:
        return {}
    from attnbench.models.pretrained.loading import files_of  # not for the other suites: it brings what opens models

    digests = dict[str, str]()
    for model in models:
        with suppress(OSError, AttnbenchError):  # its rows will tell
            digests[model.name] = _digest_of(files_of(model.name))
            if model.text:
                digests[model.text] = _digest_of([Path(model.text).expanduser()])
    return digests


def _digest_of(files: Sequence[Path]) -> str:
    facts = [file.stat() for file in files]
    few = len(files) <= _MOST_FILES and sum(fact.st_size for fact in facts) <= _MOST_BYTES
    few = few and all(S_ISREG(fact.st_mode) for fact in facts)  # reading a pipe may take for ever
    whole = hashlib.sha256()
    for path, fact in zip(files, facts, strict=True):
        said = f"{fact.st_size}" if few else f"{fact.st_size} {fact.st_mtime_ns}"
        whole.update(f"{path}\0{said}\0".encode(errors="surrogateescape"))
        if few:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]
