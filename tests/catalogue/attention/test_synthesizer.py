from __future__ import annotations

from typing import Any

import pytest
import torch

from attnbench.catalogue.attention.synthetic.synthesizer.logits import (
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    RandomLogits,
)
from attnbench.catalogue.attention.synthetic.synthesizer.synthesizer import Synthesizer
from attnbench.catalogue.build import build
from attnbench.catalogue.engines import tiling
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import built, draw

MODES = ["dense", "random", "factorized-random", "factorized-dense", "mixture"]
MIXTURES = ["random+dense", "random+dot", "dense+dot", "random+dense+dot"]


def make(shape: Shape, **options: object) -> Synthesizer:
    module = built(Synthesizer, "synthesizer", shape, **options)
    for name, parameter in module.named_parameters():
        if name.endswith("b2") or name == "alpha":
            torch.nn.init.normal_(parameter)
    return module.double()


def part(module: Synthesizer, name: str) -> Any:
    return module.sources[name]


def logits_of(source: Any, x: torch.Tensor, h: int) -> torch.Tensor:
    """The logits of one head, ``(B, N, N)`` or ``(N, N)``, number by number where they are no product."""
    N = x.shape[1]
    if isinstance(source, RandomLogits):
        return source.R[h, :N, :N]
    if isinstance(source, FactorizedRandom):
        return source.R1[h, :N] @ source.R2[h, :N].T
    if isinstance(source, DotProduct):
        D = x.shape[2] // source.heads
        q, k = (projection(x)[..., h * D : (h + 1) * D] for projection in (source.q, source.k))
        return q @ k.mT / D**0.5
    units = source.W2.shape[1]
    given = torch.relu(source.W1(x))[..., h * units : (h + 1) * units] @ source.W2[h] + source.b2[h]
    if not isinstance(source, FactorizedDense):
        return given[..., :N]
    a, b = given[..., : source.a], given[..., source.a :]
    tiled, repeated = a.repeat(1, 1, b.shape[-1]), b.repeat_interleave(source.a, -1)
    return (tiled * repeated)[..., :N]


def dense_formula(module: Synthesizer, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Straight from the paper, head by head, with every weight in memory."""
    B, N, C = x.shape
    D = C // module.heads
    values = module.value(x)
    outputs = []
    for h in range(module.heads):
        shares = [1.0] if module.alpha is None else module.alpha.softmax(0).tolist()
        logits = sum(
            (share * logits_of(source, x, h) for share, source in zip(shares, module.sources.values(), strict=True)),
            start=torch.zeros(B, N, N, dtype=x.dtype),
        )
        visible = torch.ones(B, N, N, dtype=torch.bool)
        if module.causal:
            visible = visible.tril()
        if mask is not None:
            visible = visible & mask[:, None, :]
        weights = torch.where(visible, logits.exp(), 0.0)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        outputs.append(weights @ values[..., h * D : (h + 1) * D])
    return module.out(torch.cat(outputs, -1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_equals_the_dense_formula(
    mode: str, causal: bool, padded: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling.TUNED, "synthesizer.weights", tiling.Tuned(tile))
    module = make(Shape(3, 2, 21, 4, causal=causal), mode=mode)
    x = draw(3, 19, 8)
    mask = torch.rand(3, 19) < 0.7 if padded else None
    real = torch.ones(3, 19, dtype=torch.bool) if mask is None else mask
    expected = dense_formula(module, x, mask)[real]
    torch.testing.assert_close(module(x, key_mask=mask)[real], expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(module.dense(x, key_mask=mask)[real], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_mixture_equals_the_dense_formula(mixture: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiling.TUNED, "synthesizer.weights", tiling.Tuned(1))
    module = make(Shape(3, 2, 21, 4, causal=causal), mode="mixture", mixture=mixture)
    x, mask = draw(3, 19, 8), torch.rand(3, 19) < 0.7
    expected = dense_formula(module, x, mask)[mask]
    torch.testing.assert_close(module(x, key_mask=mask)[mask], expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(module.dense(x, key_mask=mask)[mask], expected, rtol=1e-11, atol=1e-12)
    assert list(module.sources) == mixture.split("+")


def test_the_parts_of_a_mixture_have_equal_shares_at_first() -> None:
    module = build("synthesizer:mode=mixture,mixture=random+dense+dot", Shape(1, 2, 5, 2))
    assert torch.equal(module.get_parameter("alpha"), torch.zeros(3))


@pytest.mark.parametrize(
    ("n", "factors", "sizes"), [(16, None, (4, 4)), (17, None, (5, 4)), (12, 3, (3, 4)), (5, 9, (5, 1))]
)
def test_the_lengths_of_the_dense_factors_multiply_to_the_tokens(
    n: int, factors: int | None, sizes: tuple[int, int]
) -> None:
    dense = part(make(Shape(1, 1, n, 2), mode="factorized-dense", factors=factors), "factorized-dense")
    assert (dense.a, dense.W2.shape[2] - dense.a) == sizes


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_row_sum_to_one(mode: str) -> None:
    module = make(Shape(1, 2, 6, 2), mode=mode)
    with torch.no_grad():
        module.value.weight.fill_(0.25)
        module.out.weight.copy_(torch.eye(4))
    ones = torch.ones(1, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(module(ones), ones)


@pytest.mark.parametrize("mode", ["random", "factorized-random"])
def test_random_logits_start_with_variance_one(mode: str) -> None:
    module = make(Shape(1, 1, 400, 4), mode=mode)
    with torch.no_grad():
        logits = part(module, mode).of_pairs(draw(1, 400, 4))
    assert 0.8 < logits.var().item() < 1.25


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_the_weights_are_never_all_in_memory(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiling.TUNED, "synthesizer.weights", tiling.Tuned(1 << 12))
    module = build("synthesizer", Shape(1, 2, 512, 8), mode=mode)
    x = torch.randn(1, 512, 16)
    with torch.inference_mode():
        peak = peak_tensor_bytes(lambda: module(x))
    assert peak is not None
    assert peak < 2 * 512 * 512 * 4 / 4
