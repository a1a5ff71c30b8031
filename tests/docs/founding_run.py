"""Runs every command of the page of the founding documents to its end: ``python -m tests.docs.founding_run``.

Takes an hour or two. The record stands in docs/data/founding-run.json. What is there already is not run again, so the
same command resumes. Name parts of commands to run those alone, and anew. A command whose rows
are those of a committed run counts as run.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attnbench.answers.claims.claims import claims
from attnbench.cli.claims import _mentions
from tests.docs import making
from tests.docs.making import HERE

RECORD = HERE / "docs/data/founding-run.json"
FINDS_A_FAULT = ("AttentionLSTM", "PerformerLM", "LinformerAttention")
"""Modules that are not what their names say: ``check`` must end with 1."""


def wanted_exit(command: str) -> int:
    """The exit status of a command that shows what its row says."""
    return int(any(name in command for name in FINDS_A_FAULT))


def commands() -> list[str]:
    """Every command of the page, once."""
    sys.path.insert(0, str(HERE / "docs"))
    founding = importlib.import_module("generators.founding")
    rows = [row for rows in founding.documents().values() for row in rows]
    return list(dict.fromkeys(row.command for row in rows if row.command))


def record() -> dict[str, dict[str, Any]]:
    """Command -> when it was run, how long it took, and how it ended."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def committed() -> dict[str, dict[str, Any]]:
    """Commands whose rows are those of committed runs, by these runs: ``run SUITE``, and claims that they decide."""
    sys.path.insert(0, str(HERE / "docs"))
    known = {command: [name] for name, command in importlib.import_module("generators.runs").ORIGIN.items()}
    judged = importlib.import_module("generators.claims")
    for command in commands():
        chosen = command.removeprefix("attnbench claims --run -k ")
        if chosen != command:
            about = [claim for claim in claims() if _mentions(claim, chosen)]
            read = [judged.read_by(claim) for claim in about]
            if all(read):
                known[command] = sorted({name for names in read for name in names})
    return {
        command: {"date": max(making.made(name).partition(",")[0] for name in names), "runs": names, "exit": 0}
        for command, names in known.items()
        if command in commands() and all((making.RUNS / name).is_dir() for name in names)
    }


def run(command: str, folder: Path, printed: Path) -> dict[str, Any]:
    """Run one command as somebody who types it in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tests").exists():
        (folder / "tests").symlink_to(HERE / "tests")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    began = time.monotonic()
    with printed.open("w", encoding="utf-8") as file:
        done = subprocess.run(shlex.split(command), cwd=folder, env=environment, stdout=file, stderr=file, check=False)
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "seconds": round(time.monotonic() - began),
        "exit": done.returncode,
    }


def main(parts: list[str]) -> None:
    """Run what has no record yet, or the commands that hold one of these parts."""
    folder = HERE / "build/founding"
    known = committed()
    for number, command in enumerate(commands()):
        if any(part in command for part in parts) if parts else command not in record():
            print(command, flush=True)
            printed = folder / f"{number:02}.txt"
            found = known.get(command) or run(command, folder, printed)
            print(f"  {found}", printed if printed.exists() else "", flush=True)
            if found["exit"] == wanted_exit(command):
                told = json.dumps({**record(), command: found}, indent=1, sort_keys=True, ensure_ascii=False)
                RECORD.write_text(told + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
