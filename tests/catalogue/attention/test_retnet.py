from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.attention.recurrence.retnet import RetNet
from attnbench.catalogue.engines.recurrent.decayed_sums import decayed_attention, states_before
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, close, qkv


@pytest.mark.parametrize("rotation", [False, True])
def test_equals_the_recurrence_of_the_paper(rotation: bool) -> None:
    q, k, v = qkv(CAUSAL)
    out = RetNet(CAUSAL, rotation=rotation, chunk=5)(q, k, v)
    gamma = torch.tensor([1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128], dtype=torch.float64)[:, None, None]
    angles = torch.tensor([1.0, 0.01] if rotation else [0.0, 0.0], dtype=torch.float64)
    decay = (gamma * torch.exp(1j * angles)[:, None]).expand(3, 2, 4)
    # Re(q̄ᵀ S): a plane of two channels is one complex number.
    q, k = (torch.complex(x[..., :2], x[..., 2:]) for x in (q, k))
    state = torch.zeros(2, 3, 2, 4, dtype=torch.complex128)
    for t in range(23):
        state = decay * state + k[:, :, t].conj()[..., None] * v[:, :, t, None, :]
        expected = (q[:, :, t, None, :] @ state).real[:, :, 0] / 2
        close(out[:, :, t], expected)


def test_far_positions_are_rotated_with_full_precision() -> None:
    shape = Shape(batch=1, heads=1, seq_len=1, head_dim=8, causal=True)
    module = RetNet(shape)
    state = module.begin(*torch.zeros(3, 1, 1, 0, 8))._replace(length=1_000_003)
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    out, _ = module.step(state, q, k, v)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v / 8**0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_strongest_decay_gives_no_nan(causal: bool) -> None:
    q, k, v = (torch.randn(2, 40, 4) for _ in range(3))
    log_decay = torch.full((2, 40), -1e4).requires_grad_()
    out = decayed_attention(q, k, v, log_decay, causal=causal, chunk=8)
    torch.testing.assert_close(out, (q * k).sum(-1, keepdim=True) * v)
    (grad,) = torch.autograd.grad(out.sum(), log_decay)
    assert grad.isfinite().all()


def test_one_decay_for_all_tokens_is_the_same_as_one_each() -> None:
    q, k, v = (torch.randn(2, 23, 4, dtype=torch.float64) for _ in range(3))
    decay = torch.tensor([[-0.3], [-2.0]], dtype=torch.float64)
    for causal in (False, True):
        one, each = (decayed_attention(q, k, v, d, causal=causal, chunk=5) for d in (decay, decay.expand(2, 23)))
        close(one, each)


def test_states_before_the_chunks_are_those_of_the_recurrence() -> None:
    added, kept = torch.randn(2, 4, 3, 5), torch.rand(2, 4, 1, 1)
    states, last = states_before(added, kept)
    again, _ = states_before(added, kept, last)
    torch.testing.assert_close(again[:, 0], last)
    assert (states[:, 0] == 0).all()
    for b in range(3):
        torch.testing.assert_close(states[:, b + 1], kept[:, b] * states[:, b] + added[:, b])


@pytest.mark.parametrize(
    ("decay", "heads", "slopes"),
    [
        ("lightning", 4, [2**-2, 2**-4, 2**-6, 2**-8]),
        ("lightning", 3, [2**-4, 2**-8, 2**-2]),  # two, and the first of four
        ("lightning-linear", 4, [0, 2, 4, 6]),
    ],
)
def test_heads_fade_by_the_table_that_is_chosen(decay: str, heads: int, slopes: list[float]) -> None:
    shape = Shape(batch=2, heads=heads, seq_len=23, head_dim=4, causal=True)
    q, k, v = qkv(shape)
    module = RetNet(shape, rotation=False, decay=decay, chunk=5)  # type: ignore[arg-type]
    rates = torch.exp(-torch.tensor(slopes, dtype=torch.float64))[:, None, None]
    state, rows = torch.zeros(2, heads, 4, 4, dtype=torch.float64), []
    for t in range(23):
        state = rates * state + k[:, :, t, :, None] * v[:, :, t, None]
        rows.append((q[:, :, t, None] @ state)[:, :, 0] / 2)
    close(module(q, k, v), torch.stack(rows, 2))
    close(module.begin(q, k, v).state, state)
