from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.compressed.hca import HCA
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close

F64 = torch.float64
HOLES = torch.arange(23) % 9 != torch.tensor([[1], [3]])
both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
each_size = pytest.mark.parametrize(("run", "window"), [(4, 5), (1, 1), (3, 2), (7, 30), (40, 3)])


def make(causal: bool, run: int = 4, window: int = 5, n: int = 23) -> HCA:
    shape = Shape(batch=2, heads=3, seq_len=n, head_dim=6, causal=causal)
    module = built(HCA, "hca", shape, run=run, window=window, q_rank=5, rope_dim=4).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in ("q_norm.weight", "kv_norm.weight", "entry_norm.weight", "places", "sink"):
            weight = module.get_parameter(name)
            weight += 0.5 * torch.randn(weight.shape, generator=generator, dtype=F64)
    return module


def tokens(n: int = 23) -> Tensor:
    return torch.randn(2, n, 18, dtype=F64)


def turned(vector: Tensor, place: int) -> Tensor:
    """The last four channels in pairs, 2 with 4 and 3 with 5, by place · 1 and place / 100."""
    out = vector.clone()
    for i, theta in enumerate((1.0, 0.01)):
        one, other, angle = vector[2 + i], vector[4 + i], place * theta
        out[2 + i] = one * math.cos(angle) - other * math.sin(angle)
        out[4 + i] = one * math.sin(angle) + other * math.cos(angle)
    return out


def normed(vector: Tensor) -> Tensor:
    return vector / (vector @ vector / len(vector) + 1e-6).sqrt()


@torch.no_grad()
def by_hand(m: HCA, x: Tensor, real: Tensor | None = None) -> Tensor:
    """Token by token and head by head: three heads of width 6."""
    rows = []
    for b, example in enumerate(x):
        N = len(example)
        there = [real is None or bool(real[b, j]) for j in range(N)]
        near = [turned(normed(m.kv.weight @ one) * m.kv_norm.weight, j) for j, one in enumerate(example)]
        entries = {}
        for a in range(0, N - m.run + 1, m.run):
            if all(there[a : a + m.run]):
                both = torch.stack([m.entry.weight @ one for one in example[a : a + m.run]])
                weights = (both[:, 6:] + m.places).softmax(0)  # of each channel, over the tokens
                mean = sum(weights[j] * both[j, :6] for j in range(m.run))
                entries[a] = turned(normed(mean) * m.entry_norm.weight, a)
        for t, one in enumerate(example):
            latent, heads = normed(m.q_down.weight @ one) * m.q_norm.weight, []
            keys = [near[j] for j in range(N) if there[j] and abs(t - j) < m.window and (j <= t or not m.causal)]
            keys += [entry for a, entry in entries.items() if a + m.run - 1 <= t or not m.causal]
            for h in range(3):
                q = turned(normed(m.q_up.weight[6 * h : 6 * h + 6] @ latent), t)
                logits = torch.stack([*(q @ key / math.sqrt(6) for key in keys), m.sink[h]])
                weights = logits.softmax(0)
                read = sum((w * key for w, key in zip(weights, keys, strict=False)), torch.zeros(6, dtype=F64))
                heads.append(turned(read, -t))
            rows.append(m.out.weight @ torch.cat(heads))
    return torch.stack(rows).view(*x.shape)


@both
@each_size
@pytest.mark.parametrize("n", [1, 8, 23])
def test_equals_one_softmax_over_near_tokens_entries_and_a_sink(causal: bool, run: int, window: int, n: int) -> None:
    module, x = make(causal, run, window, n), tokens(n)
    expected = by_hand(module, x)
    close(module(x).detach(), expected)
    close(module.dense(x).detach(), expected)
    if n == 23:
        expected = by_hand(module, x, HOLES)  # no query sees an entry with a padded token
        close(module(x.masked_fill(~HOLES[..., None], torch.nan), key_mask=HOLES).detach()[HOLES], expected[HOLES])


def test_an_entry_is_seen_once_its_run_is_closed_and_not_before() -> None:
    module, x = make(True, run=4, window=1), tokens().requires_grad_()
    out = module(x)
    for t in range(23):
        (grad,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        reached = (grad[0].abs().amax(-1) > 0).nonzero()[:, 0].tolist()
        closed = (t + 1) // 4 * 4
        assert reached == sorted({*range(closed), t})
