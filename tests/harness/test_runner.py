from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from attnbench import run
from attnbench.contract.plugins import discovery as plugins
from attnbench.contract.plugins.discovery import load
from attnbench.harness.outside import isolation
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from tests.forked import forks

pytestmark = pytest.mark.usefixtures("forks")

PLUGIN = str(Path(__file__).with_name("bad_variants.py"))


def suite(tmp_path: Path, variants: str, n: str = "32", measure: str = "[time, memory]") -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(
        f"name: s\nsweeps:\n  - name: w\n    measure: {measure}\n"
        f"    matrix: {{variant: {variants}, seq_len: {n}, heads: 2, head_dim: 8}}\n"
    )
    return path


def options(tmp_path: Path, **changes: object) -> Options:
    base = {"device": "cpu", "out": tmp_path / "results", "min_time": 0.001, "threads": 1, "rounds": 1}
    base["unchecked"] = True  # what breaks a law is to misbehave while it is measured, and test_gate.py looks before
    return Options(**{**base, **changes})  # type: ignore[arg-type]


def by_label(records: list[Record]) -> dict[tuple[str, int], Record]:
    return {(record.label, record.seq_len): record for record in records}


GOOD = ["softmax", "linear", "performer:features=16", "mean-value"]
BAD = ["raise", "build", "exit", "abort", "segfault", "kill", "hang", "noise", "nan", "memory", "child", "shape"]
BAD += ["closed", "answers"]


def measured_beside(folder: Path, bad: list[str]) -> tuple[RunFolder, list[Record]]:
    """A run of the good variants and of some bad ones."""
    load(PLUGIN)
    names = ", ".join(f"'{name}'" for name in [*GOOD[:2], *(f"bad-{name}" for name in bad), *GOOD[2:]])
    path = suite(folder, f"[{names}]")
    good = ", ".join(f"'{name}'" for name in GOOD)
    matrix = f"matrix: {{variant: [{good}], seq_len: 32, heads: 2, head_dim: 8}}"
    path.write_text(path.read_text() + f"  - name: e\n    measure: [error]\n    {matrix}\n")
    limits = {"cell_timeout": 5.0, "memory_limit": 2 * 2**30}
    with forks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "PATIENCE", 2.0)
        return execute(make_plan(path, options(folder, plugins=(PLUGIN,), quick=True, **limits)))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[Record]]:
    return measured_beside(tmp_path_factory.mktemp("mixed"), BAD)


def test_every_kind_of_bad_cell_is_a_row_with_its_reason_and_the_others_are_measured(
    mixed: tuple[RunFolder, list[Record]],
) -> None:
    folder, records = mixed
    got = {r.label.removeprefix("bad-"): (str(r.status), r.reason) for r in records if r.sweep == "w"}
    assert {name: status for name, (status, _) in got.items()} == {
        **dict.fromkeys(GOOD, "ok"),
        "raise": "error",
        "build": "unsupported",
        "exit": "crash",
        "abort": "crash",
        "segfault": "crash",
        "kill": "crash",
        "hang": "timeout",
        "noise": "ok",
        "nan": "nonfinite",
        "memory": "oom",
        "child": "ok",
        "shape": "error",
        "closed": "crash",
        "answers": "crash",
    }
    assert got["raise"][1] == "KeyError: 'no such thing\\nsecond line'"
    assert got["build"][1] == "the mathematics forbids it"
    assert "exited with code 3" in got["exit"][1]
    assert "SIGABRT" in got["abort"][1]
    assert "SIGSEGV" in got["segfault"][1]
    assert "SIGKILL" in got["kill"][1]
    assert "raise --cell-timeout" in got["hang"][1]
    assert got["abort"][1].endswith(": about to abort")
    assert got["closed"][1] == "the measuring process closed its output"
    assert got["answers"][1] == "the measuring process sent garbage"
    assert got["shape"][1] == "it breaks the contract: the output is (1, 32, 2, 8) float32, not (1, 2, 32, 8) float32"
    table = pd.read_csv(folder.path / "results.csv", keep_default_na=False)
    assert list(table["status"]) == [str(record.status) for record in records]
    assert not [line for line in _processes() if "attnbench-orphan" in line]
    told = [json.loads(line) for line in (folder.path / "failures.jsonl").read_text().splitlines()]
    stderr = {row["label"].removeprefix("bad-"): "\n".join(row["stderr"]) for row in told}
    assert {name for name, (status, _) in got.items() if status not in ("ok", "unsupported")} >= set(stderr)
    assert stderr["abort"].endswith("about to abort")
    for name, line in (("raise", "in forward"), ("shape", "the output is"), ("nan", "NaN"), ("memory", "torch.empty")):
        assert line in stderr[name]


