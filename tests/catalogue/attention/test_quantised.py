from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.exact.quantised import Quantised, rounded
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws.exact_error import measure_error
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.suite.cell import Cell
from tests.catalogue.attention.small import HOLES, both, built, close, qkv

each_dtype = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3"])


def make(shape: Shape, **options: object) -> Quantised:
    return built(Quantised, "quantised", shape, **options).double()


def as_e4m3(x: float) -> float:
    """The nearest number with 3 bits of fraction and an exponent of -6 or more; ties go to an even fraction."""
    if x == 0:
        return 0.0
    unit = 2.0 ** (max(math.frexp(abs(x))[1] - 1, -6) - 3)
    return round(x / unit) * unit


def by_hand(q: Tensor, k: Tensor, v: Tensor, causal: bool, real: Tensor, how: tuple[str, int, int, bool]) -> Tensor:
    """Number by number, with Python's own rounding, and one softmax after the other."""
    dtype, q_block, k_block, smooth = how
    out = torch.zeros_like(v)
    for b in range(2):
        for h in range(3):
            keys = k[b, h] * real[b][:, None]
            if smooth:
                keys = (keys - keys.sum(0) / real[b].sum()) * real[b][:, None]
            coarse = []
            for x, block in ((q[b, h] * real[b][:, None], q_block), (keys, k_block)):
                y = x.clone()
                for start in range(0, 23, block):
                    scale = float(x[start : start + block].abs().max()) / (127 if dtype == "int8" else 448)
                    for t in range(start, min(23, start + block)):
                        for c in range(4):
                            number = float(x[t, c]) / scale if scale else 0.0
                            y[t, c] = (round(number) if dtype == "int8" else as_e4m3(number)) * scale
                coarse.append(y)
            for i in range(23):
                seen = [j for j in range(i + 1 if causal else 23) if real[b, j]]
                if seen:
                    out[b, h, i] = (coarse[1][seen] @ coarse[0][i] / 2).softmax(0) @ v[b, h, seen]
    return out


@both
@each_dtype
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("q_block", "k_block"), [(1, 1), (5, 7), (23, 4), (128, 64)])
def test_each_block_is_rounded_by_its_own_scale(
    shape: Shape, dtype: str, smooth: bool, q_block: int, k_block: int
) -> None:
    inputs = qkv(shape)
    module = make(shape, dtype=dtype, q_block=q_block, k_block=k_block, smooth_k=smooth)
    for mask in (None, HOLES):
        real = torch.ones(2, 23, dtype=torch.bool) if mask is None else mask
        expected = by_hand(*inputs, shape.causal, real, (dtype, q_block, k_block, smooth))
        out = module(*inputs, key_mask=mask)
        close(out * real[:, None, :, None], expected * real[:, None, :, None])


def one_by_one(line: Tensor, values: str) -> Tensor:
    """Numbers up to 448, or 6·448, by Python's own rounding, 16 by 16 where they have 4 bits."""
    if values == "float8_e4m3":
        return torch.tensor([as_e4m3(float(x)) for x in line], dtype=line.dtype)
    out: list[float] = []
    for part in torch.split(line, 16):
        scale = as_e4m3(float(part.abs().max()) / 6) or 1.0
        for x in part:
            size = min(abs(float(x)) / scale, 6.0)
            unit = 0.5 if size < 2 else 1.0 if size < 4 else 2.0
            out.append(math.copysign(round(size / unit) * unit * scale, float(x)))
    return torch.tensor(out, dtype=line.dtype)


@both
@pytest.mark.parametrize("values", ["float8_e4m3", "float4_e2m1"])
def test_weights_of_a_query_and_channels_of_the_values_are_rounded_by_scales_of_their_own(
    shape: Shape, values: str
) -> None:
    q, k, v = qkv(shape)
    module, most = make(shape, values=values, q_block=5, k_block=7, smooth_k=False), 448 * (6 if "4_" in values else 1)
    for mask in (None, HOLES):
        real = torch.ones(2, 23, dtype=torch.bool) if mask is None else mask
        out = module(q, k, v, key_mask=mask)
        for b, h in itertools.product(range(2), range(3)):
            there = real[b][:, None]
            queries, keys = (rounded((x[b, h] * there)[None, None], size, "int8")[0, 0] for x, size in ((q, 5), (k, 7)))
            columns = []
            for column in (v[b, h] * there).T:
                scale = column.abs().max() / most
                columns.append(one_by_one(column / scale, values) * scale)
            for i in real[b].nonzero()[:, 0].tolist():
                seen = real[b] & (torch.arange(23) <= (i if shape.causal else 22))
                logits = (keys @ queries[i] / 2).masked_fill(~seen, -math.inf)
                weights = (logits - logits.max()).exp()
                few = one_by_one(weights * most, values) / most
                close(out[b, h, i], torch.stack(columns) @ few / weights.sum())


