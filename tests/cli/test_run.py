"""``attnbench run`` as a user meets it: in a fresh process, with a suite of a few small cells."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.cli.run import _print_records
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite import load
from attnbench.suite.cell import Cell
from attnbench.suite.document import read_document
from tests.typed import attnbench

SUITE = """
name: small
sweeps:
  - name: speed
    matrix: {variant: [softmax, linear], seq_len: 64, heads: 2, head_dim: 8, causal: [false, true]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.yaml").write_text(SUITE, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return attnbench("run", "small.yaml", "--device", "cpu", *arguments, folder=folder)


def test_a_dry_run_shows_the_axis_in_which_cells_differ(folder: Path) -> None:
    done = run(folder, "--dry-run")
    assert done.returncode == 0, done.stderr
    head = next(line for line in done.stdout.splitlines() if "matmul FLOPs" in line)
    assert "causal" in head
    assert "dtype" not in head


def test_a_dry_run_as_json_holds_each_cell_and_nothing_else(folder: Path) -> None:
    done = run(folder, "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert [(cell["variant"], cell["causal"]) for cell in plan["cells"]] == [
        ("softmax", False),
        ("softmax", True),
        ("linear", False),
        ("linear", True),
    ]
    assert all(cell["matmul_flops"] > 0 and cell["fits"] for cell in plan["cells"])
    assert not (folder / "results").exists()


def test_a_run_as_json_prints_its_rows_and_nothing_else(folder: Path) -> None:
    done = run(folder, "--json", "--quick", "-k", "causal")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["label"], row["causal"], row["status"]) for row in rows] == [
        ("softmax", True, "ok"),
        ("linear", True, "ok"),
    ]


def test_a_cell_that_fails_is_named_with_what_tells_it_from_the_others(folder: Path) -> None:
    done = run(folder, "--quick", "-k", "softmax", "--set", "seq_len=65536", "--memory-limit", "1GiB")
    assert done.returncode == 1
    assert "softmax n=65536 causal=true: oom" in done.stderr
    assert "softmax n=65536 causal=false: oom" in done.stderr
    assert "error: no cell could be measured" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "heads=1", "--set", "heads=2,4"], "error: --set heads is given twice; write --set heads=1,2,4\n"),
        (["--set", "dtype=float64", "--dtype", "float32"], "error: --dtype and --set dtype are both given; leave one"),
        (["--set", "heads"], "error: --set 'heads' is not AXIS=VALUES; write for instance --set seq_len=1024,2048\n"),
        (["-k", "bfloat16"], "error: -k 'bfloat16': no cell has 'bfloat16'; a cell is called speed/softmax/n64/"),
        (["--shard", "2/2"], "error: --shard 2/2: shards count from 0, so the last one is 1/2\n"),
        (["--shard", "a/b"], "error: --shard 'a/b' is not I/K; write 0/4 for the first of four parts\n"),
    ],
)
def test_what_selects_wrongly_is_told_with_the_remedy(arguments: list[str], said: str, folder: Path) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert not (folder / "results").exists()


def test_an_empty_shard_of_an_array_of_jobs_succeeds_and_writes_nothing(folder: Path) -> None:
    done = run(folder, "--shard", "5/8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 cells on cpu, shard 5/8 of 4 cells" in done.stdout
    assert done.stdout.endswith("shard 5/8 has no cells; nothing was run or written\n")
    assert not (folder / "results").exists()


def test_a_dry_run_shows_the_shard_and_its_cells_alone(folder: Path) -> None:
    done = run(folder, "--dry-run", "--shard", "0/2")
    assert done.returncode == 0, done.stderr
    assert "small: 2 cells on cpu, shard 0/2 of 4 cells" in done.stdout
    plan = json.loads(run(folder, "--dry-run", "--json", "--shard", "1/2").stdout)
    assert (plan["shard"], len({cell["causal"] for cell in plan["cells"]}), len(plan["cells"])) == ("1/2", 1, 2)


def test_graphs_on_a_cpu_are_refused_in_one_line_before_anything_is_written(folder: Path) -> None:
    done = run(folder, "--launch", "graph")
    assert done.returncode == 2
    assert done.stderr == "error: --launch graph: cpu has no CUDA graphs; leave it out, or add --device cuda\n"
    assert not (folder / "results").exists()


def test_a_suite_may_ask_for_graphs_everywhere_and_gets_a_row_with_the_reason_where_there_are_none(
    folder: Path,
) -> None:
    done = run(folder, "--json", "--quick", "-k", "causal and linear", "--set", "launch=eager,graph")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["launch"], row["status"], row["launched"]) for row in rows] == [
        ("eager", "ok", ""),
        ("graph", "unsupported", ""),
    ]
    assert rows[1]["reason"] == "launch: cpu has no CUDA graphs; write launch: auto, or measure on cuda"


def test_the_table_of_a_gpu_says_how_each_row_was_launched_and_how_much_of_its_time_is_the_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = {"launched": "graph", "time_median_s": 1e-3, "device_s": 9.5e-4, "kernels": 3, "host_share": 0.05}
    eager = {"launched": "eager", "time_median_s": 8e-3, "device_s": 9.6e-4, "kernels": 300, "host_share": 0.88}
    rows = [("linear", graph), ("softmax", {**eager, "launch_note": "it asks the device"})]
    cells = [(Cell("s", "w", Spec(name), Shape(seq_len=64), device="cuda"), columns) for name, columns in rows]
    _print_records([Record.of(cell, Status.OK, **columns) for cell, columns in cells])
    shown = capsys.readouterr().out.splitlines()
    assert shown[2].split() == ["variant", "time", "launched", "device", "host", "note"]
    assert shown[3].split() == ["linear", "1.00", "ms", "graph", "950", "µs", "5", "%"]
    assert shown[4].split() == ["softmax", "8.00", "ms", "eager", "960", "µs", "88", "%", "it", "asks", "the", "device"]


def test_a_suite_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[str] = []
    monkeypatch.setattr(load, "read_document", lambda text: (read.append(text), read_document(text))[1])
    suite = tmp_path / "s.yaml"
    suite.write_text("name: s\nsweeps: [{name: w, matrix: {variant: softmax, seq_len: 16}}]\n")
    assert main(["run", str(suite), "--dry-run", "--device", "cpu", "--set", "variant=linear,softmax"]) == 0
    assert "2 cells: 2 fit" in " ".join(capsys.readouterr().out.split())
    assert len(read) == 1
