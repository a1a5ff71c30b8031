from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.cli.run import _minutes
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError
from attnbench.harness.forecast import Duration, _follow, duration, estimate
from attnbench.harness.inside.call import prepare
from attnbench.harness.outside.interpreter import Interpreter
from attnbench.harness.plan import Options, make_plan
from attnbench.measure.flops import Prediction, count, predict
from attnbench.measure.machine import machine_id
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.measure.status import Status
from attnbench.results.manifest import BESIDE
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, Measure, ModelSize, Pass, Training


@pytest.mark.parametrize("name", ["linformer", "chunked"])
def test_memory_is_foreseen_for_the_threads_that_will_run(name: str) -> None:
    """Tiles are as large as the caches of all cores in use."""
    cell = Cell("s", "w", parse_spec(name), Shape(heads=4, seq_len=2048, head_dim=16))
    foreseen = {}
    try:
        for threads in (1, 2):
            ((_, predicted),) = estimate([cell], threads)
            assert predicted.peak_bytes is not None
            assert predicted.peak_bytes == pytest.approx(peak_tensor_bytes(prepare(cell).run), rel=0.05)
            foreseen[threads] = predicted.peak_bytes
    finally:
        torch.set_num_threads(1)
    assert foreseen[1] < foreseen[2]


@pytest.mark.parametrize("name", ["sdpa", "chunked", "performer", "linear", "topk", "reformer"])
def test_meta_tensors_tell_what_fake_ones_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(heads=2, seq_len=192, head_dim=16, causal=True)
    cell = Cell("s", "w", Spec(name), shape, level="layer", pass_="training")
    foreseen, asked = [], list[str]()
    for may_be_meta in (True, False):

        def foresee(make: Any, *, device: Any, may: bool = may_be_meta, **more: Any) -> Prediction:
            if device == "meta" and not may:
                raise NotImplementedError
            asked.append(device)
            return predict(make, device=device, **more)

        monkeypatch.setattr("attnbench.harness.forecast.predict", foresee)
        foreseen += [_follow(cell)]
    assert asked == ["meta", "cpu"]
    meta, fake = foreseen
    assert fake.peak_bytes
    assert (meta.matmul_flops, meta.peak_bytes, meta.reason) == (fake.matmul_flops, fake.peak_bytes, fake.reason)


@pytest.mark.parametrize("task", ["recall", "recall:ids=2", "digits"])
def test_a_training_is_foreseen_from_its_first_step(task: str) -> None:
    shape = Shape(batch=2, heads=2, seq_len=64, head_dim=8)
    model = ModelSize(layers=1, ffn=16)
    timed = Cell("s", "w", Spec("softmax"), shape, level="model", pass_="training", model=model, task=parse_spec(task))
    scored = replace(timed, measure=("score",), training=Training(steps=7))
    one, whole = (predicted for _, predicted in estimate([timed, scored], 1))
    assert one.peak_bytes is not None
    assert one.peak_bytes == pytest.approx(peak_tensor_bytes(prepare(timed).run), rel=0.05)
    assert one.matmul_flops is not None
    assert (whole.matmul_flops, whole.peak_bytes) == (7 * one.matmul_flops, one.peak_bytes)
    assert whole.reason == "of 7 steps"


def test_cells_that_differ_in_seed_and_rate_alone_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = make_plan("score-long", Options(device="cpu")).cells
    sizes = {(cell.sweep, cell.variant, cell.shape) for cell in cells}
    assert len(cells) == 6 * len(sizes), "three seeds, two rates"
    follows = []

    def follow(cell: Cell) -> Prediction:
        follows.append(cell)
        return Prediction(1000, 10, steps=100)

    monkeypatch.setattr("attnbench.harness.forecast._follow", follow)
    found = list(estimate(cells, 1))
    assert len(follows) == len(sizes)
    assert [cell for cell, _ in found] == cells
    assert {one.matmul_flops for _, one in found} == {500_000, 2_000_000}


