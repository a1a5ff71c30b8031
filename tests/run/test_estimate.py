from __future__ import annotations

import pytest
import torch

import attnbench.attention
import attnbench.inputs  # noqa: F401  # fills the table of inputs
from attnbench.cell import Cell
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.run.call import prepare
from attnbench.run.estimate import estimate
from attnbench.shape import Shape
from attnbench.spec import parse_spec


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