@pytest.mark.parametrize(("values", "least", "most"), [("float8_e4m3", 0.02, 0.05), ("float4_e2m1", 0.08, 0.2)])
def test_the_error_of_rounded_weights_and_values_is_that_of_their_bits(values: str, least: float, most: float) -> None:
    shape = Shape(1, 2, 512, 64)
    q, k, v = (torch.randn(1, 2, 512, 64, dtype=torch.float64) for _ in range(3))
    assert least < relative_error(make(shape, values=values)(q, k, v), exact_attention(q, k, v)) < most


# The law of the group: what rounding may and may not do


@pytest.mark.parametrize("causal", [False, True])
def test_at_logits_of_spread_one_and_width_64_the_error_of_int8_is_about_one_in_a_hundred(causal: bool) -> None:
    shape = Shape(1, 2, 1024, 64, causal=causal)
    cell = Cell("s", "t", parse_spec("quantised"), shape, inputs=parse_spec("gaussian:logit_std=1"), error_draws=2)
    result = measure_error(cell)
    assert result.kind == "approximation"
    assert result.rel_error is not None
    assert 0.005 < result.rel_error < 0.02


@both
def test_a_block_of_zeros_stays_zero(shape: Shape) -> None:
    q, k, v = qkv(shape)
    k[:, :, :7] = 0
    q[:, :, :5] = 0
    out = make(shape, q_block=5, k_block=7, smooth_k=False)(q, k, v)
    assert out.isfinite().all()
    seen = v[:, :, :1] if shape.causal else v.mean(2, keepdim=True)
    close(out[:, :, :1], seen)


def test_later_tokens_move_how_earlier_ones_are_rounded_and_nothing_else() -> None:
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.float64) for _ in range(3))
    module = make(Shape(1, 2, 64, 16, causal=True))
    loud = k.clone()
    loud[:, :, -1] *= 30
    moved = relative_error(module(q, loud, v)[:, :, :-1], module(q, k, v)[:, :, :-1])
    assert 1e-3 < moved < 0.5
    alone = make(Shape(1, 2, 64, 16, causal=True), q_block=1, k_block=1, smooth_k=False)
    close(alone(q, loud, v)[:, :, :-1], alone(q, k, v)[:, :, :-1])


# What it may be asked


@pytest.mark.parametrize("label", ["quantised", "quantised:values=float8_e4m3", "quantised:dtype=float4_e2m1"])
def test_time_and_memory_of_an_emulation_are_refused_with_the_reason(label: str) -> None:
    cell = Cell("s", "t", parse_spec(label), Shape(1, 1, 32, 8))
    with pytest.raises(Unsupported, match=r"^time and memory: numbers are rounded to a few bits and multiplied in flo"):
        prepare(cell)
    record, samples = run_cell(VisitCell(cell, TimingRules(quick=True), 0))
    assert (record.status, samples) == (Status.UNSUPPORTED, None)
    assert record.reason.startswith("time and memory: ")
    assert record.time_median_s is None
    assert record.peak_bytes is None


def test_its_error_is_measured() -> None:
    cell = Cell("s", "t", parse_spec("quantised"), Shape(1, 1, 32, 8), measure=("error",))
    record, _ = run_cell(VisitCell(cell, TimingRules(quick=True), 0))
    assert record.status is Status.OK
    assert record.rel_error is not None
    assert 0 < record.rel_error < 0.1


def test_heads_with_it_among_their_variants_are_emulated_too() -> None:
    claims = VARIANTS.get("per-head").claims(parse_spec("per-head:parts=softmax+quantised"))
    assert claims.emulated.startswith("quantised: ")
    assert claims.rounds_together
    assert not VARIANTS.get("per-head").claims(parse_spec("per-head:parts=softmax+local")).emulated
