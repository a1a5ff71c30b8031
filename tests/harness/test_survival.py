"""Whole runs of cells that cost nothing, ended or hindered in every way that an operating system has."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from attnbench.cli.app import main
from attnbench.harness import run_identity, runner
from attnbench.harness.outside import isolation
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.harness.plan import Options, make_plan
from attnbench.measure.status import Status
from attnbench.results.record import HELD, Record
from tests.forked import load
from tests.instant import Instant

pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")

KILLS = int(os.environ.get("ATTNBENCH_KILLS", "12"))
"""200 before a release."""


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    put_in_place(monkeypatch, Instant)
    monkeypatch.setattr(runner, "load_warning", lambda: None)


def put_in_place(monkeypatch: pytest.MonkeyPatch, worker: type[Instant]) -> None:
    """Put ``worker`` in the place of the measuring process."""
    for module in (runner, isolation):
        monkeypatch.setattr(module, "Worker", worker)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text("name: s\nsweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: 1..10+1}}]\n")
    return path


@dataclass
class Ended:
    code: int
    said: str


def fork(action: Callable[[], int], said: Path) -> int:
    """Run ``action`` in a child process with its stdout and stderr in a file: milliseconds, where a new one imports."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        with said.open("w", encoding="utf-8") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", buffering=1) for number in (1, 2))
            code = action()
            sys.stdout.flush()
            sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def wait(pid: int, said: Path) -> Ended:
    return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.read_text())


@pytest.fixture
def attnbench(tmp_path: Path, suite: Path) -> Callable[..., Ended]:
    def command(out: Path | None = None, first: Callable[[], object] = lambda: None) -> Ended:
        said = tmp_path / "said.txt"

        def action() -> int:
            first()
            return main(["run", str(suite), "--out", str(out or tmp_path / "out"), "--device", "cpu", "--rounds", "1"])

        return wait(fork(action, said), said)

    return command


