from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.synthetic.location import Location
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built


def make(shape: Shape) -> Location:
    return built(Location, "location", shape).double()


def inputs(*sizes: int) -> list[Tensor]:
    return [torch.randn(1, 2, n, 4, dtype=torch.float64) for n in sizes]


@pytest.mark.parametrize("causal", [False, True])
def test_keys_are_not_read(causal: bool) -> None:
    module, (q, k, v) = make(Shape(1, 2, 9, 4, causal=causal)), inputs(9, 9, 9)
    assert torch.equal(module(q, k, v), module(q, torch.full_like(k, torch.nan), v))


def test_a_query_that_points_to_a_position_reads_the_value_there_whatever_stands_there() -> None:
    module, (_, k, v) = make(Shape(1, 2, 4, 4)), inputs(4, 4, 4)
    with torch.no_grad():
        module.locations.copy_(torch.eye(4).expand(2, -1, -1))
    order = torch.tensor([2, 0, 3, 1])
    q = 1e3 * torch.eye(4, dtype=torch.float64)[order].expand(1, 2, -1, -1)
    torch.testing.assert_close(module(q, k, v), v[:, :, order])


def test_a_shorter_input_has_the_first_locations() -> None:
    module, (q, k, v) = make(Shape(1, 2, 9, 4)), inputs(5, 6, 6)
    logits = q @ module.locations[:, :6].detach().mT
    torch.testing.assert_close(module(q, k, v).detach(), logits.softmax(-1) @ v)
