"""Trainings as a run has them: several at once, resumed, at the rate that validation chose."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.outside.trainers import at_chosen_rates, phases, run_all
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import Watcher, execute
from attnbench.harness.wire.process import LEAST_MEMORY
from attnbench.measure.status import Status
from attnbench.results.record import HELD, UNCHECKED, Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite
from tests.instant import Listening

pytestmark = pytest.mark.usefixtures("forks")

MATRIX = {
    "variant": ["softmax", "identity"],
    "task": "recall:pairs=4,values=4,test=32",
    "seq_len": 16,
    "heads": 2,
    "head_dim": 8,
    "batch": 4,
}


def suite(training: dict[str, Any] | None = None, **axes: Any) -> Suite:
    sweep = {
        "name": "w",
        "level": "model",
        "pass": "training",
        "measure": "score",
        "model": {"layers": 1, "ffn": 16},
        "training": {"steps": 6, "evaluations": 2, **(training or {})},
        "matrix": {**MATRIX, **axes},
    }
    return Suite.of({"name": "s", "sweeps": [sweep]}, Origin())


def run(out: Path, what: Suite, watcher: Watcher | None = None, **options: Any) -> tuple[RunFolder, list[Record]]:
    plan = make_plan(what, Options(device="cpu", out=out, threads=2, **options))
    with Worker(replace(plan.settings, threads=1)) as worker:  # nothing is measured in it, so it may be a fork
        worker.begin()
        return execute(plan, watcher, worker)


def digits(records: list[Record]) -> list[dict[str, Any]]:
    clock = ("train_s", "target_s", "energy_j", "started_at", "seal")
    return [{name: value for name, value in record.to_json().items() if name not in clock} for record in records]


def test_each_training_is_a_row_with_its_curve_and_two_runs_agree_in_every_digit(tmp_path: Path) -> None:
    folder, records = run(tmp_path / "a", suite(seed=[0, 1]))
    assert [record.status for record in records] == [Status.OK] * 4
    assert {(record.threads, record.process, record.steps, record.protocol) for record in records} == {
        (1, "as-shipped", 6, "fixed")
    }
    curves = folder.curves()
    assert {cell_id: [point["step"] for point in points] for cell_id, points in curves.items()} == {
        record.cell_id: [3, 6] for record in records
    }
    assert not (folder.path / "checkpoints").exists()
    again, same = run(tmp_path / "b", suite(seed=[0, 1]))
    assert digits(same) == digits(records)
    assert again.curves().keys() == curves.keys()
    assert RunFolder(folder.path).history() == RunFolder(folder.path).history() != []


def test_later_seeds_are_trained_at_the_rate_that_validation_chose_and_none_is_left_to_resume(
    tmp_path: Path,
) -> None:
    what = suite({"sweep_seeds": 1}, seed=[0, 1, 2], learning_rate=[0.001, 0.02])
    first, second = Listening(), Listening()
    _, records = run(tmp_path, what, first)
    by_variant: dict[str, dict[int, list[Record]]] = {}
    for record in records:
        by_variant.setdefault(record.variant, {}).setdefault(record.seed, []).append(record)
    for seeds in by_variant.values():
        best = max(seeds[0], key=lambda record: record.val_score or 0.0)
        assert [record.learning_rate for seed in (1, 2) for record in seeds[seed]] == [best.learning_rate] * 2
    assert {record.protocol for record in records} == {"sweep"}
    assert (first.numbers, len(first.rows)) == ((8, 8, 0), 8)
    assert digits(run(tmp_path, what, second)[1]) == digits(records)
    assert (second.numbers, len(second.rows)) == ((8, 0, 8), 0)


def test_a_rate_is_not_chosen_by_the_score_of_the_test() -> None:
    cells = make_plan(
        suite({"sweep_seeds": 1}, seed=[0, 1], learning_rate=[0.001, 0.02], variant="softmax"), Options()
    ).cells
    first, late = phases(cells)
    assert [(cell.seed, len(cells)) for cell in first] == [(0, 4)] * 2

    def row(at: int, val: float, test: float) -> Record:
        rate = first[at].training
        assert rate is not None
        return Record.of(first[at], Status.OK, score=test, val_score=val, chance_score=0.25, test_examples=32)

    rows = {row(0, 0.9, 0.2).cell_id: row(0, 0.9, 0.2), row(1, 0.5, 1.0).cell_id: row(1, 0.5, 1.0)}
    chosen = at_chosen_rates(cells, rows)
    assert [cell.training for cell in chosen] == [late[0].training] == [first[0].training]
    assert at_chosen_rates(cells, {}) == []


def test_quick_is_one_seed_at_one_rate(tmp_path: Path) -> None:
    what = suite(seed=[3, 4], learning_rate=[0.001, 0.02])
    cells = make_plan(what, Options(device="cpu", out=tmp_path, quick=True)).cells
    assert [(cell.seed, cell.training and cell.training.learning_rate) for cell in cells] == [(3, 0.001)] * 2
    assert {cell.training and cell.training.protocol for cell in cells} == {"fixed"}


def test_what_cannot_be_trained_is_a_row_with_the_reason(tmp_path: Path) -> None:
    what = suite(
        variant=["local:window=16", "linformer:rank=4"], task=["digits", "text:folder=nowhere", MATRIX["task"]]
    )
    _, records = run(tmp_path, what)
    found = {(record.label, str(record.task).partition(":")[0]): (record.status, record.reason) for record in records}
    assert found["local:window=16", "recall"][0] is Status.UNSUPPORTED
    assert "softmax attention at n = 16" in found["local:window=16", "recall"][1]
    assert found["linformer:rank=4", "digits"][1] == "digits: an image has 64 pixels; set seq_len to 64, not 16"
    assert "nowhere" in found["linformer:rank=4", "text"][1]
    assert found["linformer:rank=4", "recall"] == (Status.OK, "")


FUTURE = """
from dataclasses import replace
from attnbench import register
from attnbench.catalogue.attention.exact.softmax import Softmax
from attnbench.contract.variant import VARIANTS

