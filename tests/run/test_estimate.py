from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attnbench.attention
import attnbench.inputs
import attnbench.tasks  # noqa: F401  # these fill their tables
from attnbench.cell import Cell, ModelSize, Training
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.run.call import prepare
from attnbench.run.estimate import estimate
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
