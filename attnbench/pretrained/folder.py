"""Where the rows of a swap are kept: a folder that the same command finds again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from attnbench import __version__
from attnbench.errors import CannotCreate, CorruptResults, StoreError
from attnbench.files import make_folder, refuse_link, refuse_other_than_file, replace_file, unpack
from attnbench.journal import Journal
from attnbench.lock import held
from attnbench.manifest import OPENING, RUN_ID, read_manifest, with_opening, write_manifest
from attnbench.pretrained.row import Row, csv_of
from attnbench.runs import by_age, suite_folder
from attnbench.store import ENVIRONMENT

ROWS, TABLE = "swap.jsonl", "swap.csv"


class SwapFolder:
    """Rows of one model, one text and one way to train; further variants, layers and seeds may join them.

    Raises:
        CannotCreate: it cannot be made, or a link stands in its place.
        StoreError: a row cannot be written.
        Locked: another process writes here.
        CorruptResults: a line is not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal = Journal(path / ROWS, str(read_manifest(path / ENVIRONMENT).get(OPENING, "")))

    @contextmanager
    def lock(self) -> Iterator[list[Row]]:
        """Lock the folder against other processes, and give the rows that are there."""
        refuse_link(self.path)
        refuse_other_than_file(self.path / ROWS)
        with held(self.path):
            for name in (ROWS, TABLE):
                unpack(self.path / name)
            try:
                yield self._rows(self._journal.open().rows)
            finally:
                self._journal.close()

    def rows(self) -> list[Row]:
        """The rows that are there."""
        return self._rows(self._journal.read().rows)

    def _rows(self, lines: list[dict[str, Any]]) -> list[Row]:
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Row.from_json(line))
            except (TypeError, ValueError, KeyError) as error:
                raise CorruptResults(
                    f"{self.path / ROWS}:{number}: not a row of this version ({error}); restore it or use --fresh"
                ) from None
        return found

    def add(self, row: Row) -> None:
        """Append one row."""
        self._journal.append([row.to_json()])

    def write_csv(self, rows: list[Row]) -> None:
        """Replace the table."""
        try:
            replace_file(self.path / TABLE, csv_of(rows))
        except OSError as error:
            raise StoreError(f"cannot write {self.path / TABLE}: {error.strerror}; {ROWS} is intact") from error


def folder_for(out: Path, identity: Mapping[str, Any], *, fresh: bool, warn: Callable[[str], None]) -> SwapFolder:
    """The newest folder below ``out`` whose rows had the same ``identity``; a new one if there is none.

    Args:
        identity: everything that decides the numbers, but which variants, layers and seeds are asked for.
        fresh: make a new one in any case.
        warn: is told of folders that cannot be read.

    Raises:
        CannotCreate: it cannot be made.
    """
    found = None if fresh else known_folder(out, identity, warn)
    return found or _new(suite_folder(out, "swap"), _key(identity), identity)


def known_folder(out: Path, identity: Mapping[str, Any], warn: Callable[[str], None]) -> SwapFolder | None:
    """The newest folder below ``out`` whose rows had the same ``identity``; None if there is none.

    Args:
        warn: is told of folders that cannot be read.
    """
    root, key = suite_folder(out, "swap"), _key(identity)
    for path in reversed(by_age(file.parent for file in root.glob(f"*/{ENVIRONMENT}"))):
        try:
            environment = read_manifest(path / ENVIRONMENT)
        except CorruptResults as error:
            warn(f"{error}; these rows are not continued")
            continue
        if environment.get("run_key") == key and environment.get("folder") == path.name:
            return SwapFolder(path)
    return None


def _key(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _new(root: Path, key: str, identity: Mapping[str, Any]) -> SwapFolder:
    make_folder(root)
    now = datetime.now(UTC)
    name = f"{now.strftime('%Y%m%dT%H%M%SZ')}-{str(identity['device']).replace(':', '')}"
    for attempt in range(100):
        path = root / (name if not attempt else f"{name}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise CannotCreate(f"cannot create {path}: {error.strerror}; choose another folder with --out") from error
        facts = {
            "attnbench": __version__,
            "run_key": key,
            **identity,
            "started_at": now.isoformat(timespec="seconds"),
            "folder": path.name,
            RUN_ID: token_hex(8),
        }
        try:
            write_manifest(path / ENVIRONMENT, with_opening(facts))
        except OSError as error:
            raise CannotCreate(f"cannot write in {path}: {error.strerror}") from error
        return SwapFolder(path)
    raise CannotCreate(f"cannot find a free name for a new folder in {root}")