@register("own-future", family="exact", source="-", formula="-", cost="-", traits=VARIANTS.get("softmax").traits)
class Future(Softmax):
    def __init__(self, shape):
        super().__init__(replace(shape, causal=False))
"""


def test_who_breaks_a_law_is_not_trained_and_unchecked_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUTURE)
    what = suite(variant=["linear", "softmax"], causal=True).to_yaml().replace("linear", "own-future")
    (tmp_path / "s.yaml").write_text(what)
    command = [sys.executable, "-m", "attnbench", "run", "s.yaml", "--plugin", "own.py", "--json", "--device", "cpu"]
    for more, wrong, true in (([], ("formula", "error"), (HELD, "ok")), (["--unchecked"], *2 * [(UNCHECKED, "ok")])):
        done = subprocess.run([*command, *more, "--out", f"{len(more)}"], cwd=tmp_path, capture_output=True, text=True)
        found = {row["label"]: (row["laws"], row["status"]) for row in json.loads(done.stdout)}
        assert found == {"own-future": wrong, "softmax": true}, done.stderr


DIVERGES = """
import torch
from torch import nn
from attnbench import register
from attnbench.contract.variant import Traits

@register("own-diverges", family="reference", source="-", formula="-", cost="-",
          traits=Traits(target="other", cross=False, key_padding=False))
