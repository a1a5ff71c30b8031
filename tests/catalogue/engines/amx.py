"""A plug-in of pytest: a processor with AMX, whose oneDNN multiplies in bfloat16 unless its instruction set is limited.

``python -m pytest -p tests.catalogue.engines.amx tests/catalogue/engines/test_products.py`` runs those tests as they
run there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

LIMIT = "ONEDNN_MAX_CPU_ISA"


class BFloat16(TorchDispatchMode):
    """Inside, oneDNN rounds float32 matrices to bfloat16 before it multiplies them."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else torch.compile refuses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func._schema.name.removeprefix("aten::") in ("mm", "bmm", "addmm", "baddbmm")
        if product and torch.backends.mkldnn.matmul.fp32_precision == "bf16":  # type: ignore[attr-defined]  # untyped
            args = tree_map_only(Tensor, _shortened, args)
        return func(*args, **(kwargs or {}))


def _shortened(x: Tensor) -> Tensor:
    return x.bfloat16().float() if x.dtype == torch.float32 else x


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    if LIMIT in os.environ:
        return (yield)
    with BFloat16():
        return (yield)
