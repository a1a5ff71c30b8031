"""Log-linear attention, token by token, with the pieces of the past as sets."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.log_linear import LogLinear
from attnbench.catalogue.engines.recurrent.levels import levelled_attention, tree
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import both, close

counts = pytest.mark.parametrize("levels", [None, 1, 2, 4, 9])


Base = Literal["ssd", "gated-delta"]
bases = pytest.mark.parametrize("base", ["ssd", "gated-delta"])


def make(shape: Shape, *, levels: int | None = None, chunk: int = 4, base: Base = "ssd") -> LogLinear:
    """With decays that matter over some tokens."""
    module = LogLinear(shape, base=base, state=5, levels=levels, chunk=chunk).double()
    with torch.no_grad():
        module.log_A.uniform_(-2, 1)
        module.slope.uniform_(0.5, 2)
    return module


def tokens(shape: Shape, n: int = 23) -> Tensor:
    return torch.randn(shape.B, n, shape.C, dtype=torch.float64)


def pieces(t: int) -> list[tuple[int, range]]:
    """Level and tokens of what token t reads, itself first."""
    found, end = [(0, range(t, t + 1))], t
    for bit in range(t.bit_length()):
        if t >> bit & 1:
            found.append((bit + 1, range(end - 2**bit, end)))
            end -= 2**bit
    return found


def one_way(module: LogLinear, x: Tensor) -> Tensor:
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    y, D = torch.zeros_like(x), x.shape[2] // module.heads
    value, (B, C) = x @ p["value.weight"].T, (x @ p["key_query.weight"].T).chunk(2, -1)
    size = torch.log1p(torch.exp(x @ p["step_size.weight"].T + p["step_size.bias"]))
    for h in range(module.heads):
        columns, own = (slice(h * width, h * width + width) for width in (module.levels, D))
        weights = torch.log1p(torch.exp((x @ p["weight.weight"][columns].T) * p["slope"][h]))
        for t in range(x.shape[1]):
            for level, piece in pieces(t):
                for s in piece:
                    kept = torch.exp(-p["log_A"][h].exp() * size[:, s + 1 : t + 1, h].sum(1))
                    score = (C[:, t] * B[:, s]).sum(-1) * kept * size[:, s, h]
                    y[:, t, own] += (weights[:, t, min(level, module.levels - 1)] * score)[:, None] * value[:, s, own]
    return y


def erased(module: LogLinear, x: Tensor) -> Tensor:
    """As :func:`one_way` over the gated delta rule: what a token wrote is kept alone, and each later one changes it."""
    p = {name: parameter.detach() for name, parameter in module.named_parameters()}
    (B, N, C), H = x.shape, module.heads
    heads = [z.view(B, N, H, 5) for z in (x @ p["key_query.weight"].T).chunk(2, -1)]
    k, q = ((z / (1 + torch.exp(-z))) for z in heads)
    k, q = (z / z.square().sum(-1, keepdim=True).sqrt() for z in (k, q))
    v = (x @ p["value.weight"].T).view(B, N, H, -1)
    beta = 1 / (1 + torch.exp(-(x @ p["beta.weight"].T)))
    size = torch.log1p(torch.exp(x @ p["step_size.weight"].T + p["step_size.bias"]))
    weights = torch.log1p(torch.exp((x @ p["weight.weight"].T).view(B, N, H, -1) * p["slope"]))
    y, written = x.new_zeros(B, N, H, C // H), []
    for t in range(N):
        step = torch.eye(5, dtype=x.dtype) - beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None]
        step = step * torch.exp(-size[:, t] * p["log_A"].exp())[..., None, None]
        own = beta[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None]
        written = [step @ state for state in written] + [own]
        for level, piece in pieces(t):
            read = sum(torch.einsum("bhs,bhsd->bhd", q[:, t], written[s]) for s in piece)
            y[:, t] += weights[:, t, :, min(level, module.levels - 1), None] * read / 5**0.5
    return y.flatten(2)


def by_hand(module: LogLinear, x: Tensor) -> Tensor:
    run = erased if module.erases else one_way
    y = run(module, x)
    if not module.causal:
        y = y + run(module, x.flip(1)).flip(1)
    return y @ module.out.weight.detach().T


def test_the_seventh_token_reads_pieces_of_four_and_two() -> None:
    assert [level for level, piece in sorted(pieces(6), key=lambda one: one[1][0]) for _ in piece] == [
        3,
        3,
        3,
        3,
        2,
        2,
        0,
    ]
    assert tree(8, torch.device("cpu"))[6, :7].tolist() == [3, 3, 3, 3, 2, 2, 0]


@both
@bases
@counts
@torch.no_grad()
def test_equals_the_sum_over_pieces(shape: Shape, base: Base, levels: int | None) -> None:
    module, x = make(shape, levels=levels, base=base), tokens(shape)
    close(module(x), by_hand(module, x))


def drawn(n: int = 23) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, n, 4, dtype=torch.float64) for _ in range(3))
    return q, k, v, -torch.rand(2, n, dtype=torch.float64)


def test_there_are_as_many_levels_as_the_length_needs() -> None:
    for n, levels in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (23, 6), (16384, 15)):
        assert LogLinear(Shape(heads=1, head_dim=2, seq_len=n)).levels == levels


@pytest.mark.parametrize("strength", [20.0, 1e4])
def test_the_strongest_decays_neither_overflow_nor_lose_digits(strength: float) -> None:
    q, k, v, log_decay = drawn(70)
    log_decay = torch.where(torch.rand_like(log_decay) < 0.3, strength * log_decay, 0.0)
    weights = torch.rand(2, 70, 8, dtype=torch.float64)
    inputs = [x.float() for x in (q, k, v, log_decay, weights)]
    exact = levelled_attention(*(x.double() for x in inputs), chunk=1)
    torch.testing.assert_close(levelled_attention(*inputs, chunk=32).double(), exact, rtol=1e-4, atol=1e-5)
