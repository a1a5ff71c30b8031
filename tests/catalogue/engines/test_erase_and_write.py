"""The chunked form against the recurrence, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from attnbench.catalogue.engines.recurrent import stretches
from attnbench.catalogue.engines.recurrent.erase_and_write import BeforeDecay, erase_and_write
from attnbench.measure.memory import peak_tensor_bytes

N, D, E = 23, 4, 5
decays = pytest.mark.parametrize("decay", ["none", "token", "channel"])


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def draw(decay: str = "channel", n: int = N, *, strength: float = 0.5) -> dict[str, Tensor]:
    """Inputs by name; keys of length 1 and rates up to 1, as all users have them."""
    q, k, b = (normalize(torch.randn(2, n, D, dtype=torch.float64), dim=-1) for _ in range(3))
    rates = torch.rand(2, n, 1, dtype=torch.float64)
    drawn = {"q": q, "k": k, "v": torch.randn(2, n, E, dtype=torch.float64), "erase": k * rates, "along": b}
    width = {"none": 0, "token": 1, "channel": D}[decay]
    if width:
        drawn["log_decay"] = -strength * torch.rand(2, n, width, dtype=torch.float64)
    return drawn


def by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor,
    log_decay: Tensor | None = None,
    along: Tensor | None = None,
    strict: bool = False,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    along = k if along is None else along
    state, rows = q.new_zeros(q.shape[0], q.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        before = state
        if log_decay is not None:
            state = log_decay[:, t, :, None].exp2() * state
        left = state
        read = torch.einsum("gd,gde->ge", erase[:, t], before if early else left)
        state = left - along[:, t, :, None] * read[:, None] + k[:, t, :, None] * v[:, t, None]
        rows.append(torch.einsum("gd,gde->ge", q[:, t], left if strict else state))
    return torch.stack(rows, 1), state


@decays
@pytest.mark.parametrize("chunk", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_equals_the_recurrence_for_every_chunk(decay: str, chunk: int, own: bool, strict: bool) -> None:
    drawn = draw(decay)
    if own:
        drawn.pop("along")
    out, last = erase_and_write(**drawn, chunk=chunk, strict=strict)
    expected, state = by_token(**drawn, strict=strict)
    close(out, expected)
    close(last, state)


@pytest.mark.parametrize("decay", ["none", "token"])
@pytest.mark.parametrize("chunk", [3, 7, 22, 23])
def test_without_rates_for_channels_a_chunk_may_have_any_length(decay: str, chunk: int) -> None:
    drawn = draw(decay)
    close(erase_and_write(**drawn, chunk=chunk)[0], by_token(**drawn)[0])


@decays
@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_erased_may_be_read_before_the_decay(
    decay: str, chunk: int, own: bool, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH", 16)
    drawn = draw(decay)
    if own:
        drawn.pop("along")
    early: dict[str, Any] = drawn | {"erase": BeforeDecay(drawn["erase"])}
    out, last = erase_and_write(**early, chunk=chunk, strict=strict)
    expected, state = by_token(**drawn, strict=strict, early=True)
    close(out, expected)
    close(last, state)


@decays
@pytest.mark.parametrize("n", [1, 2, 3, 17])
def test_a_sequence_may_be_shorter_than_a_chunk(decay: str, n: int) -> None:
    drawn = draw(decay, n)
    close(erase_and_write(**drawn, chunk=16)[0], by_token(**drawn)[0])


@decays
def test_rates_erase_and_write_along_the_key(decay: str) -> None:
    drawn = draw(decay)
    drawn.pop("along")
    rates = torch.rand(2, N, dtype=torch.float64)
    vectors = drawn | {"erase": drawn["k"] * rates[..., None], "v": drawn["v"] * rates[..., None]}
    close(erase_and_write(**drawn | {"erase": rates}, chunk=8)[0], by_token(**vectors)[0])


@decays
def test_the_state_can_be_handed_over_after_any_token(decay: str) -> None:
    drawn = draw(decay)
    whole, last = erase_and_write(**drawn, chunk=8)
    for t in range(1, N):
        first, state = erase_and_write(**{name: x[:, :t] for name, x in drawn.items()}, chunk=8)
        second, end = erase_and_write(**{name: x[:, t:] for name, x in drawn.items()}, chunk=8, state=state)
        close(torch.cat([first, second], 1), whole)
        close(end, last)


@decays
@pytest.mark.parametrize("stretch", [1, 8, 16])
def test_gradients_go_through_stretches_as_through_the_recurrence(
    decay: str, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH", stretch)
    monkeypatch.setattr(stretches, "KEPT", 1 if stretch == 8 else 1000)  # computed again, or kept
    drawn = {name: x.requires_grad_() for name, x in draw(decay).items()}
    wanted, direction = list(drawn.values()), torch.randn(2, N, E, dtype=torch.float64)
    mine, theirs = erase_and_write(**drawn, chunk=8)[0], by_token(**drawn)[0]
    close(mine, theirs)
    for one, other in zip(
        torch.autograd.grad(mine, wanted, direction), torch.autograd.grad(theirs, wanted, direction), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("strength", [20.0, 300.0, 1e4])
def test_the_strongest_decays_neither_overflow_nor_lose_digits(decay: str, strength: float) -> None:
    drawn = draw(decay, 40)
    # Strong and absent decays side by side, so that far and near tokens share a chunk.
    chosen = torch.rand_like(drawn["log_decay"]) < 0.3
    drawn["log_decay"] = torch.where(chosen, 2 * strength * drawn["log_decay"], 0.0)
    drawn.pop("along")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        rounded = {name: x.to(dtype) for name, x in drawn.items()}
        out, _ = erase_and_write(**rounded, chunk=32)
        expected, _ = by_token(**{name: x.double() for name, x in rounded.items()})
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_a_decay_of_minus_five_everywhere_overflows_nowhere(decay: str) -> None:
    drawn = draw(decay, 256)
    drawn["log_decay"] = torch.full_like(drawn["log_decay"], -5 / math.log(2))
    single = {name: x.float().requires_grad_() for name, x in drawn.items()}
    out, _ = erase_and_write(**single, chunk=64)
    torch.testing.assert_close(out.double(), by_token(**drawn)[0], rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(out.square().sum(), list(single.values()))
    assert all(bool(grad.isfinite().all()) for grad in grads)


@pytest.mark.parametrize("strength", [1.0, 400.0])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_gradients_are_finite_and_right_where_decays_are_strong(decay: str, strength: float) -> None:
    drawn = {name: x.requires_grad_() for name, x in draw(decay, strength=strength).items()}
    direction = torch.randn(2, N, E, dtype=torch.float64)
    mine, theirs = (
        torch.autograd.grad(out, list(drawn.values()), direction)
        for out in (erase_and_write(**drawn, chunk=16)[0], by_token(**drawn)[0])
    )
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)


# Memory


@decays
def test_for_the_gradients_of_many_stretches_only_their_states_are_kept(
    decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "STRETCH", 32)
    drawn = {name: x.requires_grad_() for name, x in draw(decay, 640).items()}
    peaks = []
    for kept in (1, 1000):
        monkeypatch.setattr(stretches, "KEPT", kept)
        peaks.append(peak_tensor_bytes(lambda: erase_and_write(**drawn, chunk=32)[0].sum().backward()))
    few, many = peaks
    assert few is not None
    assert many is not None
    assert few < many / 2
