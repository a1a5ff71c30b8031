"""``environment.json``: the facts that a run states of itself, with a checksum of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.errors import CorruptResults
from attnbench.files import replace_file
from attnbench.text import one_line

SEAL = "seal"
"""Key of the checksum of a line or of the facts."""
OPENING, ENDS, RUN_ID = "opening", "ends", "run_id"
"""Facts: beginning of the chains of checksums in a run of schema 2, lines and digest of each file when the run was
complete, and digits of no other run."""
ENGINE, TOGETHER = "engine", "together"
"""Facts of a run that an engine shared out among machines: the engine, and the mark that the run folders of one
command have in common. Machines may join such a run while it goes on, so its list of machines may grow."""
BESIDE = "beside"
"""Fact of a run that took turns with one of another environment: the Python of that one, or the id of its run."""
THINNED = "thinned"
"""Fact of a run that was handed in without its samples and curves: lines and digest of each file of the whole run. A
merged run has a list of these."""
FRESH = "fresh_process"
"""Fact of a run: the unit that begins in a fresh process, a ``round``. Runs of older versions lack it."""


def read_manifest(file: Path) -> dict[str, Any]:
    """The facts in ``file``, without the checksum. Raises CorruptResults: it is missing, damaged, or was changed."""
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
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptResults(f"{file}: {one_line(str(error), 100)}; restore it or start with --fresh") from None
    return data


def write_manifest(file: Path, facts: Mapping[str, Any]) -> None:
    """Replace the facts. Raises OSError."""
    sealed = {**facts, SEAL: digest(json.dumps(facts, sort_keys=True))}
    replace_file(file, json.dumps(sealed, indent=2) + "\n")


def of_machines(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of a run on several machines, with the first one's id and the largest noise floor."""
    ids = list(dict.fromkeys(str(machine.get("machine_id", "")) for machine in machines))
    floors = [machine["noise_floor"] for machine in machines if machine.get("noise_floor") is not None]
    return {
        "machines": machines,
        "machine_id": ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more",
        "noise_floor": max(floors, default=None),
    }


def run_ids(facts: Mapping[str, Any]) -> list[str]:
    """The ids of the run with these facts and of those that are merged in it; runs of old versions have none."""
    ids = [one.get(RUN_ID) or one.get(OPENING) for one in (facts, *facts.get("machines", ()))]
    return [str(one) for one in ids if one]


def is_sealed(facts: Mapping[str, Any]) -> bool:
    """True if the lines of the run have checksums: all have since schema 2."""
    return "schema_version" in facts


def digest(text: str | bytes) -> str:
    """Sixteen hex digits."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]
