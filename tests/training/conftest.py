from __future__ import annotations

import pytest
import torch

import attnbench.attention  # noqa: F401  # fills the table of variants


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
