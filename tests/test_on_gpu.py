"""The script for a GPU: its sweep with tiny shapes on this processor, and its steps with a stand-in for Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from tests.benchmarks import on_gpu
from tests.docs.shellcheck import needs_shellcheck, shellcheck
from tests.test_package import HERE

SCRIPT = Path(on_gpu.__file__).with_suffix(".sh")

TINY = ("--device=cpu", "--n", "64", "--heads=2", "--head-dim=16", "--dtype=float32", "--only=sdpa,linear")


@pytest.mark.parametrize("name", sorted({name for name, _ in on_gpu.VARIANTS if not name.startswith("peer.")}))
def test_each_variant_of_the_sweep_has_the_options_that_it_names(name: str) -> None:
    spec = parse_spec(name)
    VARIANTS.get(spec.name).check(dict(spec.options))


def test_each_case_comes_once_and_the_default_form_before_the_others() -> None:
    found = list(on_gpu.cases([64, 128], set()))
    assert len({json.dumps(case) for case in found}) == len(found) == 6 * len(on_gpu.VARIANTS)
    forms = [case["form"] for case in found]
    assert forms == sorted(forms)


def rows(out: Path, *more: str) -> list[dict[str, Any]]:
    command = [sys.executable, on_gpu.__file__, str(out), *TINY, *more]
    subprocess.run(command, cwd=HERE, check=True, capture_output=True, timeout=120)
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_the_sweep_writes_a_row_for_each_case_and_says_what_cannot_be(tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.jsonl", "--warm=1")
    status = {(row["variant"], row["pass"], row["level"], row["form"]): row["status"] for row in found}
    assert status["linear", "training", "operator", "torch"] == status["sdpa", "forward", "layer", "auto"] == "ok"
    assert status["sdpa:backend=cudnn", "forward", "operator", "auto"] == "unsupported"
    assert all(row["eager_ms"] > 0 for row in found if row["status"] == "ok")


@pytest.mark.slow
def test_a_case_that_is_late_ends_and_the_next_one_begins(tmp_path: Path) -> None:
    found = rows(tmp_path / "rows.jsonl", "--each=0.01", "--minutes=0.1")
    assert len(found) > 5
    assert {row["status"] for row in found} == {"timeout"}


PYTHON = """#!/bin/sh
echo "$*" >>"$ASKED"
case $* in
*/bad.whl*) exit 1 ;;
*" -m cuda "*) echo "FAILED tests/test_one.py::test_it"; exec sleep "$HANGS" ;;
*" run gpu "*) mkdir -p "$OUT/runs/gpu" && echo row >"$OUT/runs/gpu/records.jsonl" && exit 4 ;;
esac
"""
"""Installs no set of wheels that has a bad one; its tests hang, and its suite fails after a row."""


def unattended(tmp_path: Path, *steps: str, hangs: int = 0) -> tuple[str, list[str]]:
    """The output of the script within a minute, and its requests to Python."""
    python, wheels, asked = tmp_path / "python3", tmp_path / "wheels", tmp_path / "asked"
    python.write_text(PYTHON)
    python.chmod(0o755)
    wheels.mkdir()
    for name in ("bad", "good"):
        (wheels / f"{name}.whl").touch()
    places = {"OUT": tmp_path / "out", "WHEELS": wheels, "ASKED": asked, "HANGS": hangs}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment = os.environ | path | {key: str(value) for key, value in places.items()}
    command = ["sh", str(SCRIPT), "1", *steps]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=100)
    return done.stdout, asked.read_text().splitlines()


def test_a_wheel_of_another_machine_and_a_suite_that_fails_keep_no_other_step_from_being_taken(tmp_path: Path) -> None:
    said, asked = unattended(tmp_path, "tests", "gpu", "kernels")
    assert "bad.whl was not installed" in said
    assert [one.rpartition("/")[2] for one in asked if "pip install" in one] == ["good.whl", "bad.whl", "good.whl"]
    assert "== gpu: exit 4 " in said
    assert "== kernels: exit 0 " in said
    with tarfile.open(tmp_path / "out" / "runs.tar.gz") as packed:
        names = {Path(name).as_posix() for name in packed.getnames()}
    logs = {f"{name}.log" for name in ("tests", "gpu", "kernels")}
    assert names == {"machine.txt", "failed.txt", "runs/gpu/records.jsonl", *logs}
    assert (tmp_path / "out" / "failed.txt").read_text() == "FAILED tests/test_one.py::test_it\n"


@pytest.mark.slow
def test_a_step_that_hangs_is_interrupted_and_the_next_one_has_its_time(tmp_path: Path) -> None:
    said, _ = unattended(tmp_path, "tests", "gpu", "kernels", hangs=1000)
    assert "== tests: exit 124 " in said
    assert "== kernels: exit 0 " in said


def test_without_a_place_for_rows_nothing_is_done(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(subprocess.CalledProcessError):
        unattended(tmp_path, "gpu")
    assert not (tmp_path / "asked").exists()


@needs_shellcheck
def test_the_script_has_no_fault_that_shellcheck_knows() -> None:
    shellcheck(SCRIPT)


LOST = """#!/bin/sh
while read -r case; do
    case $case in *linear*) status=error ;; *) status=ok ;; esac
    echo "{\\"status\\": \\"$status\\", \\"reason\\": \\"$$\\"}"
done
"""
"""Answers with its number as the reason."""


def test_after_an_error_another_process_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a kernel may leave its process without the device."""
    python = tmp_path / "python"
    python.write_text(LOST)
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    worker = on_gpu.Worker([])
    try:
        one, other, failed, last = (worker.ask({"variant": name}, 20) for name in ("sdpa", "gla", "linear", "sdpa"))
    finally:
        worker.end()
    assert one["reason"] == other["reason"] == failed["reason"] != last["reason"]
    assert [row["status"] for row in (other, failed, last)] == ["ok", "error", "ok"]