def rows(out: Path) -> list[dict[str, Any]]:
    (file,) = out.glob("s/*/records.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def error_line(ended: Ended) -> str:
    (line,) = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in ended.said
    return line


def test_a_run_killed_again_and_again_at_any_moment_has_the_rows_of_one_that_was_not(
    tmp_path: Path, suite: Path
) -> None:
    lengths = {"seq_len": f"1..{2 * KILLS}+1"}  # twice as many visits as the kills can let through
    plan, chance = make_plan(suite, Options("cpu", out=tmp_path / "out", overrides=lengths, rounds=2)), random.Random(1)
    told, kills, ended = [], 0, Ended(-9, "")
    while ended.code:
        reads, writes = os.pipe()

        class Tell(runner.Watcher):
            def visited(self, record: Record) -> None:
                os.write(writes, f"{record.cell_id} {record.time_rounds}\n".encode())  # noqa: B023  # used at once

        pid = fork(lambda: bool(runner.execute(plan, Tell())[0]) - 1, tmp_path / "said.txt")
        os.close(writes)
        with os.fdopen(reads) as pipe:
            if kills < KILLS:
                for _ in range(chance.randrange(4)):
                    told.append(pipe.readline().strip())
                time.sleep(chance.random() * 0.004)  # about as long as a visit
                os.kill(pid, signal.SIGKILL)
                kills += 1
            told += pipe.read().split("\n")
        ended = wait(pid, tmp_path / "said.txt")
        assert ended.code in (0, -9), ended.said
    stored = [f"{row['cell_id']} {row['time_rounds']}" for row in rows(tmp_path / "out")]
    assert kills == KILLS
    assert len(stored) == len(set(stored)) == 2 * len(plan.cells)
    assert set(filter(None, told)) <= set(stored)
    whole, _ = runner.execute(make_plan(suite, Options("cpu", out=tmp_path / "whole", overrides=lengths, rounds=2)))
    (killed,) = (tmp_path / "out").glob("s/*/results.csv")
    tables = [pd.read_csv(path).drop(columns=["started_at", "seal"]) for path in (killed, whole.path / "results.csv")]
    pd.testing.assert_frame_equal(*tables)
    assert not [path for path in killed.parent.iterdir() if path.name.startswith((".results", ".writer"))]


def test_a_full_disk_stops_the_run_with_what_failed_and_the_next_goes_on(
    tmp_path: Path, attnbench: Callable[..., Ended]
) -> None:
    def full() -> None:  # a file that may not grow writes what fits and then fails, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    ended = attnbench(first=full)
    assert ended.code == 74
    assert "cannot write" in error_line(ended)
    assert "records.jsonl" in error_line(ended)
    kept = rows(tmp_path / "out")  # whole lines only
    assert 1 < len(kept) < 20
    (folder,) = (tmp_path / "out" / "s").iterdir()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
    assert attnbench().code == 0
    after = rows(tmp_path / "out")
    assert after[: len(kept)] == kept
    assert len({row["cell_id"] for row in after}) == len(after) == 20


def test_a_folder_that_vanishes_stops_the_run(
    tmp_path: Path, attnbench: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Vanishing(Instant):
        def ask(self, request: dict[str, Any], timeout: float, **options: Any) -> dict[str, Any]:
            shutil.rmtree(tmp_path / "out")
            return super().ask(request, timeout, **options)

    put_in_place(monkeypatch, Vanishing)
    ended = attnbench()
    assert ended.code == 74
    assert "the folder is gone" in error_line(ended)
    assert not (tmp_path / "out").exists()


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def replace_by_copy(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").replace(file)


def replace_by_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def replace_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))
    shutil.copytree(file.parent.with_name("elsewhere"), file.parent)


@pytest.mark.independent
@pytest.mark.parametrize("when", [3, 20])
@pytest.mark.parametrize("harm", [Path.unlink, halve, replace_by_copy, replace_by_link, replace_folder])
def test_rows_that_are_taken_away_during_a_run_end_it_with_exit_code_74(
    tmp_path: Path,
    attnbench: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], object],
    when: int,
) -> None:
    visits = []

    class Harming(Instant):
        def ask(self, request: dict[str, Any], timeout: float, **options: Any) -> dict[str, Any]:
            answer = super().ask(request, timeout, **options)
            visits.append(request)
            if len(visits) == when:
                (file,) = (tmp_path / "out").glob("s/*/records.jsonl")
                harm(file)
            return answer

    put_in_place(monkeypatch, Harming)
    ended = attnbench()
    assert ended.code == 74, ended.said
    assert "run the same command again" in error_line(ended)
    put_in_place(monkeypatch, Instant)
    assert attnbench().code == (73 if harm is replace_by_link else 0)  # a link is refused, all else measured again


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_place_where_nothing_can_be_made_is_exit_code_73(tmp_path: Path, attnbench: Callable[..., Ended]) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (Path("/proc/attnbench"), tmp_path / "file", tmp_path / "file" / "deeper"):
        ended = attnbench(out)
        assert ended.code == 73
        assert f"cannot write {out}" in error_line(ended)
        assert "choose another folder with --out" in error_line(ended)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that a user without rights can reach: root may write anywhere."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_folder_that_became_read_only_is_exit_code_73_and_stays_as_it_is(
    open_to_all: Path, attnbench: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attnbench(open_to_all).code == 0
    (folder,) = (open_to_all / "s").iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.chmod(0o555)
    for path in folder.iterdir():
        path.chmod(0o444)

    find = runner.find_folder

    def find_and_give_up_rights(*what: Any) -> Any:
        found = find(*what)
        if os.geteuid() == 0:
            os.setuid(65534)
        return found

    monkeypatch.setattr(runner, "find_folder", find_and_give_up_rights)
    ended = attnbench(open_to_all)
    folder.chmod(0o755)
    assert ended.code == 73, ended.said
    assert f"cannot write {folder}: Permission denied" in error_line(ended)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_second_run_names_the_first_within_two_seconds_and_goes_on_when_that_is_killed(
    tmp_path: Path, attnbench: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, suite: Path
) -> None:
    class Waiting(Instant):
        def ask(self, request: dict[str, Any], timeout: float, **options: Any) -> dict[str, Any]:
            (tmp_path / "waits").touch()
            time.sleep(30)
            raise AssertionError

    put_in_place(monkeypatch, Waiting)
    same = ["run", str(suite), "--out", str(tmp_path / "out"), "--device", "cpu", "--rounds", "1"]
    same += ["--cell-timeout", "70"]  # decides nothing of what is measured
    first = fork(lambda: main(same), tmp_path / "first.txt")
    without_torch = "import sys; from attnbench.cli.app import main; code = main(sys.argv[1:])"
    without_torch += "; assert not {'torch', 'numpy', 'pandas'} & set(sys.modules); sys.exit(code)"
    try:
        while not (tmp_path / "waits").exists():
            time.sleep(0.005)
        before = seconds_of_children()
        second = subprocess.run([sys.executable, "-c", without_torch, *same], capture_output=True, text=True)
        assert seconds_of_children() - before < 2  # the clock on the wall would measure what else runs here
        other = attnbench()  # the same cells by another command
    finally:
        os.kill(first, signal.SIGKILL)
        wait(first, tmp_path / "first.txt")
    for code, said in ((second.returncode, second.stderr), (other.code, other.said)):
        assert (code, "Traceback" in said) == (75, False), said
        assert f"another attnbench run (process {first}, since 20" in said
    put_in_place(monkeypatch, Instant)
    assert wait(fork(lambda: main(same), tmp_path / "first.txt"), tmp_path / "first.txt").code == 0
    assert len(rows(tmp_path / "out")) == 20


