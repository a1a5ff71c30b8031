"""The general form of the Performer's features: right on average for every γ and every two vectors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.favor_plus_plus import inverse_rho
from attnbench.catalogue.attention.kernel.performer import Performer
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.linear.random_maps import draw_projection
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built

SHAPE = Shape(batch=2, heads=3, seq_len=23, head_dim=8)
SMALL = Shape(batch=1, heads=1, seq_len=2, head_dim=4)
Q = torch.tensor([[[[0.5, 0.2, 0.4, 0.3], [-0.1, -0.4, -0.2, -0.3]]]], dtype=torch.float64)
K = torch.tensor([[[[0.3, 0.6, 0.1, 0.7], [0.2, -0.1, 0.4, -0.2], [0.2, 0.2, 0.2, 0.2]]]], dtype=torch.float64)
KERNELS = ("positive", "hyperbolic", "trig")


class AnyShift(Performer):
    """Two vectors that have nothing to do with the data."""

    a = torch.tensor([0.2, -0.1, 0.3, 0.1], dtype=torch.float64)
    b = torch.tensor([-0.2, 0.1, 0.1, 0.2], dtype=torch.float64)

    def shifted(
        self, x: Tensor, y: Tensor, allowed: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        back = ((x * self.b).sum(-1, keepdim=True), ((y - self.b) * self.a).sum(-1, keepdim=True))
        return (x - self.a, y - self.b), back


@pytest.mark.parametrize("gamma", [0.95, 1.25])
@pytest.mark.parametrize("kernel", KERNELS)
def test_mean_and_variance_are_the_closed_forms_for_any_two_vectors(kernel: str, gamma: float) -> None:
    draws = 100_000
    model = AnyShift(SMALL, features=4, kernel=kernel, gamma=gamma, shift="mean", projection="iid").double()
    variance = model.kernel_variance(Q, K)
    assert variance is not None
    model.projection = draw_projection(draws * 4, 4, "iid").double().view(draws, 1, 4, 4)
    estimates = model.kernel(Q, K)
    truth = (Q @ K.mT / 2).exp()[0]
    standard_error = estimates.std(0) / math.sqrt(draws)
    assert ((estimates.mean(0) - truth).abs() < 4 * standard_error).all()
    assert (standard_error < 0.01 * truth).all()
    torch.testing.assert_close(estimates.var(0)[None], variance, rtol=0.1, atol=0.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_taking_off_what_all_tokens_have_in_common_takes_off_variance(kernel: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 20, 8, dtype=torch.float64, generator=generator) / 4 for _ in "qk")
    q, k = q + 0.8, k + (-0.8 if kernel == "trig" else 0.8)
    variances = []
    for shift in ("none", "mean"):
        module = built(Performer, "performer", Shape(1, 1, 20, 8), projection="iid", kernel=kernel, shift=shift)
        variance = module.double().kernel_variance(q, k)
        assert variance is not None
        variances.append(float((variance / module.kernel_mean(q, k).square()).median()))
    assert variances[1] < 0.1 * variances[0]


def test_a_gamma_gives_the_features_of_favor_plus_plus() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 23, 8, dtype=torch.float64, generator=generator) for _ in "qkv")
    gamma = float(((1 + inverse_rho(torch.tensor(3.0, dtype=torch.float64), 8)) / 2).sqrt())
    for causal in (False, True):
        shape = Shape(2, 3, 23, 8, causal=causal)
        ours = build("performer", shape, features=16, gamma=gamma).double()
        theirs = build("favor-plus-plus", shape, features=16, spread=3.0).double()
        assert torch.allclose(ours(q, k, v), theirs(q, k, v), rtol=1e-9, atol=1e-10)