def a_step(variant: str, **more: Any) -> Cell:
    """A step of training a small model."""
    given = {"shape": Shape(batch=2, heads=2, seq_len=64, head_dim=8, causal=True), "pass_": "training"}
    return Cell("s", "w", parse_spec(variant), level="model", model=ModelSize(1, 16), **{**given, **more})


@pytest.mark.parametrize("variant", ["local:window=8", "bigbird:block=8", "performer", "reformer:rounds=2,chunk=8"])
def test_no_seed_changes_what_is_foreseen(variant: str) -> None:
    whole = Shape(batch=2, heads=2, seq_len=64, head_dim=8)
    one, other = (_follow(a_step(variant, shape=whole, seed=seed)) for seed in (0, 1))
    assert one.peak_bytes is not None
    assert (one.matmul_flops, one.peak_bytes) == (other.matmul_flops, other.peak_bytes)


@pytest.mark.parametrize("variant", ["identity", "softmax", "sdpa", "performer:features=16", "streaming:window=4"])
@pytest.mark.parametrize("pass_", ["forward", "stepwise"])
def test_what_is_foreseen_is_counted_at_the_cells_own_length_and_holds_its_output(variant: str, pass_: Pass) -> None:
    n = 6 if pass_ == "stepwise" else 96
    shape = Shape(batch=2, heads=2, seq_len=n, head_dim=8, causal=pass_ == "stepwise")
    cell = Cell("s", "w", parse_spec(variant), shape, pass_=pass_)
    if "identity" in variant and pass_ == "stepwise":
        return
    ((_, found),) = estimate([cell], 1)
    real = prepare(cell).run
    assert found.matmul_flops == count(real).matmul_flops
    assert found.peak_bytes is not None
    if variant != "sdpa":  # whose kernel holds more inside, as its note says
        assert found.peak_bytes == pytest.approx(peak_tensor_bytes(real), rel=0.1, abs=2048)
    if variant != "identity" and pass_ == "forward":
        assert found.peak_bytes >= 2 * 2 * 96 * 8 * 4


def test_what_has_too_many_steps_is_unknown_and_so_is_what_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    honest = _follow

    def follow(cell: Cell) -> Prediction:
        followed.append(cell.shape.N)
        return honest(cell)

    monkeypatch.setattr("attnbench.harness.forecast._follow", follow)
    shape = Shape(batch=2, heads=2, seq_len=8, head_dim=8, causal=True)
    lengths = (8, 64, 128, 256)
    cells = [Cell("s", "w", Spec("linear"), replace(shape, seq_len=n), pass_="stepwise") for n in lengths]
    monkeypatch.setattr("attnbench.harness.forecast.STEPS", honest(cells[0]).steps)
    found = [one for _, one in estimate(cells, 1)]
    assert followed == [8, 64]
    assert found[0].matmul_flops == count(prepare(cells[0]).run).matmul_flops
    for one in found[1:]:
        assert (one.matmul_flops, one.peak_bytes, one.reason) == (None, None, "unknown: too many steps to be followed")


def test_a_plan_follows_so_many_steps_in_all_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("s", "w", Spec("softmax"), Shape(heads=2, seq_len=n, head_dim=8)) for n in (16, 24, 32)]
    monkeypatch.setattr("attnbench.harness.forecast.ALL_STEPS", _follow(cells[0]).steps)
    first, *others = (one for _, one in estimate(cells, 1))
    assert first.peak_bytes is not None
    assert {one.reason for one in others} == {"unknown: the plan is too long to follow it all; choose cells by -k"}


def test_what_is_broken_off_leaves_gradients_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("s", "w", Spec("nsa"), Shape(heads=2, seq_len=64, head_dim=8, causal=True), pass_="training")
    for steps in (60, 80, 100):
        monkeypatch.setattr("attnbench.harness.forecast.STEPS", steps)
        list(estimate([cell], 1))
        assert torch.is_grad_enabled()