class Diverges(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.calls = 0

    def forward(self, q, k, v, *, key_mask=None):
        self.calls += 1
        return v * (float("nan") if self.training and self.calls > 3 else 1.0)
"""


def test_a_loss_that_is_not_finite_is_a_row_with_the_step(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DIVERGES)
    (tmp_path / "s.yaml").write_text(suite(variant="softmax").to_yaml().replace("softmax", "own-diverges"))
    command = [sys.executable, "-m", "attnbench", "run", "s.yaml", "--plugin", "own.py", "--json", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    (row,) = json.loads(done.stdout)
    assert (row["status"], row["reason"]) == ("nonfinite", "the loss is nan at step 4 of 6")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_finished_trainings_outlive_the_end_of_the_run_and_the_same_command_resumes_it(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text(suite({"steps": 200}, seed=[0, 1, 2]).to_yaml())
    command = [sys.executable, "-m", "attnbench", "run", "s.yaml", "--device", "cpu", "--threads", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while not any(len(file.read_text().splitlines()) >= 2 for file in tmp_path.glob("results/s/*/records.jsonl")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.communicate(timeout=60)
    (records,) = tmp_path.glob("results/s/*/records.jsonl")
    before = [json.loads(line) for line in records.read_text().splitlines()]
    finished = {row["cell_id"]: row for row in before if row["status"] == "ok"}
    assert 2 <= len(finished) < 6
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert f"resuming {records.parent.relative_to(tmp_path)}: {len(finished)} of 6 cells" in done.stderr
    after = [json.loads(line) for line in records.read_text().splitlines()]
    assert {row["cell_id"] for row in after if row["status"] == "ok"} >= finished.keys()
    assert sum(row["cell_id"] in finished for row in after) == len(finished)  # none was trained again
    assert len({row["cell_id"] for row in after}) == 6


def test_a_row_that_was_trained_with_other_threads_is_foreign(tmp_path: Path) -> None:
    folder, records = run(tmp_path, suite())
    row = replace(records[0], threads=2)
    from attnbench.results.validation import foreign_to_run

    assert foreign_to_run(records[0], folder.environment) == ""
    assert foreign_to_run(row, folder.environment) == "threads is 2, but 1 for this run"


def test_a_task_that_softmax_does_not_solve_is_doubted_in_each_of_its_rows_once(tmp_path: Path) -> None:
    heard = Listening()
    for _ in range(2):  # the second time nothing is left to train
        folder, records = run(tmp_path, suite({"solved": 0.99}), heard)
    doubt = re.compile(r"softmax scores 0\.\d\d of the 0\.99 that this task needs to tell apart")
    assert [len(doubt.findall(record.warnings)) for record in records] == [1, 1]
    assert any(doubt.search(one) and "recall" in one for one in heard.warnings)
    assert [len(doubt.findall(row.warnings)) for row in folder.records().values()] == [1, 1]
    _, plain = run(tmp_path / "plain", suite({"solved": 0.01}))
    assert [record.warnings for record in plain] == ["", ""]


def test_tests_of_one_training_are_rows_that_took_one_training_and_a_doubt_about_it_is_in_all_of_them(
    tmp_path: Path,
) -> None:
    what = suite({"solved": 0.99}, test_len=[16, 40, 8], task="chains:ring=4,test=32", positions="none", seed=[0, 1])
    watcher = Listening()
    folder, records = run(tmp_path / "a", what, watcher)
    assert (watcher.numbers, len(watcher.rows)) == ((12, 12, 0), 12)
    assert [record.test_len for record in records] == 2 * [16, 16, 40, 40, 8, 8]
    assert {record.status for record in records} == {Status.OK}
    assert not (folder.path / "checkpoints").exists()
    clocks = {(record.variant, record.seed, record.train_s) for record in records}
    assert len(clocks) == 4, "the time of a training would differ in another one"
    assert {record.warnings.count("that this task needs to tell apart") for record in records} == {1}
    _, alone = run(
        tmp_path / "b",
        suite(
            {"solved": 0.99}, test_len=40, task=str(what.sweeps[0].matrix.task[0].label), positions="none", seed=[0, 1]
        ),
    )
    assert [record.warnings for record in alone] == [""] * 4, "to fail at another length is no doubt"
    known = {(record.variant, record.seed): record.score for record in records if record.test_len == 40}
    assert {(record.variant, record.seed): record.score for record in alone} == known


def test_a_run_that_lost_some_tests_of_a_training_takes_them_alone(tmp_path: Path) -> None:
    what = suite(test_len=[16, 40], task="chains:ring=4,test=32", positions="none", variant="softmax")
    folder, records = run(tmp_path, what)
    lines = (folder.path / "records.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "records.jsonl").write_text(lines[0])
    watcher = Listening()
    assert digits(run(tmp_path, what, watcher)[1]) == digits(records)
    assert watcher.numbers == (2, 1, 1)


@pytest.mark.parametrize(
    ("threads", "memory", "count", "each"),
    [
        (2, 2**30, 2, (False, 2**29)),
        (2, 2**30, 1, (True, 2**29)),
        (1, 2**30, 2, (True, 2**30)),
        (2, LEAST_MEMORY, 2, (True, LEAST_MEMORY)),
    ],
)
def test_a_training_is_alone_where_no_other_runs_beside_it_or_would_leave_torch_too_little_memory(
    threads: int, memory: int, count: int, each: tuple[bool, int]
) -> None:
    seen: list[tuple[bool, int | None]] = []
    cells = make_plan(suite(), Options(device="cpu")).cells[:count]

    def attempt(cell: Cell, worker: Worker, *_: object) -> None:
        seen.append((worker.settings.alone, worker.settings.memory_limit))

    list(run_all(cells, Settings(threads=threads, memory_limit=memory), {}, attempt, print))
    assert seen == [each] * count


def test_energy_stands_in_the_row_of_a_training_that_was_alone_and_in_no_other(tmp_path: Path) -> None:
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    for name, content in (("name", "package-0"), ("energy_uj", "5"), ("max_energy_range_uj", "9000000000")):
        (zone / name).write_text(content)
    plugin = tmp_path / "counters.py"
    plugin.write_text(
        "from pathlib import Path\nfrom attnbench.measure import energy\n"
        f"energy.POWERCAP = Path({str(zone.parent)!r})\n"
    )
    for variants, told in ((["softmax"], [0.0]), (["softmax", "identity"], [None, None])):
        _, records = run(tmp_path / "out", suite(variant=variants), plugins=(str(plugin),))
        assert [(record.status, record.energy_j) for record in records] == [(Status.OK, one) for one in told]
