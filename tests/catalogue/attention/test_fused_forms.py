"""What is named as the same algorithm in fused kernels is the same algorithm."""

from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import Dense
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS

NAMED = [entry for entry in VARIANTS if entry.fused]


@pytest.mark.parametrize(
    ("text", "causal"),
    [
        *(("local", causal) for causal in (False, True)),
        *(("local:window=7", causal) for causal in (False, True)),
        ("longformer", False),
        ("longformer:window=5,global_tokens=3", False),
        ("bigbird:block=16", False),
    ],
)
def test_both_have_the_same_formula(text: str, causal: bool) -> None:
    spec, shape = parse_spec(text), Shape(2, 2, 300, 8, causal=causal)
    fused = VARIANTS.get(spec.name).fused_as(spec)
    assert fused is not None
    one, other = (build(form, shape, seed=3) for form in (spec, fused))
    assert isinstance(one, Dense)
    assert isinstance(other, Dense)
    q, k, v = torch.randn(3, 2, 2, 300, 8, dtype=torch.float64)
    torch.testing.assert_close(one.dense(q, k, v), other.dense(q, k, v), rtol=0, atol=1e-12)


def test_only_options_that_both_have_may_differ_from_the_defaults() -> None:
    assert {entry.name for entry in NAMED} == {"local", "longformer", "bigbird", "linear"}
    for text in ("local:block=50", "longformer:projections=own", "longformer:dilation=2", "linear:chunk=5", "softmax"):
        spec = parse_spec(text)
        assert VARIANTS.get(spec.name).fused_as(spec) is None
    for entry in NAMED:
        fused = entry.fused_as(Spec(entry.name))
        assert fused is not None
        assert VARIANTS.get(fused.name).fused_as(fused) is None
