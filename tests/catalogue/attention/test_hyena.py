"""Hyena: gates around a convolution with a kernel made of distances."""

from __future__ import annotations

import torch

from attnbench.catalogue.attention.synthetic.hyena import Hyena
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL


def test_a_network_that_makes_nothing_leaves_the_skip_between_the_gates() -> None:
    module, x = Hyena(CAUSAL).double(), torch.randn(2, 23, 12, dtype=torch.float64)
    torch.nn.init.zeros_(module.later.out.weight)
    with torch.no_grad():
        module.short[:, :2], module.short[:, 2] = 0, 1  # each token by itself
    second, first, v = module.inputs(x).chunk(3, 2)
    torch.testing.assert_close(module(x), module.out(second * module.skip * first * v), rtol=1e-10, atol=1e-12)


def test_a_channel_is_left_one_percent_after_its_share_of_the_length() -> None:
    module = Hyena(Shape(1, 1, 301, 2, causal=True)).double()
    with torch.no_grad():
        module.later.out.weight.zero_()
        module.later.out.weight[:, 0] = 1
    kernel = module._kernel(module.later, 301, torch.float64)
    made = module.later.hidden[0]
    h = torch.stack([torch.tensor([t / 300, 1.0, 0.0]) for t in (0, 90)]).double()
    angle = torch.tensor([0.0, 90]).double() * 2e-4 * torch.pi / 301
    h[:, 1], h[:, 2] = angle.cos(), -angle.sin()
    for layer in (made, *module.later.hidden[1:]):
        h = torch.sin(layer(h))
    torch.testing.assert_close(kernel[1, 90] / kernel[1, 0], 0.01 * h[1, 0] / h[0, 0])  # the fastest: 0.3 of 300
    torch.testing.assert_close(kernel[0, 90] / kernel[0, 0], 0.01**0.2 * h[1, 0] / h[0, 0])  # the slowest: 1.5
