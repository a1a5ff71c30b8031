from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attnbench.attention
import attnbench.inputs
import attnbench.tasks  # noqa: F401  # these fill their tables
from attnbench.cell import Cell, Measure, ModelSize, Training
from attnbench.measure.flops import Prediction, count
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.run.call import prepare
from attnbench.run.estimate import _follow, estimate
from attnbench.run.plan import Options, make_plan
from attnbench.shape import Shape
from attnbench.spec import Spec, parse_spec


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

    def follow(cell: Cell, n: int, most: int) -> Prediction:
        follows.append(cell)
        return Prediction(1000, 10, steps=100)

    monkeypatch.setattr("attnbench.run.estimate._follow", follow)
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
    one, other = (_follow(a_step(variant, shape=whole, seed=seed), 64, 10**6) for seed in (0, 1))
    assert one.peak_bytes is not None
    assert (one.matmul_flops, one.peak_bytes) == (other.matmul_flops, other.peak_bytes)


@pytest.mark.parametrize("variant", ["softmax", "linear"])
def test_what_is_extrapolated_is_what_would_be_counted(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("s", "w", parse_spec(variant), Shape(batch=2, heads=2, seq_len=128, head_dim=8), pass_="stepwise")
    real = prepare(cell).run
    monkeypatch.setattr("attnbench.run.estimate.STEPS", _follow(cell, 24, 10**6).steps)
    ((_, found),) = estimate([cell], 1)
    assert found.reason == "extrapolated from n = 8, 16, 24"
    assert found.matmul_flops == count(real).matmul_flops
    assert found.peak_bytes == pytest.approx(peak_tensor_bytes(real), rel=0.1)


def test_a_task_is_cut_to_a_shorter_length_with_its_labels() -> None:
    shape = Shape(batch=2, heads=2, seq_len=64, head_dim=8)
    model = ModelSize(layers=1, ffn=16)
    cell = Cell("s", "w", Spec("softmax"), shape, level="model", pass_="training", model=model)
    for task in ("recall", "recall:ids=2", "listops:min_length=16,max_length=64"):
        asked = replace(cell, task=parse_spec(task))
        half, whole = (_follow(asked, n, 10**6) for n in (32, 64))
        assert half.reason == ""
        assert half.steps == whole.steps
        assert half.matmul_flops is not None
        assert whole.matmul_flops is not None
        assert 0 < half.matmul_flops < whole.matmul_flops / 2, task


def test_a_call_whose_steps_do_not_depend_on_its_length_is_followed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = a_step("softmax")
    real = _follow(cell, 64, 10**6)
    monkeypatch.setattr("attnbench.run.estimate.STEPS", real.steps // 5)
    ((_, found),) = estimate([cell], 1)
    assert found == real
    monkeypatch.setattr("attnbench.run.estimate._AT_ANY_PRICE", 2)
    ((_, found),) = estimate([cell], 1)
    assert found.reason == "unknown: too many steps to be followed"


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
