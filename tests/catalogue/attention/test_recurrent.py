"""Layers that hand a state from token to token are their formula however tokens are cut, kept, padded or handed on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.recurrent import stretches
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.measure.memory import peak_tensor_bytes

NAMES = (
    *("gla", "abc", "gsa", "ssd", "log-linear", "mamba2", "mesa", "delta", "gated-delta", "gated-delta-2", "comba"),
    *("kda", "rwkv7", "rfa-gated"),
)
MORE = (
    *("gated-delta:chunk=5,negative=true", "gated-delta-2:chunk=16,negative=true,width=2"),
    *("kda:chunk=4,negative=true", "comba:chunk=64,expand=1,width=1,correction=0.3"),
    *("mamba2:state=5,chunk=7,groups=6", "log-linear:state=5,chunk=8,base=gated-delta", "mamba2:chunk=7,width=1"),
)
"""Settings beside those of the registry."""
LABELS = [*(f"{name}:{setting}" for name in NAMES for setting in VARIANTS.get(name).settings), *MORE]
HOLES = torch.arange(23) % 5 != torch.tensor([[1], [3]])
each = pytest.mark.parametrize("label", LABELS)
both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])


def make(label: str, causal: bool) -> nn.Module:
    """A layer for 2 · 23 tokens whose decays matter over some of them, and in which no parameter is 0 or 1."""
    module = build(label, Shape(batch=2, heads=6, seq_len=23, head_dim=4, causal=causal), seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in module.named_parameters():
            x.add_(0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype))
            if name in ("step_bias", "step_size.bias"):
                x.add_(2)
    return module


def tokens(n: int = 23) -> Tensor:
    return torch.randn(2, n, 24, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-9)


def output_and_gradients_are_those_of_the_formula(module: nn.Module) -> None:
    x = tokens().requires_grad_()
    wanted, direction = [x, *module.parameters()], tokens() * HOLES[..., None]
    found = []
    for function in (module, module.dense):
        out = function(x, key_mask=HOLES) * HOLES[..., None]  # type: ignore[operator]  # a module has any attribute
        found.append([out, *torch.autograd.grad(out, wanted, direction)])
    for one, other in zip(*found, strict=True):
        close(one, other)


@each
@both
@pytest.mark.parametrize("stretch", [1, 8])
def test_the_state_goes_on_from_stretch_to_stretch(
    label: str, causal: bool, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH", stretch)
    output_and_gradients_are_those_of_the_formula(make(label, causal))


@each
@both
@pytest.mark.parametrize("again", [True, False])
def test_what_is_computed_again_or_kept_gives_the_gradients_of_the_formula(
    label: str, causal: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling.TUNED, "linear.features", tiling.Tuned(1 if again else 2**19, 2))
    monkeypatch.setitem(tiling.TUNED, "recurrent.kept", tiling.Tuned(0 if again else 2**18))
    output_and_gradients_are_those_of_the_formula(make(label, causal))


def tensors(state: object) -> list[Tensor]:
    """Those that a state consists of."""
    parts = [state] if isinstance(state, Tensor) else state if isinstance(state, tuple) else vars(state).values()
    return [x for x in parts if isinstance(x, Tensor)]


@each
@torch.no_grad()
def test_a_step_leaves_the_state_that_a_longer_prompt_leaves(label: str) -> None:
    module, x = make(label, True), tokens()
    for n in (0, 1, 2, 9, 22):
        _, stepped = module.step(module.begin(x[:, :n]), x[:, n : n + 1])  # type: ignore[operator]  # as above
        found, expected = tensors(stepped), tensors(module.begin(x[:, : n + 1]))  # type: ignore[operator]  # as above
        assert found
        for one, other in zip(found, expected, strict=True):
            close(one, other)


@pytest.mark.parametrize("label", ["log-linear:base=gated-delta,state=16", "mesa:steps=8"])
def test_training_takes_memory_in_proportion_to_the_length_in_other_settings_too(label: str) -> None:
    peaks = []
    for n in (1024, 4096):
        module, x = build(label, Shape(1, 1, n, 16, causal=True)), torch.randn(1, n, 16, requires_grad=True)
        peaks.append(peak_tensor_bytes(lambda m=module, x=x: m(x).sum().backward()) or 0)
    few, many = peaks
    assert 0 < many < (5 if label.startswith("log") else 4.3) * few  # n log n, or n


@pytest.mark.parametrize(
    ("label", "lowest"), [("mamba2", 1), ("ssd", 1), ("gated-delta", 0), ("comba", 0), ("gated-delta-2", 1), ("kda", 1)]
)
def test_rates_start_in_the_ranges_of_the_authors(label: str, lowest: int) -> None:
    module: Any = build(label, Shape(heads=256, head_dim=2, seq_len=4), seed=1)
    bias = module.step_size.bias if label == "ssd" else module.step_bias
    A, size = module.log_A.exp(), torch.nn.functional.softplus(bias)
    assert lowest <= A.min() < lowest + 1
    assert 15 < A.max() <= 16.001
    assert 0.00099 < size.min() < 0.002
    assert 0.05 < size.max() < 0.101
