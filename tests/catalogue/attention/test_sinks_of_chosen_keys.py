"""A sink beside the keys that a method has chosen: a term of the denominator, and no reason to choose others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS

CHOOSING = [
    "moba:block=3,blocks=3",
    "oracle-blocks:block=4,blocks=2",
    "xattention:block=4,stride=2,threshold=0.6",
    "flexprefill:block=4,mass=0.6,least=4",
    "minference",
    "sparge",
    "sta:frame=2x3,tile=1x2x2,window=1x1x1",
    "radial:frame=5,block=2",
    "local:window=3",
    "local:window=2,dilation=3",
    "local:block=5,look_around=1",
    "longformer:window=2,global_tokens=2",
    "longformer:window=1,dilation=2,projections=own",
]
SHAPE = Shape(batch=2, heads=4, seq_len=23, head_dim=4, kv_heads=2, sink="learned")


def shape_of(text: str) -> Shape:
    traits = VARIANTS.get(text.partition(":")[0]).traits
    return replace(SHAPE, causal=bool(traits.causal), kv_heads=2 if traits.shares == "by itself" else 4)


def spec_of(text: str) -> str:
    """The text, or its first setting for laws, whose tiles are small."""
    return text if ":" in text else f"{text}:{VARIANTS.get(text).settings[0]}"


def given(text: str) -> tuple[tuple[Tensor, ...], Tensor | None]:
    shape = shape_of(text)
    q = torch.randn(shape.B, shape.H, shape.N, shape.D, dtype=torch.float64)
    k, v = torch.randn(2, shape.B, shape.K, shape.N, shape.D, dtype=torch.float64)
    real = torch.rand(shape.B, shape.N) < 0.7
    real[1, :4] = False  # some queries see no key
    return (q, k, v), real if VARIANTS.get(text.partition(":")[0]).traits.key_padding else None


@pytest.mark.parametrize("text", CHOOSING)
def test_it_is_a_term_of_the_denominator_with_its_gradients(text: str) -> None:
    inputs, real = given(text)
    module = build(spec_of(text), shape_of(text)).double()
    others = [x for name, x in module.named_parameters() if name != "sink.logit"]
    learned = (*(x.requires_grad_() for x in inputs), *others, module.sink.logit)
    output, expected = module(*inputs, key_mask=real), module.dense(*inputs, key_mask=real)
    if real is not None:
        output, expected = (x.masked_fill(~real[:, None, :, None], 0) for x in (output, expected))
    torch.testing.assert_close(output, expected)
    grads = [torch.autograd.grad(x.sin().sum(), learned) for x in (output, expected)]
    assert grads[0][-1].shape == (4,)
    assert grads[0][-1].abs().min() > 0
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
