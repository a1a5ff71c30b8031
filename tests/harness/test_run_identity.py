"""Which commands go on with one another's rows, and what is said where a run cannot be gone on with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attnbench.cli.app import main
from attnbench.harness import run_identity as module
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.run_identity import identity, task_files
from attnbench.harness.runner import execute
from attnbench.measure.machine import VARIABLES, variables
from attnbench.results.record import Record
from attnbench.results.store import ENVIRONMENT, RECORDS, SAMPLES, RunFolder
from tests.instant import Listening


@pytest.fixture
def begin(tmp_path: Path, small_suite: Path, instant: Any) -> Callable[..., tuple[RunFolder, list[Record], list[str]]]:
    def go(suite: Path = small_suite, **options: Any) -> tuple[RunFolder, list[Record], list[str]]:
        watcher = Listening()
        plan = make_plan(suite, Options("cpu", out=tmp_path / "out", threads=1, rounds=2, **options))
        folder, records = execute(plan, watcher, instant())
        return folder, records, watcher.warnings

    return go


def test_an_input_file_that_changed_begins_a_new_run(tmp_path: Path, begin: Any) -> None:
    file = tmp_path / "qkv.safetensors"
    suite = tmp_path / "f.yaml"
    matrix = f"{{variant: [softmax], seq_len: 2, inputs: 'file:path={file}'}}"
    suite.write_text(f"name: f\nsweeps: [{{name: w, measure: error, matrix: {matrix}}}]\n")
    folders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        save_file({name: torch.randn(1, 1, 8, 8, 64) for name in "qkv"}, file)
        folder, _, _ = begin(suite)
        folders.append(folder)
    first, same, other = folders
    assert first.path == same.path != other.path
    digests = [folder.environment["input_files"][str(file)] for folder in (first, other)]
    assert digests[0] != digests[1]


TREES = ["[MAX 1 2 ]\t2", "[MIN 3 4 ]\t3", "[MAX 5 [MIN 7 8 ] ]\t7", "[MED 1 5 9 ]\t5"]


def write_trees(folder: Path, *, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for at, split in enumerate(("train", "val", "test")):
        lines = ["Source\tTarget", TREES[(first + at) % 4]]
        (folder / f"basic_{split}.tsv").write_text("".join(f"{line}\n" for line in lines))


def tree_suite(path: Path, folder: Path) -> Path:
    matrix = f"{{variant: [softmax], seq_len: [8, 16], task: 'listops:folder={folder}'}}"
    path.write_text(f"name: t\nsweeps: [{{name: w, level: model, measure: time, matrix: {matrix}}}]\n")
    return path


def test_a_file_of_a_task_that_changed_begins_a_new_run(tmp_path: Path, begin: Any) -> None:
    folder = tmp_path / "listops"
    suite = tree_suite(tmp_path / "t.yaml", folder)
    runs = []
    for first in (0, 0, 1):
        write_trees(folder, first=first)
        runs.append(begin(suite)[0])
    (folder / "readme.txt").write_text("which the task does not read")
    runs.append(begin(suite)[0])
    first, same, other, last = runs
    assert first.path == same.path != other.path == last.path
    digests = [list(one.environment["input_files"].items()) for one in (first, other)]
    assert [len(one) for one in digests] == [1, 1]
    assert digests[0] != digests[1]
    name, _ = digests[0][0]
    assert name.startswith("listops:")
    assert f"folder={folder}" in name


def test_files_of_a_task_that_are_missing_or_refused_are_no_error_of_the_plan(tmp_path: Path) -> None:
    folder = tmp_path / "listops"
    plan = make_plan(tree_suite(tmp_path / "t.yaml", folder), Options("cpu"))
    assert identity(plan, "m")["input_files"] == {}
    write_trees(folder)
    assert len(identity(plan, "m")["input_files"]) == 1
    (folder / "basic_val.tsv").unlink()
    assert identity(plan, "m")["input_files"] == {}


@pytest.mark.parametrize("many", [False, True])
def test_contents_of_a_few_files_count_and_of_many_their_sizes_and_times(
    many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "listops"
    cells = make_plan(tree_suite(tmp_path / "t.yaml", folder), Options("cpu")).cells
    write_trees(folder)
    if many:
        monkeypatch.setattr(module, "_MOST_FILES", 2)
    file = folder / "basic_val.tsv"
    os.utime(file, ns=(10**18, 10**18))

    def differs(text: str, seconds: int) -> bool:
        before, content, changed = task_files(cells), file.read_text(), file.stat().st_mtime_ns
        file.write_text(text)
        os.utime(file, ns=(10**18, 10**18 + seconds * 10**9))
        after = task_files(cells)
        file.write_text(content)
        os.utime(file, ns=(changed, changed))
        assert task_files(cells) == before
        return after != before

    content = file.read_text()
    assert not differs(content, 0)
    assert differs(content + "\n", 0)
    assert differs(content.replace("3 4", "3 5"), 0) is not many
    assert differs(content, 1) is many


def test_a_task_reads_files_or_none(tmp_path: Path) -> None:
    matrix = "{variant: [softmax], seq_len: 64, task: [digits, recall]}"
    suite = tmp_path / "d.yaml"
    suite.write_text(f"name: d\nsweeps: [{{name: w, level: model, measure: time, matrix: {matrix}}}]\n")
    assert task_files(make_plan(suite, Options("cpu")).cells) == {}


def test_a_variable_that_changes_arithmetic_begins_a_new_run_and_one_that_only_prints_does_not(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, _ = begin()
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setenv("TORCH_HOME", "/somewhere")
    assert begin()[0].path == first.path
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    other, _, _ = begin()
    assert other.path != first.path
    assert other.environment["variables"]["DNNL_MAX_CPU_ISA"] == "AVX2"
    assert other.environment["variables"]["OMP_NUM_THREADS"] == "1"  # as the measuring process has it


@pytest.mark.parametrize(
    "name",
    [
        *(
            "ATEN_CPU_CAPABILITY",
            "ONEDNN_DEFAULT_FPMATH_MODE",
            "MKL_CBWR",
            "OMP_PROC_BIND",
            "KMP_AFFINITY",
            "LD_PRELOAD",
        ),
        *(
            "ONEDNN_VERBOSE",
            "DNNL_VERBOSE",
            "MKL_VERBOSE",
            "PYTHONTRACEMALLOC",
        ),  # each call takes several times as long
    ],
)
def test_variables_of_the_libraries_below_torch_are_seen(name: str) -> None:
    assert variables({name: "x", "HOME": "/home", "PATH": "/bin"}) == {name: "x"}


@pytest.mark.parametrize("name", ["PYTORCH_API_TOKEN", "TORCH_HUB_TOKEN", "MKL_LICENSE_KEY", "OMP_PASSWORD"])
def test_what_holds_a_secret_is_written_nowhere(
    name: str, begin: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "s3cret")
    folder, _, _ = begin()
    assert main(["env"]) == main(["env", "--json"]) == 0
    written = "".join(path.read_text() for path in folder.path.iterdir() if path.is_file())
    assert "s3cret" not in written + capsys.readouterr().out
    assert not [one for one in VARIABLES if re.search("KEY|TOKEN|SECRET|PASSWORD", one)]


PACKAGE = {
    "mine/__init__.py": "",
    "mine/deep/__init__.py": "from mine.deep.constants import SCALE\n",
    "mine/deep/constants.py": "SCALE = 1\n",
    "mine/variants.py": """