@pytest.mark.parametrize("timeouts", [("60", "60"), ("60", "61")], ids=["the same", "of the same cells"])
def test_of_two_commands_begun_at_once_one_measures_and_the_other_names_it(
    tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch, timeouts: tuple[str, str]
) -> None:
    class Together(Instant):
        def start(self) -> dict[str, Any]:
            while not (out / "go").exists():
                time.sleep(0.002)
            return super().start()

    put_in_place(monkeypatch, Together)
    for turn in range(max(2, KILLS // 40)):
        out = tmp_path / str(turn)
        out.mkdir()
        together, said = time.monotonic() + 0.1, [tmp_path / "first.txt", tmp_path / "second.txt"]

        def action(timeout: str) -> int:
            time.sleep(max(0.0, together - time.monotonic()))  # noqa: B023  # used at once
            command = ["run", str(suite), "--out", str(out), "--device", "cpu", "--rounds", "1"]  # noqa: B023  # as above
            return main([*command, "--cell-timeout", timeout])

        pids = [
            fork(lambda timeout=timeout: action(timeout), file) for timeout, file in zip(timeouts, said, strict=True)
        ]
        refused, code = os.wait()
        (out / "go").touch()
        (winner,) = set(pids) - {refused}
        files = dict(zip(pids, said, strict=True))
        ended = Ended(os.waitstatus_to_exitcode(code), files[refused].read_text())
        assert ended.code == 75, ended.said
        assert f"another attnbench run (process {winner}, since 20" in error_line(ended)
        assert wait(winner, files[winner]).code == 0
        assert len(rows(out)) == 20
        assert {path.name for path in out.iterdir()} - {".lock"} == {"go", "s"}


def test_the_row_of_a_visit_is_written_while_the_next_cell_is_built_and_the_last_one_at_the_end(
    tmp_path: Path, attnbench: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(Instant):
        def ask(self, request: dict[str, Any], timeout: float, **options: Any) -> dict[str, Any]:
            before = len(rows(tmp_path / "out"))
            answer = super().ask(request, timeout, **options)
            with (tmp_path / "counts").open("a") as file:
                file.write(f"{len(rows(tmp_path / 'out')) - before}")
            return answer

    put_in_place(monkeypatch, Counting)
    assert attnbench().code == 0
    assert (tmp_path / "counts").read_text() == "0" + 19 * "1"
    assert len(rows(tmp_path / "out")) == 20


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_run_that_cannot_end_in_order(
    tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch, sign: int, code: int
) -> None:
    class Undying(Instant):
        def ask(self, request: dict[str, Any], timeout: float, **options: Any) -> dict[str, Any]:
            if len(list((tmp_path / "out").glob("s/*/samples.jsonl"))) and len(rows(tmp_path / "out")) == 3:
                (tmp_path / "asked").touch()
                time.sleep(30)
            return super().ask(request, timeout, **options)

        def stop(self) -> None:
            (tmp_path / "stops").touch()
            time.sleep(30)

    def action() -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
        return main(["run", str(suite), "--out", str(tmp_path / "out"), "--device", "cpu", "--rounds", "1"])

    put_in_place(monkeypatch, Undying)
    pid = fork(action, tmp_path / "said.txt")
    for sent in ("asked", "stops"):
        while not (tmp_path / sent).exists():
            time.sleep(0.005)
        os.kill(pid, sign)
    started = time.monotonic()
    ended = wait(pid, tmp_path / "said.txt")
    assert time.monotonic() - started < 5  # not the 30 seconds
    assert (ended.code, "Traceback" in ended.said) == (code, False)
    assert [row["status"] for row in rows(tmp_path / "out")] == ["ok"] * 3


def test_a_torn_last_line_is_told_and_other_damage_is_refused_untouched(
    tmp_path: Path, attnbench: Callable[..., Ended]
) -> None:
    assert attnbench().code == 0
    (file,) = (tmp_path / "out").glob("s/*/records.jsonl")
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    ended = attnbench()
    assert ended.code == 0
    assert f"warning: {file}:20: the last line was cut short" in ended.said
    assert len(rows(tmp_path / "out")) == 20
    damaged = whole.replace(b'"seq_len": 3,', b'"seq_len": "3",', 1)
    file.write_bytes(damaged)
    ended = attnbench()
    assert ended.code == 65
    number = damaged[: damaged.index(b'"seq_len": "3"')].count(b"\n") + 1
    assert f"{file}:{number}: this line was changed" in error_line(ended)
    assert file.read_bytes() == damaged


def test_a_link_in_the_place_of_a_folder_or_file_is_refused_and_nothing_is_written_through_it(
    tmp_path: Path, attnbench: Callable[..., Ended]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "s").symlink_to(tmp_path / "elsewhere")
    ended = attnbench()
    assert (ended.code, "is a link" in error_line(ended)) == (73, True)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "out" / "s").unlink()
    assert attnbench().code == 0
    (file,) = (tmp_path / "out").glob("s/*/records.jsonl")
    other = tmp_path / "elsewhere" / "records.jsonl"
    file.rename(other)
    other.write_bytes(other.read_bytes() + b'{"torn')
    before = other.read_bytes()
    file.symlink_to(other)
    ended = attnbench()
    assert (ended.code, "is a link" in error_line(ended)) == (73, True)
    assert other.read_bytes() == before


def test_a_copy_of_a_run_for_safe_keeping_stays_as_it_is(tmp_path: Path, attnbench: Callable[..., Ended]) -> None:
    assert attnbench().code == 0
    (folder,) = (tmp_path / "out" / "s").iterdir()
    half = (folder / "records.jsonl").read_text().splitlines(keepends=True)[:10]
    (folder / "records.jsonl").write_text("".join(half))
    for name in ("0-before", "z-before"):
        shutil.copytree(folder, folder.with_name(name))
    ended = attnbench()
    assert f"resuming {folder}: 10 of 20" in ended.said
    for name in ("0-before", "z-before"):
        assert (folder.with_name(name) / "records.jsonl").read_text() == "".join(half)


def test_the_unfinished_table_of_a_killed_run_is_removed(tmp_path: Path, attnbench: Callable[..., Ended]) -> None:
    assert attnbench().code == 0
    (folder,) = (tmp_path / "out" / "s").iterdir()
    (folder / ".results.csv.abc").write_text("half")
    with suppress(FileNotFoundError):
        (folder / "results.csv").unlink()
    assert attnbench().code == 0
    assert not (folder / ".results.csv.abc").exists()
    assert (folder / "results.csv").read_text().count("\n") == 21
    assert not [path for path in folder.iterdir() if path.stat().st_mode & 0o111]


@pytest.mark.parametrize("streams", [[1], [2], [1, 2]])
def test_a_run_goes_on_when_nobody_reads_it(
    tmp_path: Path, attnbench: Callable[..., Ended], streams: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang_up() -> None:
        reads, writes = os.pipe()
        os.close(reads)
        for stream in streams:
            os.dup2(writes, stream)

    failing = Record.of
    monkeypatch.setattr(Record, "of", lambda cell, status, **columns: failing(cell, Status.CRASH, "told on stderr"))
    ended = attnbench(first=hang_up)
    assert ended.code == 1  # no cell is ok
    assert "Traceback" not in ended.said
    assert len(rows(tmp_path / "out")) == 20


@pytest.mark.parametrize("status", [Status.CRASH, Status.UNSUPPORTED])
def test_a_run_in_which_nothing_could_be_measured_is_exit_code_1_and_keeps_its_rows(
    tmp_path: Path, attnbench: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    made = Record.of
    monkeypatch.setattr(Record, "of", lambda cell, _, **columns: made(cell, status, "for a reason"))
    ended = attnbench()
    assert ended.code == 1
    assert "no cell could be measured; reasons: " in error_line(ended)
    assert [row["status"] for row in rows(tmp_path / "out")] == [status] * 20


def test_a_changed_suite_machine_or_method_starts_a_new_run_and_the_same_goes_on(
    tmp_path: Path, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder(**options: Any) -> str:
        return runner.execute(make_plan(suite, Options("cpu", out=tmp_path / "out", rounds=1, **options)))[0].path.name

    seen = {folder()}
    assert folder() in seen
    seen.add(folder(overrides={"seq_len": "1..11+1"}))
    with monkeypatch.context() as changed:
        changed.setattr(runner, "machine_id", lambda device: "another")
        seen.add(folder())
    with monkeypatch.context() as changed:
        changed.setattr(run_identity, "METHOD_VERSION", run_identity.METHOD_VERSION + 1)
        seen.add(folder())
    plugin = tmp_path / "mine.py"
    for text in ("a = 1\n", "a = 2\n"):  # a method of one's own has no version but its text
        plugin.write_text(text)
        seen.add(folder(plugins=(str(plugin),)))
    assert len(seen) == 6
    assert folder() in seen
