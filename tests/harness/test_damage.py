"""Whatever happens to the files of a run: no wrong number and no lost row without a word, and never a traceback."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnbench.errors import AttnbenchError, ResultsError
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.harness.runner import execute
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.store import ENVIRONMENT, RECORDS, SAMPLES, SUITE, TABLE, RunFolder
from tests.forked import forks
from tests.instant import Listening

DAMAGES = min(int(os.environ.get("ATTNBENCH_CASES", "30")), 1000)
"""1000 in make selfcheck."""

FILES = [RECORDS, SAMPLES, TABLE, ENVIRONMENT, SUITE]
Damage = Callable[[bytes, random.Random], bytes]


def lines_of(damage: Callable[[list[bytes], random.Random], list[bytes]]) -> Damage:
    return lambda content, chance: b"".join(damage(content.splitlines(keepends=True), chance))


def another_digit(content: bytes, chance: random.Random) -> bytes:
    at = chance.choice([match.start() for match in re.finditer(rb"\d", content)])
    new = chance.choice([digit for digit in b"0123456789" if digit != content[at]])
    return content[:at] + bytes([new]) + content[at + 1 :]


def another_byte(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :]


def another_number(content: bytes, chance: random.Random) -> bytes:
    match = chance.choice(list(re.finditer(rb"\d+\.\d+", content)) or list(re.finditer(rb"\d", content)))
    return content[: match.start()] + str(chance.random()).encode() + content[match.end() :]


def cut_out(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + content[at + chance.randint(1, 300) :]


def cut_off(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def append(content: bytes, chance: random.Random) -> bytes:
    return content + chance.choice([b"\n", b"{}\n", b"garbage\n", b'{"cell_id": "x"', b"\0" * 100])


def swap_ids(content: bytes, chance: random.Random) -> bytes:
    ids = sorted(set(re.findall(rb"\b[0-9a-f]{16}\b", content)))
    if len(ids) < 2:
        return another_byte(content, chance)
    a, b = chance.sample(ids, 2)
    return content.replace(a, b"?").replace(b, a).replace(b"?", b)


@lines_of
def drop_line(lines: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(lines))
    return lines[:at] + lines[at + 1 :]


@lines_of
def drop_last_lines(lines: list[bytes], chance: random.Random) -> list[bytes]:
    return lines[: chance.randrange(len(lines))]


@lines_of
def repeat_line(lines: list[bytes], chance: random.Random) -> list[bytes]:
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines) + 1)
    return [*lines[:to], lines[at], *lines[to:]]


@lines_of
def swap_lines(lines: list[bytes], chance: random.Random) -> list[bytes]:
    a, b = chance.randrange(len(lines)), chance.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]
    return lines


KINDS: list[Damage] = [
    *(another_digit, another_byte, another_number, cut_out, cut_off, append, swap_ids),
    *(drop_line, drop_last_lines, repeat_line, swap_lines),
]


@dataclass
class Finished:
    """A run of which every file and every row that it ever stored is known."""

    plan: Plan
    folder: Path
    files: dict[str, bytes]
    rows: dict[str, Record]
    ever: set[str]
    state: dict[str, Any]

    def restore(self) -> None:
        shutil.rmtree(self.plan.options.out)
        self.folder.mkdir(parents=True)
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)


def numbers(row: Any) -> str:
    """A row without what says where it stands, as text that can be compared."""
    return json.dumps({name: value for name, value in row.items() if name != "seal"}, sort_keys=True, default=str)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    tmp_path = tmp_path_factory.mktemp("damage")
    suite = tmp_path / "s.yaml"
    sweep = "matrix: {variant: [mean-value, identity], seq_len: [8, 16], heads: 1, head_dim: 8}"
    suite.write_text(f"name: s\nsweeps:\n- {{name: w, measure: [time, memory, error], {sweep}}}\n")
    plan = make_plan(suite, Options("cpu", out=tmp_path / "out", threads=1, rounds=2, min_time=0.001))
    with forks():
        folder, records = execute(plan)
    files = {name: (folder.path / name).read_bytes() for name in FILES}
    ever = {numbers(record.to_json()) for record in folder.history()}
    rows = {record.cell_id: record for record in records}
    assert len(ever) == 2 * len(rows)  # one for each round
    return Finished(plan, folder.path, files, rows, ever, folder.environment)


def read_frame(finished: Finished) -> None:
    """What ``attnbench plot`` reads: rows that were stored, or a line for what is missing."""
    said: list[str] = []
    try:
        frame = read_results(finished.folder, warn=said.append)
    except ResultsError:
        return
    rows = {row["cell_id"]: row for row in frame.to_dict("records")}
    for cell_id, row in rows.items():
        truth = [json.loads(text) for text in finished.ever]
        assert any(same_row(row, one) for one in truth), f"a wrong number: {row}"
        latest = same_row(row, json.loads(numbers(finished.rows[cell_id].to_json())))
        assert latest or said, f"an older row without a word: {row}"
    assert rows.keys() == finished.rows.keys() or said, "a lost row without a word"


def same_row(row: dict[str, Any], truth: dict[str, Any]) -> bool:
    def same(got: Any, wanted: Any) -> bool:
        nothing = got == "" or (isinstance(got, float) and math.isnan(got))
        return nothing if wanted is None else bool(got == wanted)

    return all(same(row[name], value) for name, value in truth.items())


def go_on(finished: Finished, instant: Any) -> None:
    """What ``attnbench run`` makes of it: the same rows, or some that were measured again, which it says."""
    worker, watcher = instant(), Listening()
    worker.start = lambda: finished.state
    try:
        _, records = execute(finished.plan, watcher, worker)
    except AttnbenchError:
        return
    assert [record.cell_id for record in records] == list(finished.rows)
    assert bool(worker.visits) <= bool(watcher.warnings), "measured again without a word"
    for record in records:
        kept = numbers(record.to_json()) in finished.ever
        assert kept or record.time_median_s == record.seq_len / 7, f"a wrong number: {record}"


@pytest.mark.parametrize("seed", range(DAMAGES))
def test_a_damaged_run_gives_its_own_numbers_or_a_line(finished: Finished, instant: Any, seed: int) -> None:
    chance = random.Random(seed)
    name, damage = chance.choice(FILES), chance.choice(KINDS)
    finished.restore()
    (finished.folder / name).write_bytes(damage(finished.files[name], chance))
    read_frame(finished)
    go_on(finished, instant)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"")], ids=["removed", "emptied"])
def test_a_run_with_a_file_less_gives_its_own_numbers_or_a_line(
    finished: Finished, instant: Any, harm: Callable[[Path], object], name: str
) -> None:
    finished.restore()
    harm(finished.folder / name)
    read_frame(finished)
    go_on(finished, instant)


def test_a_whole_run_says_nothing_and_is_not_measured_again(finished: Finished, instant: Any) -> None:
    finished.restore()
    said: list[str] = []
    assert len(read_results(finished.folder, warn=said.append)) == len(finished.rows)
    worker, watcher = instant(), Listening()
    worker.start = lambda: finished.state
    execute(finished.plan, watcher, worker)
    assert (worker.visits, watcher.warnings, said) == ([], finished.state["process_notes"], [])
    assert {name: (finished.folder / name).read_bytes() for name in FILES} == finished.files
    assert RunFolder(finished.folder).doubts() == []
