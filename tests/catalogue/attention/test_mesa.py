"""MesaNet: least squares token by token, solved exactly or by conjugate gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.mesa import conjugate_gradients, mesa_attention
from attnbench.catalogue.engines.recurrent import stretches


def drawn(n: int = 41) -> list[Tensor]:
    q, k, v = (torch.randn(2, n, 4, dtype=torch.float64) for _ in range(3))
    beta, gate = (torch.rand(2, n, 1, dtype=torch.float64) for _ in range(2))
    return [q, k, v, beta, -gate, 0.5 + torch.rand(2, 1, 4, dtype=torch.float64)]


def by_hand(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, penalty: Tensor) -> Tensor:
    keys = values = torch.zeros(2, 4, 4, dtype=q.dtype)
    rows = []
    for t in range(q.shape[1]):
        kept, new = 2 ** log_decay[:, t, :, None], (beta * k)[:, t, :, None]
        keys, values = kept * keys + new * k[:, t, None], kept * values + new * v[:, t, None]
        solved = torch.linalg.inv(keys + torch.diag_embed(penalty[:, 0])) @ q[:, t, :, None]
        rows.append((values.mT @ solved)[..., 0])
    return torch.stack(rows, 1)


@pytest.mark.parametrize("steps", [None, 30])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("n", [1, 3, 41])
def test_equals_the_recurrence(n: int, chunk: int, steps: int | None) -> None:
    inputs = drawn(n)
    found = mesa_attention(*inputs, chunk=chunk, steps=steps)
    torch.testing.assert_close(found, by_hand(*inputs), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("steps", [None, 30])
@pytest.mark.parametrize("stretch", [1, 8])
def test_gradients_are_those_of_the_recurrence(
    stretch: int, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH", stretch)
    inputs = [x.requires_grad_() for x in drawn()]
    mine, theirs = mesa_attention(*inputs, chunk=8, steps=steps), by_hand(*inputs)
    grad = torch.randn_like(mine)
    for one, other in zip(*(torch.autograd.grad(y, inputs, grad) for y in (mine, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


def test_as_many_steps_as_channels_solve_exactly_and_fewer_come_nearer_one_by_one() -> None:
    root, b = torch.randn(5, 4, 4, dtype=torch.float64), torch.randn(5, 4, 1, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(4, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, b)
    gaps = []
    for steps in range(1, 5):
        apart = conjugate_gradients(lambda x: x @ matrix, b.mT, steps).mT - exact
        gaps.append(float((apart.mT @ matrix @ apart).sum()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-18
