from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.msa import MSA, RandomRanking
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from tests.catalogue.attention.small import built, close, qkv

F64 = torch.float64
N = 19
HOLES = torch.arange(N) % 5 != torch.tensor([[1], [3]])
both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
each = pytest.mark.parametrize("indexer", ["random", "exact", "learned", "random-relu", "learned-relu"])


def shape_of(causal: bool, kv_heads: int = 2) -> Shape:
    return Shape(batch=2, heads=4, kv_heads=kv_heads, seq_len=N, head_dim=4, v_dim=3, causal=causal)


def make(shape: Shape, indexer: str, **options: Any) -> MSA:
    indexer, relu, _ = indexer.partition("-relu")
    more = {"index_heads": 2, "score": "relu"} if relu else {}
    of_index = {} if indexer == "exact" else {"index_dim": 6, **more}
    return built(MSA, "msa", shape, indexer=indexer, **{"block": 4, "blocks": 3, **of_index, **options}).double()


def numbers(m: MSA, q: Tensor, k: Tensor, g: int, t: int, seen: list[int]) -> dict[int, float]:
    """The number of each key that query t of one example sees, for the heads that read head g of keys."""
    G = len(q) // len(k)
    heads = range(g * G, (g + 1) * G)

    def turned(x: Tensor, place: int) -> Tensor:
        """x over the root of its mean square, as three complex numbers, each turned by its angle."""
        x = x / (x.square().mean() + 1e-6).sqrt()
        return torch.complex(x[:3], x[3:]) * torch.polar(
            torch.ones(3, dtype=F64), place * 10000 ** -(torch.arange(3, dtype=F64) / 3)
        )

    if m.index is None:
        rows = torch.stack([(q[h, t] @ k[g, seen].mT / 2).softmax(-1) for h in heads])
        return dict(zip(seen, rows.sum(0).tolist(), strict=True))
    found = {}
    for s in seen:
        if m.index.plain:
            if isinstance(m.index, RandomRanking):
                a, b = (m.index.projection @ x for x in (sum(q[h, t] for h in heads), k[g, s]))
            else:
                a = (m.index.of_queries.weight @ q[:, t].flatten()).view(len(k), 6)[g]
                b = m.index.of_keys.weight @ k[:, s].flatten()
            found[s] = float((turned(a, t) * turned(b, s).conj()).real.sum())
        elif isinstance(m.index, RandomRanking):
            P, I = m.index.projection, m.index.heads
            asked = [sum(P @ q[h, t] for h in heads if (h - g * G) % I == i) for i in range(I)]
            found[s] = sum(max(0.0, float(a @ (P @ k[g, s]))) for a in asked)
        else:
            x, y = q[:, t].flatten(), k[:, s].flatten()
            b = m.index.of_keys.weight @ y
            b = (b - b.mean()) / (b.var(correction=0) + 1e-5).sqrt() * m.index.norm.weight + m.index.norm.bias
            a = (m.index.of_queries.weight @ x).view(len(k), 2, 6)[g]
            w = (m.index.weights.weight @ x).view(len(k), 2)[g] / (2 * 6) ** 0.5
            found[s] = sum(float(w[i]) * max(0.0, float(a[i] @ b)) for i in range(2))
    return found


@torch.no_grad()
def by_hand(m: MSA, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
    """Query by query: each block has the largest number of its keys, and the heads of a group read the same blocks."""
    out, G = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64), q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for t in range(N):
            seen = [s for s in range(t + 1 if m.causal else N) if real is None or bool(real[b, s])]
            for g in range(k.shape[1]) if seen else ():
                found, largest = numbers(m, q[b], k[b], g, t, seen), dict[int, float]()
                for s in seen:
                    largest[s // 4] = max(largest.get(s // 4, -1e9), found[s])
                largest.pop(t // 4, None)
                chosen = {t // 4, *sorted(largest, key=lambda J: (largest[J], J))[::-1][: m.blocks - 1]}
                kept = [s for s in seen if s // 4 in chosen]
                for h in range(g * G, (g + 1) * G) if kept else ():
                    out[b, h, t] = (q[b, h, t] @ k[b, g, kept].mT / 2).softmax(-1) @ v[b, g, kept]
    return out


@both
@each
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_group_reads_the_blocks_of_the_largest_keys(causal: bool, indexer: str, kv_heads: int) -> None:
    shape = shape_of(causal, kv_heads)
    module, (q, k, v) = make(shape, indexer), qkv(shape)
    expected = by_hand(module, q, k, v)
    close(module(q, k, v).detach(), expected)
    close(module.dense(q, k, v).detach(), expected)
    real = HOLES[:, None, :, None]  # a padded key gives its block nothing
    out = module(*(torch.where(real, x, torch.nan) for x in (q, k, v)), key_mask=HOLES)
    close(torch.where(real, out, 0.0).detach(), torch.where(real, by_hand(module, q, k, v, HOLES), 0.0))


@each
def test_the_heads_of_a_group_share_a_choice_and_groups_do_not(indexer: str) -> None:
    shape = shape_of(True)
    module, (q, k, _) = make(shape, indexer, blocks=2), qkv(shape)
    seen = module.select(q, k).pairs(slice(0, N))
    assert torch.equal(seen[:, 0], seen[:, 1])
    assert torch.equal(seen[:, 2], seen[:, 3])
    assert not torch.equal(seen[:, 0], seen[:, 2])


def test_an_exact_ranking_says_so_whatever_the_score() -> None:
    exact, both = (VARIANTS.get("msa").claims(parse_spec(f"msa:indexer=exact{more}")) for more in ("", ",score=relu"))
    assert exact.own_form == both.own_form != VARIANTS.get("msa").claims(parse_spec("msa:score=relu")).own_form
