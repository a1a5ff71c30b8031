from __future__ import annotations

import os

os.environ["ATTNBENCH_PLUGINS"] = ""  # installed plug-ins must not decide a test

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted; only heeded before triton is imported

torch.set_num_threads(1)  # small tensors: a second thread waits more than it works


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)
