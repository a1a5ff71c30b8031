from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.pairwise.bilinear import Bilinear
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built


def make(shape: Shape) -> Bilinear:
    return built(Bilinear, "bilinear", shape).double()


def test_each_head_has_a_matrix_of_its_own_that_stands_between_query_and_key() -> None:
    module = make(Shape(1, 2, 5, 4))
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    logits = torch.stack([q[0, h] @ module.W[h].detach() @ k[0, h].mT for h in range(2)])
    torch.testing.assert_close(module(q, k, v)[0].detach(), logits.softmax(-1) @ v[0], rtol=1e-11, atol=1e-12)


def test_at_first_the_logits_of_standard_normal_inputs_have_variance_one() -> None:
    module = make(Shape(1, 8, 64, 64))
    q, k = (torch.randn(1, 8, 400, 64, dtype=torch.float64) for _ in range(2))
    assert float((q @ module.W.detach() @ k.mT).var()) == pytest.approx(1, rel=0.05)
