"""What torch's default library multiplies where the process multiplies by oneDNN: what has gaps, and what is small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import products
from attnbench.catalogue.engines.low_rank.pseudo_inverse import newton
from attnbench.contract.problem.shape import Shape
from attnbench.measure.limits import is_true_float32
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.engines.amx import LIMIT, BFloat16

WITH_GAPS = [
    ("local:window=16", False),
    ("local:window=16", True),
    ("local:window=16,dilation=2", False),
    ("local:block=16,look_around=1", False),
    ("longformer:window=16,global_tokens=0", False),
    ("longformer:window=16,global_tokens=2", False),
    ("sparse:length=16", False),
    ("reformer:chunk=16,buckets=16", False),
    ("thinformer", False),
    ("linear:chunk=64", False),
    ("linear:chunk=64", True),
]

FEW = 1 << 21
"""Multiplications up to which a product is small."""


@pytest.fixture(autouse=True)
def _medium() -> Iterator[None]:
    """As in the tuned process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    with products.windows_in_place(True):
        yield
    torch.set_float32_matmul_precision(before)


def library() -> Any:
    """What multiplies now: "ieee" for the default library, "bf16" for oneDNN."""
    return torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # torch has no types here


Test = Callable[..., None]


def of_true_float32(test: Test) -> Test:
    """Ask oneDNN first: if it multiplies in bfloat16 here, its numbers are tried in a process where it cannot."""

    @wraps(test)
    def asked(*args: object, **named: object) -> None:
        if is_true_float32():
            test(*args, **named)
        else:
            _in_a_limited_process(f"{__file__}::{test.__name__}")

    return asked


@cache
def _in_a_limited_process(tests: str) -> None:
    assert LIMIT not in os.environ, "not even so is oneDNN true float32"
    _pytest(tests, **{LIMIT: "AVX512_CORE"})


def _pytest(*words: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3], env={**os.environ, **variables})


def overlapping(count: int = 5) -> Tensor:
    return torch.randn(16 * (count + 1), 8).as_strided((count, 32, 8), (16 * 8, 8, 1))


@pytest.mark.parametrize(("variant", "causal"), WITH_GAPS)
@of_true_float32
def test_output_and_gradients_are_the_formula_s(variant: str, causal: bool) -> None:
    module = build(variant, Shape(heads=2, seq_len=512, head_dim=16, causal=causal))
    inputs = [x.requires_grad_() for x in torch.randn(3, 1, 2, 512, 16).unbind()]
    results = []
    for form in (module.forward, module.dense):
        torch.manual_seed(0)
        out = form(*inputs)
        gradients = torch.autograd.grad(out.square().sum(), inputs, materialize_grads=True)  # reformer takes no keys
        results.append([out, *gradients])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@of_true_float32
def test_the_other_library_multiplies_only_what_has_gaps_or_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x, **y: seen.append(library()) or bmm(*x, **y))
    x, keys = torch.randn(500, 32, 8), overlapping(500)  # more than a few multiplications
    for own in (keys.mT, keys.contiguous().mT, keys.mT.contiguous()):
        torch.testing.assert_close(products.bmm(x, own), x @ own)
    assert seen == ["ieee", "bf16", "bf16"]
    assert library() == "bf16"


def test_a_product_that_fails_leaves_the_library_as_it_was() -> None:
    with pytest.raises(RuntimeError):
        products.bmm(torch.randn(5, 3, 7), overlapping().mT)
    assert library() == "bf16"


def test_nothing_is_copied() -> None:
    x, keys = torch.randn(5, 4, 8), overlapping()
    assert products.laid_out(keys) is keys
    in_place = peak_tensor_bytes(lambda: products.bmm(x, keys.mT))
    with products.windows_in_place(False):
        copied = peak_tensor_bytes(lambda: products.bmm(x, products.laid_out(keys).mT))
    assert in_place == 4 * 5 * 4 * 32
    assert copied is not None
    assert copied >= 4 * 5 * 4 * 32 + 4 * keys.numel()


def test_windows_take_less_memory_than_with_copies() -> None:
    module = build("local:window=128", Shape(heads=2, seq_len=4096, head_dim=64))
    q, k, v = torch.randn(3, 1, 2, 4096, 64).unbind()
    peaks = []
    for in_place in (True, False):
        with products.windows_in_place(in_place), torch.no_grad():
            peaks.append(peak_tensor_bytes(lambda: module(q, k, v)))
    assert peaks[0] < peaks[1]


def test_double_precision_and_gpus_know_no_copies() -> None:
    with products.windows_in_place(False):
        assert products.copies(torch.empty(1))
        assert products.copies(torch.empty(1, dtype=torch.bfloat16))
        assert not products.copies(torch.empty(1, dtype=torch.float64))
        assert not products.copies(torch.empty(1, device="meta"))


@pytest.mark.parametrize(
    ("dtype", "columns", "precision"),
    [
        (torch.float32, 64, "ieee"),
        (torch.float32, 65, "bf16"),
        (torch.bfloat16, 64, "ieee"),  # whose sums are in float32
        (torch.float64, 64, "bf16"),  # which has one library only
    ],
)
@of_true_float32
def test_small_float32_products_go_to_the_default_library(
    dtype: torch.dtype, columns: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    x, y = torch.randn(8, 64, 64, dtype=dtype), torch.randn(8, 64, columns, dtype=dtype)
    assert x.numel() * 64 == FEW
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x, **y: seen.append(library()) or bmm(*x, **y))
    near = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {}
    close = partial(torch.testing.assert_close, **near)
    close(products.bmm(x, y), x @ y)
    with products.best_for(x, y):
        close(torch.bmm(x, y), x @ y)
    assert seen == [precision] * 2
    assert library() == "bf16"


def test_on_another_device_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x, **y: seen.append(library()) or bmm(*x, **y))
    products.bmm(*torch.empty(2, 1, 2, 2, device="meta"))
    assert seen == ["bf16"]


def test_the_plain_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("highest")
    with monkeypatch.context() as patched:
        patched.setattr(torch._C, "_set_fp32_precision_setter", lambda *_: pytest.fail("nothing to choose"))
        x = torch.randn(2, 4, 4)
        torch.testing.assert_close(products.bmm(x, x), x @ x)


@of_true_float32
def test_compiled_it_is_one_graph() -> None:
    A = torch.randn(2, 4, 4).softmax(-1)
    torch._dynamo.reset()
    compiled = torch.compile(newton, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(A, A.mT / 4, 2), newton(A, A.mT / 4, 2))


# What these tests ask of oneDNN


def test_numbers_of_bfloat16_are_not_believed_but_asked_again_in_a_limited_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, *, env, **_: asked.append((command[-1], env[LIMIT])))
    test = of_true_float32(test_nothing_is_copied)
    with BFloat16():
        test()
        assert asked == [(f"{__file__}::test_nothing_is_copied", "AVX512_CORE")]
        monkeypatch.setenv(LIMIT, "AVX512_CORE")
        _in_a_limited_process.cache_clear()
        with pytest.raises(AssertionError, match="not even so"):
            test()


def test_a_limited_instruction_set_leaves_true_float32() -> None:
    code = (
        "import torch; from attnbench.measure.limits import is_true_float32; "
        "torch.set_float32_matmul_precision('medium'); assert is_true_float32()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, LIMIT: "AVX512_CORE"})


@pytest.mark.slow
def test_these_tests_pass_on_a_processor_whose_onednn_multiplies_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT, raising=False)
    _pytest("-p", "tests.catalogue.engines.amx", "-m", "not slow", __file__)
