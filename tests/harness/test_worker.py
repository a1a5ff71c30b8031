from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.contract.plugins.discovery import load
from attnbench.harness.inside import worker
from attnbench.harness.inside.execute import status_of
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.measure.status import Status
from attnbench.results.sources import Watch

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


def handle(monkeypatch: pytest.MonkeyPatch, *, cell: Any, device: str = "cuda") -> dict[str, Any]:
    served = worker.Served({"device": device}, {}, [], Watch({}, [], listens=False))
    monkeypatch.setattr(served, "_done", lambda do, data, tell: cell())
    return served.answer({"do": "cell"}, lambda done, of: None)


def test_memory_that_ran_out_is_told_from_a_lost_device() -> None:
    assert status_of(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))[0] is Status.OOM
    assert status_of(RuntimeError("CUDA error: out of memory"))[0] is Status.OOM
    assert status_of(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))[0] is (
        Status.OOM
    )
    assert status_of(torch.AcceleratorError(ILLEGAL))[0] is Status.ERROR


def test_a_process_whose_device_is_lost_says_so_whatever_the_cell_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: object) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    told = {"failed": "the device was lost: CUDA error: an illegal memory access was encountered", "lost": True}
    assert handle(monkeypatch, cell=lambda: {"record": {"status": "ok"}}) == told
    assert handle(monkeypatch, cell=lambda: lost(None)) == told


def test_a_process_that_ran_out_of_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    answer = {"record": {"status": "oom"}}
    assert handle(monkeypatch, cell=lambda: answer) == answer


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_only_an_nvidia_gpu_is_asked_whether_it_is_still_there(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    assert handle(monkeypatch, cell=lambda: {"record": {}}, device=device) == {"record": {}}


@pytest.mark.cuda
def test_on_a_gpu_memory_that_ran_out_is_oom_a_lost_device_is_a_crash_and_the_others_are_measured(
    tmp_path: Path,
) -> None:
    plugin = str(Path(__file__).with_name("bad_variants.py"))
    load(plugin)
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "name: s\nsweeps: [{name: w, matrix: {variant: [softmax, bad-memory, bad-access, linear, mean-value],"
        " seq_len: [64, 128], heads: 2, head_dim: 8}}]\n"
    )
    options = Options("cuda", out=tmp_path / "out", plugins=(plugin,), quick=True, memory_limit=2**33)
    _, records = execute(make_plan(suite, options))
    got = {(record.variant, record.seq_len): (str(record.status), record.reason) for record in records}
    for n in (64, 128):
        assert {name: got[name, n][0] for name in ("softmax", "linear", "mean-value")} == dict.fromkeys(
            ("softmax", "linear", "mean-value"), "ok"
        )
        assert got["bad-access", n][0] == "crash"
        assert "the device was lost: CUDA error" in got["bad-access", n][1]
    assert got["bad-memory", 64][0] == "oom"
    assert got["bad-memory", 128] == ("oom", "inferred: oom at n=64 already, so not run")
