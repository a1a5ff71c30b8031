"""``environment.json``: what a run says of itself, under a seal; and where its chains of seals begin and end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnbench.errors import CorruptResults
from attnbench.files import read_stored, replace_file, stored
from attnbench.record import SEAL, one_line

OPENING, ENDS, RUN_ID = "opening", "ends", "run_id"
"""Facts: with what the chains of a run begin, where they ended when it was complete, and digits of no other run."""
ENGINE, TOGETHER = "engine", "together"
"""Facts of a run that an engine shared out among machines: which engine, and what the run folders of one command have
in common. Machines may join such a run while it goes on, so its list of machines may grow."""
FRESH = "fresh_process"
"""Fact of a run: with what a fresh process begins, a ``round``. Runs of older versions lack it."""
_BEGINS_WITH = (
    *("attnbench", "run_key", "method_version", "schema_version", "threads", "rules", "cells", "shard", "variables"),
    *("input_files", "plugins", "started_at", "folder", "suite_digest", "machines", ENGINE, TOGETHER, RUN_ID, FRESH),
)
"""Facts that are known before the first row and never change. The machine is among them by the run's key."""


def read_manifest(file: Path) -> dict[str, Any]:
    """The facts in ``file``, without the seal.

    Raises:
        CorruptResults: it is missing, damaged, or was changed after the run.
    """
    try:
        if not file.is_file():
            raise ValueError("there is no such file")
        data = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is not an object")
        seal = data.pop(SEAL, None)
        whole = (digest(json.dumps(data, sort_keys=True)), digest(json.dumps(data)))  # the second is of older versions
        if seal not in whole and (seal is not None or is_sealed(data)):
            raise ValueError("it was changed after the run")
        if seal is None:  # older than what stands here: nobody vouches for it
            data = {name: fact for name, fact in data.items() if name not in (OPENING, ENDS, "machines", ENGINE)}
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptResults(f"{file}: {one_line(str(error), 100)}; restore it or start with --fresh") from None
    return data


def write_manifest(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace the facts.

    Raises:
        OSError: they cannot be written.
    """
    sealed = {**facts, SEAL: digest(json.dumps(facts, sort_keys=True))}
    replace_file(file, json.dumps(sealed, indent=2) + "\n")


def with_opening(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a new run, and a digest of those that never change: its chains of seals begin with it."""
    grows = {"machines"} if ENGINE in facts else set()
    kept = {name: facts[name] for name in _BEGINS_WITH if name in facts and name not in grows}
    return {**facts, OPENING: digest(json.dumps(kept, sort_keys=True))}


def is_sealed(facts: Mapping[str, Any]) -> bool:
    """Whether the rows of the run have seals: all have that were begun since there are seals."""
    return OPENING in facts or "schema_version" in facts


def doubts(folder: Path, facts: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What the facts say against themselves, and against the JSON-lines files of these names; one line each."""
    said = []
    if OPENING in facts and with_opening(facts)[OPENING] != facts[OPENING]:
        said.append(f"{folder}: facts were changed with which the seals of its rows begin")
    ends = facts.get(ENDS)
    if not isinstance(ends, dict):
        return said
    for name in names:
        file, wanted = folder / name, ends.get(name, {}).get("lines", 0)
        lines = 0
        with suppress(ValueError):  # the journal tells of damage
            lines = read_stored(file).count(b"\n") if stored(file).is_file() else 0
        if lines != wanted:
            count = f"{abs(wanted - lines)} line{'s' * (abs(wanted - lines) > 1)}"
            said.append(
                f"{file}: {count} {'lost' if lines < wanted else 'added after the run was complete'}; restore it"
            )
    return said


def digest(text: str | bytes) -> str:
    """Sixteen hex digits."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]