from torch import nn
from attnbench import register
from mine.deep import SCALE

@register("mine", family="reference", source="-", formula="-", cost="-")
class Mine(nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        return v * SCALE
""",
}
RUN = """
import sys
from pathlib import Path
from attnbench.contract.plugins.discovery import load, provenance
load(sys.argv[1])
print(*sorted(provenance([sys.argv[1]])), provenance([sys.argv[1]]))
"""


@pytest.mark.usefixtures("forks")
def test_whatever_a_plug_in_imports_of_its_own_belongs_to_the_run(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def seen() -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", RUN, "mine.variants"]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    first = seen()
    names = [name for name in first.partition("{")[0].split() if name.partition(".")[0] == "mine"]
    assert names == ["mine", "mine.deep", "mine.deep.constants", "mine.variants"]
    assert "torch" not in first.partition("{")[0].split()
    assert seen() == first
    (tmp_path / "mine/deep/constants.py").write_text("SCALE = 2\n")
    assert seen() != first


def test_a_damaged_environment_is_told_and_the_run_not_gone_on_with(begin: Any) -> None:
    first, records, warnings = begin()
    assert warnings == []
    file = first.path / ENVIRONMENT
    file.write_text(file.read_text().replace('"threads": 1', '"threads": 2'))
    second, again, warnings = begin()
    assert second.path != first.path
    assert len(again) == len(records)
    assert warnings == [
        f"{file}: it was changed after the run; restore it or start with --fresh; the run is not continued"
    ]


def test_cells_whose_samples_are_lost_are_measured_again_and_that_is_told(begin: Any) -> None:
    folder, records, _ = begin()
    file = folder.path / SAMPLES
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    again, rows, warnings = begin()
    assert again.path == folder.path
    assert [row.time_median_s for row in rows] == [record.time_median_s for record in records]
    assert [warning.rpartition(": ")[2] for warning in warnings] == [
        "its samples are lost, so it is measured again",
        "1 line lost; restore it",
    ]
    assert len((folder.path / RECORDS).read_text().splitlines()) == 8 + 2


def test_rows_that_were_cut_off_are_measured_again_and_the_table_tells_that_they_are_lost(begin: Any) -> None:
    folder, records, _ = begin()
    file = folder.path / RECORDS
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    _, rows, warnings = begin()
    assert [row.time_median_s for row in rows] == [record.time_median_s for record in records]
    said, ends = warnings
    assert f"not what {RECORDS} holds" in said
    assert ends == f"{file}: 1 line lost; restore it"


def test_a_row_under_the_id_of_another_cell_is_refused_with_its_line(begin: Any, tmp_path: Path) -> None:
    folder, records, _ = begin()
    (folder.path / RECORDS).write_text("")
    swapped = [record.cell_id for record in records[1:]] + [records[0].cell_id]
    for record, other in zip(records, swapped, strict=True):
        record.cell_id = other
        folder.add(record)
    from attnbench.errors import CorruptResults

    with pytest.raises(CorruptResults, match=r"records\.jsonl:1: seq_len is 2, but 4 for the cell of its id"):
        begin()


def test_a_run_made_by_a_clock_that_was_wrong_hides_no_later_one(begin: Any, tmp_path: Path) -> None:
    from attnbench.results.read import find_results

    folder, _, _ = begin()
    future = folder.path.with_name("20991231T235959Z-cpu")
    folder.path.rename(future)
    later, _, _ = begin(fresh=True)
    assert find_results(tmp_path / "out") == [later.path / "results.csv"]
    assert begin()[0].path == later.path
    assert json.loads((future / RECORDS).read_text().splitlines()[0])["status"] == "ok"
