from __future__ import annotations

import torch
from torch.nn.functional import gelu

from attnbench.catalogue.attention.synthetic.mlp_mixer import MLPMixer
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, draw


def make(shape: Shape, options: str = ":hidden=5") -> MLPMixer:
    module = built(MLPMixer, f"mlp-mixer{options}", shape)
    torch.nn.init.normal_(module.b1)
    torch.nn.init.normal_(module.b2)
    return module.double()


def test_equals_the_formula() -> None:
    module, x = make(Shape(3, 2, 11, 2)), draw(3, 11, 4)
    first, second = torch.nn.Linear(11, 5).double(), torch.nn.Linear(5, 11).double()
    first.weight, first.bias, second.weight, second.bias = module.W1, module.b1, module.W2, module.b2
    close(module(x), second(gelu(first(x.mT))).mT)


def test_half_as_many_hidden_units_as_channels() -> None:
    assert make(Shape(1, 8, 10, 64), "").W1.shape == (256, 10)
    assert make(Shape(1, 1, 10, 1), "").W1.shape == (1, 10)


def test_the_variance_does_not_depend_on_the_length() -> None:
    for n in (64, 512):
        module, x = make(Shape(1, 1, n, 64), ":hidden=128"), draw(1, n, 64)
        units = module.W1 @ x[0]
        assert 0.8 < units.var() < 1.25