def test_figures_beside_bad_cells_are_those_without_them(mixed: tuple[RunFolder, list[Record]], tmp_path: Path) -> None:
    beside = {record.cell_id: record.to_json() for record in mixed[1]}
    _, without = measured_beside(tmp_path, [])
    assert len(without) == 2 * len(GOOD)
    for record in without:
        assert record.status is Status.OK
        for name, value in record.to_json().items():
            seen = beside[record.cell_id][name]
            assert (seen is None) == (value is None) if name in NEVER_TWICE else seen == value, name


NEVER_TWICE = {
    *("time_median_s", "time_ci_low_s", "time_ci_high_s", "time_iqr_s", "time_min_s", "time_samples", "first_call_s"),
    *(
        "examples_per_s",
        "tokens_per_s",
        "flops_per_s",
        "bytes_per_s",
        "peak_fraction",
        "floor_s",
        "warnings",
        "started_at",
    ),
}
"""Columns that two measurements of the same do not share."""


def _processes() -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_text().replace("\0", " "))
        except OSError:
            continue
    return lines


def test_a_length_that_runs_out_of_memory_stands_for_the_longer_ones(tmp_path: Path) -> None:
    path = suite(tmp_path, "[softmax]", n="[256, 65536, 131072]")
    _, records = execute(make_plan(path, options(tmp_path, memory_limit=2 * 2**30)))
    rows = by_label(records)
    assert rows["softmax", 256].status is Status.OK
    assert rows["softmax", 65536].status is Status.OOM
    assert rows["softmax", 131072].status is Status.OOM
    assert rows["softmax", 131072].reason == "inferred: oom at n=65536 already, so not run"


def test_the_same_command_measures_nothing_twice_and_fresh_does(tmp_path: Path) -> None:
    path = suite(tmp_path, "[mean-value, identity]")
    first, _ = execute(make_plan(path, options(tmp_path)))
    lines = (first.path / "records.jsonl").read_text()
    again, records = execute(make_plan(path, options(tmp_path)))
    assert again.path == first.path
    assert (first.path / "records.jsonl").read_text() == lines
    assert len(records) == 2
    fresh, _ = execute(make_plan(path, options(tmp_path, fresh=True)))
    assert fresh.path != first.path
    other, _ = execute(make_plan(path, options(tmp_path, min_time=0.002)))
    assert other.path not in (first.path, fresh.path)


def test_failed_cells_are_measured_again_only_when_asked_for(tmp_path: Path) -> None:
    load(PLUGIN)
    path = suite(tmp_path, "[mean-value, bad-raise]")
    folder, _ = execute(make_plan(path, options(tmp_path, plugins=(PLUGIN,))))
    count = len((folder.path / "records.jsonl").read_text().splitlines())
    execute(make_plan(path, options(tmp_path, plugins=(PLUGIN,))))
    assert len((folder.path / "records.jsonl").read_text().splitlines()) == count
    execute(make_plan(path, options(tmp_path, plugins=(PLUGIN,), retry_failed=True)))
    assert len((folder.path / "records.jsonl").read_text().splitlines()) == count + 1


def test_rounds_add_samples_to_the_same_row(tmp_path: Path) -> None:
    path = suite(tmp_path, "[mean-value, identity]")
    folder, records = execute(make_plan(path, options(tmp_path, rounds=3)))
    assert [record.time_rounds for record in records] == [3, 3]
    samples = [json.loads(line) for line in (folder.path / "samples.jsonl").read_text().splitlines()]
    assert sorted(row["round"] for row in samples) == [0, 0, 1, 1, 2, 2]
    for record in records:
        taken = [s for row in samples if row["cell_id"] == record.cell_id for s in row["samples"]]
        assert record.time_samples is not None
        assert record.time_samples <= len(taken)
        assert record.time_ci_low_s is not None
        assert record.time_median_s is not None
        assert record.time_ci_low_s <= record.time_median_s
        assert record.threads == 1
        assert record.machine_id
        assert record.peak_bytes is not None


