from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.compressed.csa import CSA, Overlapping
from attnbench.catalogue.engines.gathered.key_index import lesson
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close
from tests.catalogue.attention.test_hca import HOLES, both, normed, tokens, turned

F64 = torch.float64
each_size = pytest.mark.parametrize(
    ("run", "window", "top_k"), [(4, 5, 2), (1, 1, 3), (3, 2, 40), (7, 30, 1), (40, 3, 2)]
)


def make(causal: bool, run: int = 4, window: int = 5, top_k: int = 2, n: int = 23) -> CSA:
    shape = Shape(batch=2, heads=3, seq_len=n, head_dim=6, causal=causal)
    options = {"run": run, "window": window, "top_k": top_k, "index_heads": 2, "index_dim": 5}
    module = built(CSA, "csa", shape, q_rank=5, rope_dim=4, **options).double()
    generator = torch.Generator().manual_seed(3)
    names = ("q_norm.weight", "kv_norm.weight", "sink", "entry.norm.weight", "entry.places")
    with torch.no_grad():
        for name in (*names, "index_entry.norm.weight", "index_entry.places"):
            weight = module.get_parameter(name)
            weight += 0.5 * torch.randn(weight.shape, generator=generator, dtype=F64)
    return module


def entry(made_by: Overlapping, example: Tensor, there: list[bool], first: int) -> Tensor:
    """Channel by channel: the run at ``first`` by its own half, the one before it by the other half."""
    d, m = made_by.width, made_by.run
    given = [made_by.parts.weight @ one for one in example]
    out = torch.zeros(d, dtype=F64)
    for c in range(d):
        pairs = []
        for j in range(m):
            before = first - m + j
            if before >= 0 and there[before]:
                pairs.append((given[before][2 * d + c] + made_by.places[j, c], given[before][c]))
            own = given[first + j]
            pairs.append((own[3 * d + c] + made_by.places[m + j, c], own[d + c]))
        weights = torch.stack([gate for gate, _ in pairs]).softmax(0)
        out[c] = sum(w * content for w, (_, content) in zip(weights, pairs, strict=True))
    return normed(out) * made_by.norm.weight


@torch.no_grad()
def by_hand(m: CSA, x: Tensor, real: Tensor | None = None) -> Tensor:
    """Token by token and head by head: three heads of width 6, two of the index of width 5."""
    rows = []
    for b, example in enumerate(x):
        N = len(example)
        there = [real is None or bool(real[b, j]) for j in range(N)]
        near = [turned(normed(m.kv.weight @ one) * m.kv_norm.weight, j) for j, one in enumerate(example)]
        closed = [a for a in range(0, N - m.run + 1, m.run) if all(there[a : a + m.run])]
        entries = {a: turned(entry(m.entry, example, there, a), a) for a in closed}
        of_index = {a: entry(m.index_entry, example, there, a) for a in closed}
        for t, one in enumerate(example):
            latent, heads = normed(m.q_down.weight @ one) * m.q_norm.weight, []
            asked, w = (m.index_q.weight @ latent).view(2, 5), m.index_w.weight @ one / math.sqrt(10)
            ranked = {
                a: float(sum(w[h] * max(0.0, float(asked[h] @ key)) for h in range(2)))
                for a, key in of_index.items()
                if a + m.run - 1 <= t or not m.causal
            }
            chosen = sorted(ranked, key=lambda a: (ranked[a], a))[-m.top_k :]
            keys = [near[j] for j in range(N) if there[j] and abs(t - j) < m.window and (j <= t or not m.causal)]
            keys += [entries[a] for a in chosen]
            for h in range(3):
                q = turned(normed(m.q_up.weight[6 * h : 6 * h + 6] @ latent), t)
                logits = torch.stack([*(q @ key / math.sqrt(6) for key in keys), m.sink[h]])
                weights = logits.softmax(0)
                read = sum((p * key for p, key in zip(weights, keys, strict=False)), torch.zeros(6, dtype=F64))
                heads.append(turned(read, -t))
            rows.append(m.out.weight @ torch.cat(heads))
    return torch.stack(rows).view(*x.shape)


@both
@each_size
@pytest.mark.parametrize("n", [1, 8, 23])
def test_equals_one_softmax_over_near_tokens_chosen_entries_and_a_sink(
    causal: bool, run: int, window: int, top_k: int, n: int
) -> None:
    module, x = make(causal, run, window, top_k, n), tokens(n)
    expected = by_hand(module, x)
    close(module(x).detach(), expected)
    close(module.dense(x).detach(), expected)
    if n == 23:
        expected = by_hand(module, x, HOLES)  # a padded token gives nothing to any entry
        close(module(x.masked_fill(~HOLES[..., None], torch.nan), key_mask=HOLES).detach()[HOLES], expected[HOLES])


def test_an_entry_is_seen_once_its_run_is_closed_and_reads_the_run_before_it() -> None:
    module, x = make(True, run=4, window=1, top_k=1), tokens().requires_grad_()
    with torch.no_grad():
        chosen = module._choose(module._index(x, module._latent(x), None), None)[..., 0]
        out = module(x)
    for t in range(23):
        assert bool((chosen[:, t] < (t + 1) // 4).all())
    compared = 0
    for b, j in product(range(2), range(23)):
        with torch.no_grad():
            other = x.detach().clone()
            other[b, j] *= 2  # nothing of the choice is kept, so that what is chosen may change
            again, moved = (
                module._choose(module._index(other, module._latent(other), None), None)[b, :, 0],
                module(other)[b],
            )
        for t in range(23):
            r = int(chosen[b, t])
            read = {t} if r < 0 else {t, *range(max(0, 4 * r - 4), 4 * r + 4)}
            if j not in read and again[t] == r:
                compared += 1
                close(moved[t], out[b, t])
    assert compared > 500


def test_the_index_learns_what_the_heads_read_and_nothing_else_learns_from_it() -> None:
    module, x = make(True, run=2, window=1, top_k=8, n=23), tokens()
    own = [p for name, p in module.named_parameters() if name.startswith("index_")]
    others = [p for name, p in module.named_parameters() if not name.startswith("index_")]

    def surprise() -> Tensor:
        latent = module._latent(x)
        entries, index = module._entries(module.entry.parts(x), 0), module._index(x, module._latent(x), None)
        return lesson(index, module._choose(index, None), module._queries(latent, 0), entries[:, None], None)

    assert all(g is None for g in torch.autograd.grad(surprise(), others, allow_unused=True))
    before = float(surprise().detach())
    optimiser = torch.optim.Adam(own, lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        (0.0 * module(x)).sum().backward()  # the lesson does not depend on what the model learns from
        optimiser.step()
    assert float(surprise().detach()) < before - 0.02