def test_what_a_fused_kernel_holds_inside_is_said_to_be_missing() -> None:
    shape = Shape(heads=2, seq_len=64, head_dim=8)
    (_, fused), (_, plain) = estimate([Cell("s", "w", Spec(name), shape) for name in ("sdpa", "softmax")], 1)
    assert (fused.reason, plain.reason) == ("without what flash_cpu holds inside", "")


def test_a_run_lasts_as_earlier_ones_on_this_machine_did_or_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("quick", Options(device="cpu", out=tmp_path))
    timed = [cell for cell in plan.cells if "time" in cell.measure]
    unknown = duration(plan)
    assert unknown.seconds is None
    assert unknown.least_seconds == pytest.approx(plan.rules.min_time * len(timed))
    assert "no earlier run of quick on this machine" in unknown.ground

    class Earlier:
        environment: tuple[str, ...] = ()

        def records(self) -> dict[str, Record]:
            rows = [Record.of(cell, Status.OK, machine_id=self.machine) for cell in [*plan.cells, plan.cells[0]]]
            for second, row in enumerate(rows):
                row.started_at = f"2026-01-01T00:{second * 20 // 60:02}:{second * 20 % 60:02}+00:00"
            return {f"{place}": row for place, row in enumerate(rows)}

        def __init__(self, machine: str) -> None:
            self.machine = machine

    monkeypatch.setattr("attnbench.harness.forecast.find_runs", lambda _: [Earlier("elsewhere")])
    assert duration(plan) == unknown
    monkeypatch.setattr("attnbench.harness.forecast.find_runs", lambda _: [Earlier(machine_id("cpu"))])
    visits = sum(plan.rules.rounds if "time" in cell.measure else 1 for cell in plan.cells)
    assert duration(plan).seconds == pytest.approx(20 * visits)
    beside = replace(plan, options=replace(plan.options, beside=Interpreter("python", "python", own=False)))
    assert duration(beside).seconds == pytest.approx(2 * 20 * visits)
    assert duration(beside).least_seconds == pytest.approx(2 * unknown.least_seconds)
    Earlier.environment = (BESIDE,)
    assert [duration(one).seconds for one in (plan, beside)] == pytest.approx([10 * visits, 20 * visits])


def test_trainings_last_as_long_as_they_computed_whenever_their_rows_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "name: s\nsweeps: [{name: w, level: model, pass: training, measure: score, training: {steps: 6},"
        " matrix: {variant: [softmax, identity], task: 'chains:ring=4', test_len: [16, 40], seq_len: 16}}]\n"
    )
    plan = make_plan(suite, Options(device="cpu", out=tmp_path, threads=2))

    class Earlier:
        environment: tuple[str, ...] = ()

        def records(self) -> dict[str, Record]:
            days = ("03", "02", "01", "04")  # the first to end was the last to begin, and a pause of a day followed
            rows = [
                Record.of(cell, Status.OK, machine_id=machine_id("cpu"), train_s=30.0, started_at=f"2026-01-{day}")
                for cell, day in zip(plan.cells, days, strict=True)
            ]
            return {row.cell_id: row for row in rows}

    monkeypatch.setattr("attnbench.harness.forecast.find_runs", lambda _: [Earlier()])
    assert duration(plan).seconds == pytest.approx(30.0), "two trainings at once, with two tests of each"


def test_a_plan_for_a_device_of_another_machine_needs_none_here(tmp_path: Path) -> None:
    plan = make_plan("gpu", Options(device="cuda:7", out=tmp_path, dry=True))
    assert {(cell.device, cell.shape.N, cell.dtype) for cell in plan.cells} == {
        ("cuda:7", n, "bfloat16") for n in (4096, 16384, 65536)
    }
    assert duration(plan).ground == "how long is unknown: this machine has no cuda:7"
    with pytest.raises(UsageError, match="no device 'cuda:7' on this machine"):
        make_plan("gpu", Options(device="cuda:7", out=tmp_path))
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        make_plan("gpu", Options(device="tpu", out=tmp_path, dry=True))


