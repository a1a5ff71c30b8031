"""A sink: what it takes, what it leaves, and who has one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError
from attnbench.laws.exact_error import measure_error
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.suite.cell import Cell

EXACT = ["softmax", "chunked:query_chunk=5,key_chunk=7", "sdpa"]
SHAPE = Shape(batch=2, heads=4, seq_len=23, head_dim=4, sink="learned")


def qkv(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw_qkv(Spec("gaussian"), shape, 3)
    return q.double(), k.double(), v.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", EXACT)
def test_half_precision_has_half_the_digits(text: str, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, causal=True)
    q, k, v = (x.to(dtype) for x in qkv(shape))
    module = build(text, shape).to(dtype)
    expected = exact_attention(q, k, v, causal=True, sink=module.sink.logit.detach())
    torch.testing.assert_close(module(q, k, v).double(), expected, atol=3e-2, rtol=3e-2)


def test_tiles_with_a_sink_take_no_more_memory() -> None:
    shape = Shape(heads=2, seq_len=2048, head_dim=16)
    peaks = []
    for one in (shape, replace(shape, sink="learned")):
        q, k, v = (x.float() for x in qkv(one))
        module = build("chunked", one)
        with torch.inference_mode():
            peaks.append(peak_tensor_bytes(lambda module=module, given=(q, k, v): module(*given)))
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("text", EXACT)
def test_an_error_is_against_attention_with_the_same_sink(text: str) -> None:
    error = measure_error(Cell("x", "s", parse_spec(text), SHAPE, dtype="float64", error_draws=1)).rel_error
    assert error is not None
    assert error < 1e-12


def test_another_word_is_refused() -> None:
    with pytest.raises(UsageError, match="sink must be one of none, learned"):
        Shape(sink="first")  # type: ignore[arg-type]  # on purpose
