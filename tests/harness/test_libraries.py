"""By which libraries a run multiplies: chance may decide once, and not again for a run that is held against it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import UsageError
from attnbench.harness import libraries
from attnbench.harness.libraries import products_like
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.wire.process import Products
from attnbench.harness.wire.protocol import Ready, VisitCell
from attnbench.measure import limits
from attnbench.measure.machine import describe, id_of, instructions
from attnbench.measure.time import TimingRules
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell
from tests.answers.machines import Machine, facts, measuring, state

CHOSEN = {"float32_products": "oneDNN", "window_products": "oneDNN"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Products | None]:
    """The libraries that each measuring process was told to use."""
    found: list[Products | None] = []

    def start(self: Any) -> dict[str, Any]:
        found.append(self.settings.products)
        return dict(self.state)

    monkeypatch.setattr(Machine, "start", start)
    monkeypatch.setattr(libraries, "describe", lambda device: facts())
    return found


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    return measuring(tmp_path, monkeypatch)


def test_a_new_run_multiplies_as_the_last_one_of_its_suite_on_such_a_machine(
    tmp_path: Path, measure: Callable[..., Path], told: list[Products | None]
) -> None:
    out = tmp_path / "results"
    first = measure(state(**CHOSEN), out=out)
    second = measure(state(1, **CHOSEN), out=out, fresh=True)  # another boot, so that the machine's id is another
    assert first != second
    assert told == [None, Products("oneDNN", "oneDNN")]


@pytest.mark.parametrize(
    ("machine", "options"),
    [
        (state(described=facts(cores=4), **CHOSEN), {}),
        (state(described=facts(torch="2.14.0"), **CHOSEN), {}),
        (state(described=facts(instructions="AVX512 amx_bf16"), **CHOSEN), {}),
        (state(**CHOSEN), {"threads": 1}),
        (state(), {}),  # it does not tell by which library windows were multiplied
    ],
    ids=["cores", "torch", "instructions", "threads", "older"],
)
def test_a_run_of_another_class_or_without_libraries_is_not_followed(
    machine: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    measure: Callable[..., Path],
    told: list[Products | None],
) -> None:
    measure(machine, out=tmp_path / "results", **options)
    measure(state(**CHOSEN), out=tmp_path / "results", fresh=True)
    assert told == [None, None]


def test_a_run_that_is_resumed_multiplies_as_its_rows_did(
    tmp_path: Path, measure: Callable[..., Path], told: list[Products | None]
) -> None:
    def interrupt(cell: Cell) -> bool:
        if cell.shape.N == 8:
            raise KeyboardInterrupt
        return False

    out = tmp_path / "results"
    with pytest.raises(KeyboardInterrupt):
        measure(state(**CHOSEN), out=out, fails=interrupt)
    # The probe would choose otherwise this time.
    run = measure(state(float32_products="default", window_products="default"), out=out)
    assert told == [None, Products("oneDNN", "oneDNN")]
    assert RunFolder(run).environment["float32_products"] == "oneDNN"


def test_a_run_takes_the_libraries_of_the_run_that_it_is_told_and_is_then_a_run_of_its_own(
    tmp_path: Path, measure: Callable[..., Path], told: list[Products | None]
) -> None:
    chosen = {"float32_products": "oneDNN", "window_products": "default"}
    good = measure(state(**chosen), out=tmp_path / "good")
    plain = measure(state(**CHOSEN), out=tmp_path / "results")
    like = measure(state(**chosen), out=tmp_path / "results", like=good)
    assert told == [None, None, Products("oneDNN", "default")]
    assert like != plain  # rows of two libraries do not share a folder


@pytest.mark.parametrize(
    ("there", "how", "said"),
    [
        (None, {}, r"--like .*: no such folder"),
        (state(), {}, "does not tell which libraries multiplied; leave --like out"),
        (state(described=facts(processor="Z"), **CHOSEN), {}, r"another machine \(processor Z, here AMD EPYC\)"),
        (state(described=facts(instructions="AVX2"), **CHOSEN), {}, r"\(instructions AVX2, here AVX512 avx512f\)"),
        (state(**CHOSEN), {"process": "as-shipped"}, "for the tuned process on a CPU"),
        (state(**CHOSEN), {"device": "cuda"}, "for the tuned process on a CPU"),
    ],
)
@pytest.mark.usefixtures("told")
def test_a_run_that_cannot_be_followed_is_refused(
    there: dict[str, Any] | None, how: dict[str, str], said: str, tmp_path: Path, measure: Callable[..., Path]
) -> None:
    path = tmp_path / "nowhere" if there is None else measure(there)
    with pytest.raises(UsageError, match=said):
        products_like(path, **{"device": "cpu", "process": "tuned", **how})  # type: ignore[arg-type]


@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_is_told_its_libraries_uses_them() -> None:
    for chosen in (Products("oneDNN", "oneDNN"), Products("default", "default")):
        with Worker(Settings(products=chosen, rates=False)) as worker:
            ready = worker.start()
            assert Products(ready["float32_products"], ready["window_products"]) == chosen  # type: ignore[arg-type]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("from_earlier_process", [False, True])
def test_a_library_that_is_taken_over_is_tried_for_its_precision_in_each_process(
    from_earlier_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "is_true_float32", lambda: torch.get_float32_matmul_precision() == "highest")
    with Worker(Settings(products=Products("oneDNN", "oneDNN"), rates=False)) as worker:
        if from_earlier_process:
            worker.state = cast(Ready, {**Worker.start(worker), **CHOSEN})  # as the process before it said
            worker.stop()
        ready = worker.start()
        assert Products(ready["float32_products"], ready["window_products"]) == Products()  # type: ignore[arg-type]
        cell = Cell("s", "w", Spec("softmax"), Shape(heads=1, seq_len=8, head_dim=4), measure=("memory",))
        record = VisitCell(cell, TimingRules(quick=True)).ask(worker, 60).record
        for said in (record.warnings, *ready["process_notes"][:1]):
            assert said == "float32 matmul stays with the default library: the faster one loses precision here"


def test_what_keeps_a_library_from_instructions_makes_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    free = instructions()
    assert free.split()[0] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert instructions() == f"{free} ONEDNN_MAX_CPU_ISA=AVX512_CORE"
    ids = {id_of({**describe("cpu"), "instructions": one}) for one in (free, instructions())}
    assert len(ids) == 2
    assert "instructions" in describe("cpu")
