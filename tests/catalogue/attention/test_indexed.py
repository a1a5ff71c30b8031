from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.indexed import IndexedAttention, LearnedIndex, RandomIndex
from attnbench.catalogue.engines.gathered.chosen import attend_to_chosen
from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.models.encoder import Encoder
from attnbench.suite.cell import ModelSize
from tests.catalogue.attention.small import built, close, qkv

F64 = torch.float64
HOLES = torch.arange(19) % 5 != torch.tensor([[1], [3]])
both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
each = pytest.mark.parametrize("indexer", ["random", "exact", "learned"])


def shape_of(causal: bool, kv_heads: int = 2, n: int = 19) -> Shape:
    return Shape(batch=2, heads=4, kv_heads=kv_heads, seq_len=n, head_dim=4, v_dim=3, causal=causal)


def make(shape: Shape, indexer: str, **options: Any) -> IndexedAttention:
    of_index = {} if indexer == "exact" else {"index_heads": 3, "index_dim": 6}
    chosen = {"top_k": 5, **of_index, **options}
    return built(IndexedAttention, "indexed", shape, indexer=indexer, **chosen).double()


def index(m: IndexedAttention, q: Tensor, k: Tensor, t: int, seen: list[int]) -> list[float]:
    """The index of one example's query t for each key that it sees, by the formula."""
    G = len(q) // len(k)
    if m.index is None:
        rows = torch.stack([(q[h, t] @ k[h // G, seen].mT / 2).softmax(-1) for h in range(len(q))])
        return rows.sum(0).tolist()
    scores = []
    for s in seen:
        if isinstance(m.index, RandomIndex):
            keys = m.index.of_keys.view(-1, len(k), 4)
            b = sum(keys[:, g] @ k[g, s] for g in range(len(k)))
            parts = [
                sum(keys[:, h // G] @ q[h, t] for h in range(len(q)) if h % m.index.heads == i)
                for i in range(m.index.heads)
            ]
            scores.append(sum(max(0.0, float(a @ b)) for a in parts))
        else:
            x, y = q[:, t].flatten(), k[:, s].flatten()
            b = m.index.of_keys.weight @ y
            b = (b - b.mean()) / (b.var(correction=0) + 1e-5).sqrt() * m.index.norm.weight + m.index.norm.bias
            a = (m.index.of_queries.weight @ x).view(3, 6)
            w = m.index.weights.weight @ x / (3 * 6) ** 0.5
            scores.append(sum(float(w[i]) * max(0.0, float(a[i] @ b)) for i in range(3)))
    return scores


@torch.no_grad()
def by_hand(m: IndexedAttention, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None) -> Tensor:
    """Query by query: rank the keys it sees, keep the best, then a softmax of each head over these."""
    out, G = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64), q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for t in range(q.shape[2]):
            seen = [s for s in range(t + 1 if m.causal else k.shape[2]) if real is None or bool(real[b, s])]
            scores = dict(zip(seen, index(m, q[b], k[b], t, seen), strict=True)) if seen else {}
            kept = sorted(seen, key=lambda s: (scores[s], s))[-m.top_k :]
            for h in range(q.shape[1]) if kept else ():
                weights = (q[b, h, t] @ k[b, h // G, kept].mT / 2).softmax(-1)
                out[b, h, t] = weights @ v[b, h // G, kept]
    return out


@both
@each
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_head_reads_the_keys_of_largest_index(causal: bool, indexer: str, kv_heads: int) -> None:
    shape = shape_of(causal, kv_heads)
    module, (q, k, v) = make(shape, indexer), qkv(shape)
    expected = by_hand(module, q, k, v)
    close(module(q, k, v).detach(), expected)
    close(module.dense(q, k, v).detach(), expected)
    real = HOLES[:, None, :, None]  # a padded key is never kept
    out = module(*(torch.where(real, x, torch.nan) for x in (q, k, v)), key_mask=HOLES)
    close(torch.where(real, out, 0.0).detach(), torch.where(real, by_hand(module, q, k, v, HOLES), 0.0))


def test_of_keys_without_any_index_the_latest_are_kept() -> None:
    shape = shape_of(False)
    module, (q, k, _) = make(shape, "random"), qkv(shape)
    assert module.index is not None
    with torch.no_grad():
        module.index.of_queries.zero_()
    assert module._choose(q, k, None).sort(-1).values.tolist() == [[[14, 15, 16, 17, 18]] * 19] * 2


def test_a_random_index_has_no_more_heads_than_attention() -> None:
    shape = shape_of(False)
    assert make(shape, "random", index_heads=9).index.heads == 4
    assert make(shape, "learned", index_heads=9).index.heads == 9


def kept_mass(module: IndexedAttention, q: Tensor, k: Tensor) -> float:
    """Mean over rows and heads of the probability of the keys that were kept, without causality."""
    p = (q @ of_query_heads(k, q.shape[1]).mT * q.shape[-1] ** -0.5).softmax(-1)
    chosen = module._choose(q, k, None).long()[:, None].expand(-1, q.shape[1], -1, -1)
    return float(p.gather(-1, chosen).sum(-1).mean())


# The learned index


@torch.enable_grad()
def lesson(m: IndexedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mean over queries of the divergence of softmax(index) from the heads' mean weights, over the keys kept."""
    assert isinstance(m.index, LearnedIndex)
    chosen, total = m._choose(q, k, None), torch.zeros((), dtype=F64)
    for b in range(2):
        for t in range(19):
            kept = [s for s in chosen[b, t].tolist() if s >= 0]
            p = torch.stack([(q[b, h, t] @ k[b, h // 2, kept].mT / 2).softmax(-1) for h in range(4)]).mean(0)
            x, y = q[b, :, t].flatten(), k[b, :, kept].transpose(0, 1).flatten(1)
            keys = m.index.norm(y @ m.index.of_keys.weight.mT)
            a = (m.index.of_queries.weight @ x).view(3, 6)
            w = m.index.weights.weight @ x / 18**0.5
            guess = (w @ (a @ keys.mT).relu()).log_softmax(-1)
            total = total + (p * (p.log() - guess)).sum()
    return total / 38


@both
def test_the_index_learns_from_its_own_loss_alone(causal: bool) -> None:
    shape = shape_of(causal)
    module, inputs = make(shape, "learned"), qkv(shape)
    expected = torch.autograd.grad(lesson(module, *inputs), list(module.parameters()))
    for factor in (1.0, 1000.0):  # whatever the loss of the model
        out = module(*inputs)
        for mine, theirs in zip(
            torch.autograd.grad(factor * out.sum(), list(module.parameters())), expected, strict=True
        ):
            close(mine, theirs)


def test_queries_and_keys_get_no_gradient_from_it() -> None:
    shape = shape_of(True)
    learned, inputs = make(shape, "learned"), [x.requires_grad_() for x in qkv(shape)]
    chosen = learned._choose(*inputs[:2], None)
    direction = torch.randn(2, 4, 19, 3, dtype=F64)
    mine = torch.autograd.grad(learned(*inputs), inputs, direction)
    theirs = torch.autograd.grad(attend_to_chosen(*inputs, chosen[:, None]), inputs, direction)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other)


def test_it_learns_in_every_layer_of_a_model_that_is_trained() -> None:
    label = "indexed:indexer=learned,top_k=4,index_heads=2,index_dim=3"
    model = Encoder(label, Shape(batch=2, heads=2, seq_len=19, head_dim=4), ModelSize(layers=2, ffn=8, vocab=11))
    model(torch.randint(11, (2, 19)), key_mask=HOLES).sum().backward()
    for layer in model.blocks:
        for name, weight in layer.layer.operator.index.named_parameters():
            assert weight.grad is not None, name
            assert 0 < float(weight.grad.abs().max()) < torch.inf, name


def test_training_makes_it_keep_more() -> None:
    torch.manual_seed(0)
    shape = Shape(batch=4, heads=2, seq_len=64, head_dim=8)
    module = built(IndexedAttention, "indexed", shape, indexer="learned", top_k=16, index_heads=4, index_dim=8, seed=0)
    q, k, v = (torch.randn(4, 2, 64, 8) for _ in range(3))
    q = 2 * q
    before = kept_mass(module, q, k)
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        module(q, k, v).sum().backward()
        optimiser.step()
    assert kept_mass(module, q, k) > before + 0.05
