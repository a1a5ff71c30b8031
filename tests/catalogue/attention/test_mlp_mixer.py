from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from attnbench.catalogue.attention.synthetic.mlp_mixer import MLPMixer
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported


def make(shape: Shape, options: str = ":hidden=5") -> MLPMixer:
    module = build(f"mlp-mixer{options}", shape)
    assert isinstance(module, MLPMixer)
    torch.nn.init.normal_(module.b1)
    torch.nn.init.normal_(module.b2)
    return module.double()


def tokens(B: int, N: int, C: int) -> Tensor:
    return torch.randn(B, N, C, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n", [1, 8, 11])
def test_equals_the_formula(padded: bool, n: int) -> None:
    module, x = make(Shape(3, 2, 11, 2)), tokens(3, n, 4)
    mask = torch.rand(3, n) < 0.6 if padded else None
    out = module(x, key_mask=mask)
    close(out, module.dense(x, key_mask=mask))
    if mask is None and n == 11:
        first, second = torch.nn.Linear(11, 5).double(), torch.nn.Linear(5, 11).double()
        first.weight, first.bias, second.weight, second.bias = module.W1, module.b1, module.W2, module.b2
        close(out, second(gelu(first(x.mT))).mT)


def test_half_as_many_hidden_units_as_channels() -> None:
    assert make(Shape(1, 8, 10, 64), "").W1.shape == (256, 10)
    assert make(Shape(1, 1, 10, 1), "").W1.shape == (1, 10)


def test_the_variance_does_not_depend_on_the_length() -> None:
    for n in (64, 512):
        module, x = make(Shape(1, 1, n, 64), ":hidden=128"), tokens(1, n, 64)
        units = module.W1 @ x[0]
        assert 0.8 < units.var() < 1.25


def test_a_longer_input_is_refused() -> None:
    with pytest.raises(Unsupported, match="at most 6"):
        make(Shape(1, 2, 6, 2))(tokens(1, 7, 4))
