from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.nsa import NSA
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import built, close, qkv

F64 = torch.float64
BRANCHES = ("compressed", "selected", "window")
HOLES = torch.arange(29) % 7 != torch.tensor([[1], [3]])
both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
each_branch = pytest.mark.parametrize("branch", ["all", *BRANCHES])


def shape_of(causal: bool, kv_heads: int = 2, n: int = 29) -> Shape:
    return Shape(batch=2, heads=4, kv_heads=kv_heads, seq_len=n, head_dim=4, v_dim=3, causal=causal)


def make(shape: Shape, branch: str = "all", **options: Any) -> NSA:
    of_pooled, of_selected, of_window = {"length": 4, "stride": 2}, {"block": 4, "top_n": 4}, {"window": 5}
    of_branch = {
        "all": {**of_pooled, **of_selected, **of_window},
        "compressed": of_pooled,
        "selected": {**of_pooled, **of_selected},
        "window": of_window,
    }
    chosen = {**of_branch[branch], **options}
    module = built(NSA, "nsa", shape, branch=branch, **chosen).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            weight += torch.randn(weight.shape, generator=generator, dtype=F64)
    return module


def softmax_over(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if not keys:
        return torch.zeros(3, dtype=F64)
    return (torch.stack(keys) @ q / 2).softmax(0) @ torch.stack(values)


@torch.no_grad()
def by_hand(m: NSA, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
    """Example by example, group by group, query by query."""
    (B, H, N, _), K = q.shape, k.shape[1]
    G, out = H // K, torch.zeros(B, H, N, 3, dtype=F64)
    for b in range(B):
        there = [real is None or bool(real[b, j]) for j in range(N)]
        for g in range(K):
            heads = range(g * G, (g + 1) * G)
            places = [torch.full((m.length,), 1 / m.length, dtype=F64)] * 2
            if m.of_keys is not None and m.of_values is not None:
                places = [m.of_keys[g].softmax(-1), m.of_values[g].softmax(-1)]
            starts = [a for a in range(0, N - m.length + 1, m.stride) if all(there[a : a + m.length])]
            pooled = {
                a: tuple(w @ x[b, g, a : a + m.length] for w, x in zip(places, (k, v), strict=True)) for a in starts
            }
            for t in range(N):
                seen = [j for j in range(t + 1 if m.causal else N) if there[j]]
                ended = [a for a in starts if a + m.length - 1 <= t or not m.causal]
                # Blocks of m.block tokens score what the pooled blocks weigh, for every token in common.
                score = dict.fromkeys(sorted({j // m.block for j in seen}), 0.0)
                for h in heads if ended else ():
                    weights = (torch.stack([pooled[a][0] for a in ended]) @ q[b, h, t] / 2).softmax(0)
                    for a, weight in zip(ended, weights.tolist(), strict=True):
                        for j in range(a, a + m.length):
                            if j // m.block in score:
                                score[j // m.block] += weight / m.stride
                own = t // m.block
                always = {0, own - 1, own} | (set() if m.causal else {own + 1})
                ranked = sorted(score, key=lambda c: (c == own, c in always, (c not in always) * round(score[c], 9), c))
                taken = [j for j in seen if j // m.block in ranked[-m.top_n :]]
                near = [j for j in seen if abs(t - j) < m.window]
                for h in heads:
                    query = q[b, h, t]
                    parts = {
                        "compressed": softmax_over(query, *zip(*(pooled[a] for a in ended), strict=True))
                        if ended
                        else torch.zeros(3, dtype=F64),
                        "selected": softmax_over(query, [k[b, g, j] for j in taken], [v[b, g, j] for j in taken]),
                        "window": softmax_over(query, [k[b, g, j] for j in near], [v[b, g, j] for j in near]),
                    }
                    if m.gate is None:
                        out[b, h, t] = parts[m.branch]
                    else:
                        gates = (m.gate[h] @ query).sigmoid()
                        out[b, h, t] = sum(gate * part for gate, part in zip(gates, parts.values(), strict=True))
    return out


@both
@each_branch
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_three_softmaxes_query_by_query(causal: bool, branch: str, kv_heads: int) -> None:
    shape = shape_of(causal, kv_heads)
    module, (q, k, v) = make(shape, branch), qkv(shape)
    expected = by_hand(module, q, k, v)
    close(module(q, k, v).detach(), expected)
    close(module.dense(q, k, v).detach(), expected)
    real = HOLES[:, None, :, None]  # no query sees a pooled block with a padded token
    out = module(*(torch.where(real, x, torch.nan) for x in (q, k, v)), key_mask=HOLES)
    close(torch.where(real, out, 0.0).detach(), torch.where(real, by_hand(module, q, k, v, HOLES), 0.0))


@both
@pytest.mark.parametrize(
    "options",
    [
        {"block": 6, "length": 3, "stride": 3},
        {"block": 2, "length": 6, "stride": 2, "top_n": 7},
        {"block": 8, "length": 4, "stride": 1, "top_n": 1},
        {"block": 3, "length": 40, "stride": 1, "top_n": 5},
        {"window": 40, "top_n": 40},
    ],
    ids=str,
)
def test_for_blocks_of_any_size(causal: bool, options: dict[str, int]) -> None:
    shape = shape_of(causal)
    module, (q, k, v) = make(shape, **options), qkv(shape)
    expected = by_hand(module, q, k, v)
    close(module(q, k, v).detach(), expected)
    close(module.dense(q, k, v).detach(), expected)
