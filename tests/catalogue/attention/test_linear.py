from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.kernel.linear import EluPlusOne, Linear
from attnbench.catalogue.build import build
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.linear import all_keys, causal
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import SHAPE, both, mask, peak_of, qkv


@both
@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 22, 23, 24, None])
def test_equals_the_dense_formula_for_every_chunk(shape: Shape, chunk: int | None) -> None:
    model = Linear(shape, chunk=chunk)
    q, k, v = qkv(shape)
    for key_mask in (None, mask()):
        expected = model.dense(q, k, v, key_mask=key_mask)
        assert torch.allclose(model(q, k, v, key_mask=key_mask), expected, atol=1e-13)


@both
def test_rows_sum_to_one_even_where_features_are_tiny(shape: Shape) -> None:
    q, k, v = qkv(shape, torch.float32)
    for shift in (0.0, -20.0, -40.0):  # elu + 1 in float32 is 0 below -17, and 1e-6 in a denominator would win at -20
        out = Linear(shape)(q + shift, k + shift, torch.ones_like(v))
        assert torch.allclose(out, torch.ones_like(v), atol=1e-5)


def test_groups_cover_each_pair_once() -> None:
    x = torch.empty(4, 6, 0)
    for elements in (1, 2**17, 2**18, 2**19, 2**22):
        met = torch.zeros(4, 6)
        for batch, heads in tiling.head_groups(x, elements):
            part = met[batch, heads]
            part += 1
            assert part.numel() * elements <= 2**19 or part.numel() == 1
        assert (met == 1).all()


@both
@pytest.mark.parametrize("name", ["linear", "performer:features=64"])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_linear_and_close_to_that_of_inputs_and_outputs(shape: Shape, name: str, backward: bool) -> None:
    def peak(N: int) -> int:
        sized = Shape(batch=1, heads=2, seq_len=N, head_dim=16, causal=shape.causal)
        inputs = [x.requires_grad_(backward) for x in qkv(sized, torch.float32)]
        model = build(name, sized, chunk=None if shape.causal else 256)

        def call() -> object:
            return torch.autograd.grad(model(*inputs).sum(), inputs) if backward else model(*inputs)

        return peak_of(call)

    short, long = peak(1024), peak(4096)
    assert long <= 4.2 * short
    growth = (long - short) / (2 * 3072 * 16 * 4)
    assert growth < (3.6 if backward else 1.2)


def test_a_tile_is_as_long_as_fits_and_few_heads_make_it_longer() -> None:
    """Else a call costs more than its work; many heads are cut into groups of at least this many rows."""
    most = 2 * tiling.budget("linear.features", torch.device("cpu"))
    for heads, numbers, least in ((1, 192, 512), (8, 192, 512), (8, 384, 256), (2**16, 192, 512), (2**16, 1152, 256)):
        rows = all_keys._rows(torch.empty(1, heads, 1, 64), numbers)
        assert rows == least or most / 2 < rows * heads * numbers <= most
        assert rows % 64 == 0
        assert rows >= least


@pytest.mark.parametrize(
    ("heads", "width", "length", "rows"),
    [
        (8, 64, 100, 96),
        (8, 64, 512, 512),
        (1, 64, 4096, 512),
        (1, 64, 8192, 1024),
        (1, 64, 2**20, 2048),
        (8, 32, 2**20, 1024),
        (8, 64, 2**20, 512),
    ],
)
def test_a_causal_block_is_longer_for_few_heads_of_a_long_sequence(
    heads: int, width: int, length: int, rows: int
) -> None:
    x = torch.empty(1, 1, 1, 1).expand(1, heads, length, width)
    assert causal.CausalCall(x, x, x, None, EluPlusOne(width), 32, x).rows == rows


@pytest.mark.parametrize("masked", [False, True])
def test_the_rows_of_a_block_change_nothing_but_rounding(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 5000, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    key_mask = torch.rand(1, 5000) < 0.9 if masked else None

    def found() -> list[torch.Tensor]:
        out = causal.attend_causally(q, k, v, EluPlusOne(4), key_mask=key_mask)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    short = found()
    monkeypatch.setattr(causal, "SHORT", 2048)
    for one, other in zip(short, found(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch's compiler itself
@pytest.mark.parametrize("name", ["linear", pytest.param("performer", marks=pytest.mark.slow)])
def test_a_training_step_of_several_tiles_compiles_without_a_graph_break(name: str) -> None:
    model = build(f"{name}:chunk=16", SHAPE)
    inputs = [x.requires_grad_() for x in qkv(SHAPE, torch.float32)]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(run(*inputs).square().sum(), inputs) for run in (compiled, model))
    for grad, plain in zip(found, expected, strict=True):
        assert torch.allclose(grad, plain, atol=1e-5)


# Rotary positions


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_positions_turn_the_numerator_by_the_distance_and_leave_the_denominator(causal: bool) -> None:
    shape = Shape(batch=1, heads=1, seq_len=9, head_dim=2, causal=causal)
    q, k, v = (torch.randn(1, 1, 9, 2, dtype=torch.float64) for _ in range(3))
    out = Linear(shape, rotary=True, chunk=4)(q, k, v)
    phi_q, phi_k = (torch.nn.functional.elu(x[0, 0]) + 1 for x in (q, k))
    for i in range(9):
        seen = range(i + 1 if causal else 9)
        above, below = torch.zeros(2, dtype=torch.float64), 0.0
        for j in seen:
            turn = torch.tensor(float(i - j), dtype=torch.float64)  # two channels: a radian per token
            cos, sin = turn.cos(), turn.sin()
            plain, crossed = phi_q[i] @ phi_k[j], phi_q[i, 0] * phi_k[j, 1] - phi_q[i, 1] * phi_k[j, 0]
            above = above + (plain * cos + crossed * sin) * v[0, 0, j]
            below = below + float(plain)
        torch.testing.assert_close(out[0, 0, i], above / below, rtol=1e-10, atol=1e-11)