SMOLLM2 = Shape(heads=9, kv_heads=3, seq_len=1024, head_dim=64, causal=True)


@pytest.mark.parametrize("measure", [("error",), ("time", "memory")])
@pytest.mark.parametrize(
    ("inputs", "shape", "reason"),
    [
        ("smollm2", replace(SMOLLM2, seq_len=1025), "smollm2 has 1024 positions, fewer than 1025"),
        ("smollm2", replace(SMOLLM2, heads=12), "smollm2 has 9 heads, fewer than 12"),
        ("smollm2", replace(SMOLLM2, batch=4), "smollm2 has 3 (sequence, layer) pairs, fewer than batch 4"),
        ("smollm2", replace(SMOLLM2, head_dim=32), "smollm2 has heads of width 64, not 32"),
        ("minilm", Shape(heads=12, seq_len=257, head_dim=32), "minilm has 256 positions, fewer than 257"),
        ("listops", Shape(heads=2, seq_len=2049, head_dim=64), "listops has 2048 positions, fewer than 2049"),
        ("low-rank:rank=9", Shape(heads=1, seq_len=8, head_dim=8), "low-rank: rank 9 exceeds head_dim 8"),
    ],
    ids=str,
)
def test_a_shape_that_the_inputs_cannot_give_is_unsupported_before_anything_is_run(
    measure: tuple[Measure, ...], inputs: str, shape: Shape, reason: str
) -> None:
    cell = Cell("s", "w", Spec("softmax"), shape, inputs=parse_spec(inputs), measure=measure)
    ((_, predicted),) = estimate([cell], 1)
    assert (predicted.reason, predicted.peak_bytes) == (f"unsupported: {reason}", None)


def test_a_variant_that_cannot_have_an_error_is_unsupported_before_anything_is_run() -> None:
    cell = Cell("s", "w", Spec("linformer"), SMOLLM2, inputs=Spec("smollm2"), measure=("error",))
    ((_, refused), (_, fine)) = estimate([cell, replace(cell, variant=Spec("linear"))], 1)
    assert refused.reason.startswith("unsupported: causal: each projected row mixes keys from the whole sequence")
    assert fine.reason == "error only"


def test_what_is_timed_on_captured_inputs_is_foreseen_as_on_random_ones() -> None:
    shape = replace(SMOLLM2, seq_len=64)
    captured = Cell("s", "w", Spec("softmax"), shape, inputs=Spec("smollm2"))
    (_, one), (_, other) = estimate([captured, replace(captured, inputs=Spec("gaussian"))], 1)
    assert one == other
    assert one.peak_bytes == pytest.approx(peak_tensor_bytes(prepare(captured).run), rel=0.05)


def test_a_run_of_seconds_is_not_said_to_last_no_minute() -> None:
    assert _minutes(Duration(None, 2.4, "")) == "at least 2 s"
    assert _minutes(Duration(200.0, 2.4, "")) == "about 3 min"
    assert _minutes(Duration(None, 0.0, "")) == "an unknown time"


@pytest.mark.parametrize("pass_", ["forward", "training"])
@pytest.mark.parametrize(
    "variant", ["softmax", "performer", "local", "linformer:rank=8", "linformer:rank=8,sharing=layerwise"]
)
def test_two_layers_tell_of_five(variant: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(
        "s",
        "w",
        parse_spec(variant),
        Shape(2, 2, 64, 16),
        level="model",
        pass_=pass_,
        model=ModelSize(layers=5, ffn=48),
    )
    found = _follow(cell)
    monkeypatch.setattr("attnbench.harness.forecast._has_equal_layers", lambda *_: False)
    whole = _follow(cell)
    assert whole.peak_bytes
    assert found == whole
    assert found.steps < whole.steps
