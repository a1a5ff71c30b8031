"""Small products on a CPU are those of torch's default library, whatever multiplies the large ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attnbench.attention.default_library import DefaultLibrary, for_small_products, small_bmm
from attnbench.attention.nystrom import newton

FEW = 1 << 21
"""Multiplications up to which a product is small."""


@pytest.fixture(autouse=True)
def _medium() -> Iterator[None]:
    """As in the tuned process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("dtype", "multiplications", "precision"),
    [
        (torch.float32, FEW, "highest"),
        (torch.float32, FEW + 1, "medium"),
        (torch.bfloat16, FEW, "highest"),  # whose sums are in float32
        (torch.float64, FEW, "medium"),  # which has one library only
    ],
)
def test_small_float32_products_alone_change_the_library(
    dtype: torch.dtype, multiplications: int, precision: str
) -> None:
    with for_small_products(torch.zeros(1, dtype=dtype), multiplications):
        assert torch.get_float32_matmul_precision() == precision
    assert torch.get_float32_matmul_precision() == "medium"


def test_on_another_device_nothing_changes() -> None:
    with for_small_products(torch.zeros(1, device="meta"), 1):
        assert torch.get_float32_matmul_precision() == "medium"


def test_a_product_that_fails_leaves_the_library_as_it_was() -> None:
    with pytest.raises(RuntimeError), DefaultLibrary():
        torch.bmm(torch.randn(1, 2, 3), torch.randn(1, 2, 3))
    assert torch.get_float32_matmul_precision() == "medium"


def test_it_is_counted_by_what_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x: seen.append(torch.get_float32_matmul_precision()) or bmm(*x))
    x = torch.randn(8, 64, 64)
    torch.testing.assert_close(small_bmm(x, x), x @ x)
    small_bmm(torch.randn(8, 64, 64), torch.randn(8, 64, 65))
    newton(x.softmax(-1), x.mT / 64, 1)
    assert seen == ["highest", "medium", "highest"]


def test_compiled_it_is_one_graph() -> None:
    A = torch.randn(2, 4, 4).softmax(-1)
    torch._dynamo.reset()
    compiled = torch.compile(newton, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(A, A.mT / 4, 2), newton(A, A.mT / 4, 2))