@pytest.mark.parametrize(
    ("sign", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)],
)
def test_a_stopped_run_keeps_its_rows_leaves_no_process_and_goes_on(
    tmp_path: Path, sign: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(PLUGIN)
    path = suite(tmp_path, "[mean-value, bad-slow]", n="1..5+1")
    out = tmp_path / "results"
    command = [sys.executable, "-m", "attnbench", "run", str(path), "--out", str(out), "--plugin", PLUGIN]
    command += ["--device", "cpu", "--min-time", "0.001", "--rounds", "1", "--threads", "1", "--unchecked"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not (worker := _child_of(process.pid)) or len(_rows(out)) < 3:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, sign)
        _, said = process.communicate(timeout=20)
        assert process.returncode == code
    kept = [row for row in _rows(out) if row["status"] == "ok"]
    assert 3 <= len(kept) < 10
    assert "Traceback" not in said
    if sign != signal.SIGKILL:
        assert "the same command resumes the run" in said
    deadline = time.monotonic() + 10  # its guard ends it, on a busy machine not at once
    while _is_alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    monkeypatch.setenv("SECONDS_OF_BAD_SLOW", "0")  # nothing is to happen in them any more
    monkeypatch.setattr(plugins, "_modules", {})  # a command's process has loaded no plug-ins of other tests
    folder, records = execute(make_plan(path, options(tmp_path, plugins=(PLUGIN,))))
    assert [run.name for run in folder.path.parent.iterdir()] == [folder.path.name]
    assert [record.status for record in records] == [Status.OK] * 10
    done = [row["cell_id"] for row in _rows(out) if row["status"] == "ok"]
    assert len(done) == len(set(done)) == 10
    assert [row["started_at"] for row in _rows(out)][:3] == [row["started_at"] for row in kept][:3]


def _rows(out: Path) -> list[dict[str, object]]:
    rows = []
    for file in out.glob("s/*/records.jsonl"):
        for line in file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # the line that is being written at this moment
    return rows


def _is_alive(pid: str) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def _child_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    except (OSError, IndexError):
        return ""


def test_run_gives_a_frame_with_the_documented_columns(tmp_path: Path) -> None:
    frame = run(suite(tmp_path, "[softmax]", measure="[error]"), out=tmp_path / "results", device="cpu", threads=1)
    assert frame.loc[0, "status"] == "ok"
    assert frame.loc[0, "error_kind"] == "exact"
    assert frame.loc[0, "rel_error"] < 1e-6


def test_both_processes_give_the_same_memory_and_only_as_shipped_reads_resident_memory(tmp_path: Path) -> None:
    rows = {}
    for process in ("tuned", "as-shipped"):
        path = suite(tmp_path, "[softmax]", n="1024", measure="[memory]")
        _, records = execute(make_plan(path, options(tmp_path, process=process)))
        rows[process] = records[0]
        assert records[0].process == process
    # The other matmul library takes a few kilobytes of scratch from the same allocator.
    assert rows["tuned"].peak_bytes == pytest.approx(rows["as-shipped"].peak_bytes, rel=0.01)
    assert rows["tuned"].peak_rss_bytes is None
    assert rows["as-shipped"].peak_rss_bytes is not None


def test_as_shipped_every_timed_visit_has_a_process_of_its_own_and_tuned_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(PLUGIN)
    used = {}
    for process in ("tuned", "as-shipped"):
        folder = tmp_path / process
        folder.mkdir()
        monkeypatch.setenv("PIDS_OF_BAD_VARIANTS", str(folder / "pids"))
        path = suite(folder, "[bad-known]", n="[64, 128]")
        execute(make_plan(path, options(folder, plugins=(PLUGIN,), process=process, rounds=2)))
        used[process] = len(set((folder / "pids").read_text().split()))
    assert used == {"tuned": 2, "as-shipped": 4}
