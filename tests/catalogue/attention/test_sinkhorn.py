from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.sinkhorn import mixing
from attnbench.catalogue.attention.selection.sinkhorn.mixing import Balance
from attnbench.catalogue.attention.selection.sinkhorn.sinkhorn import Sinkhorn
from attnbench.catalogue.build import build
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.precision import hidden
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.measure.flops import count
from tests.catalogue.attention.small import built


def draw(N: int, *, B: int = 2, H: int = 3, D: int = 6, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, B, H, N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return scale * q, scale * k, v


def sinkhorn(options: str, N: int, *, causal: bool = False, seed: int = 1) -> Sinkhorn:
    return built(Sinkhorn, f"sinkhorn:{options}", Shape(2, 3, N, 6, causal=causal), seed=seed).double()


def balanced(scores: Tensor, allowed: Tensor, iterations: int, causal: bool) -> Tensor:
    """Alternating normalisation of one matrix, in the linear domain, column by column and row by row."""
    n = len(scores)
    weights = torch.where(allowed, scores.exp(), 0.0)
    rows = torch.ones(n, dtype=scores.dtype)
    for _ in range(iterations):
        used = weights / rows.unsqueeze(1)
        columns = used.cumsum(0) if causal else used.sum(0).expand(n, n)
        ratio = torch.where(columns > 0, weights / columns, 0.0)
        rows = torch.where(ratio.sum(1) > 0, ratio.sum(1), 1.0)
    return ratio / rows.unsqueeze(1)


def dense(module: Sinkhorn, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition, one head and one query at a time, without padding."""
    b, out = module.block, torch.empty_like(v)
    N, D = q.shape[-2:]
    blocks = [range(start, min(start + b, N)) for start in range(0, N, b)]
    n = len(blocks)
    earlier = [range(blocks[i].start + 1) for i in range(n)]
    for head in range(q.shape[1]):
        for batch in range(q.shape[0]):
            Q, K, V = q[batch, head], k[batch, head], v[batch, head]
            pools = earlier if module.causal else blocks
            if module.net:
                x = torch.stack([K[list(p)].mean(0) for p in pools])
                W, w, U = (module.net[name][head] for name in ("W", "w", "U"))
                scores = ((x @ W + w).relu() @ U)[:, :n].detach()
            else:
                means = torch.stack([K[list(p)].mean(0) for p in blocks])
                scores = torch.stack([Q[list(p)].mean(0) for p in pools]) @ means.T / D**0.5
            allowed = torch.ones(n, n, dtype=torch.bool).tril(-1 if module.causal else n)
            S = balanced(scores / module.temperature, allowed, module.iterations, module.causal)
            for i in range(N):
                home = i // b
                own = [j for j in blocks[home] if not module.causal or j <= i]
                keys, values, mass = [K[own]], [V[own]], [1.0] * len(own)
                for offset in range(b):
                    there = [J for J in range(n) if offset < len(blocks[J]) and S[home, J] > 0]
                    if there:
                        share = S[home, there]
                        tokens = [blocks[J].start + offset for J in there]
                        keys.append((share @ K[tokens] / share.sum())[None])
                        values.append((share @ V[tokens] / share.sum())[None])
                        mass.append(float(share.sum()))
                weights = torch.tensor(mass, dtype=torch.float64) * (torch.cat(keys) @ Q[i] / D**0.5).exp()
                out[batch, head, i] = weights / weights.sum() @ torch.cat(values)
    return out


@pytest.mark.parametrize("sort", ["bilinear", "learned"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("N", [1, 3, 12, 17])
def test_equals_the_definition_at_any_length(sort: str, causal: bool, N: int) -> None:
    q, k, v = draw(N, B=1)
    module = sinkhorn(f"block=4,iterations=3,sort={sort}", 17, causal=causal)
    for out in (module(q, k, v), module.dense(q, k, v)):
        torch.testing.assert_close(out, dense(module, q, k, v), atol=1e-11, rtol=1e-11)


def sort_matrix(module: Sinkhorn, q: Tensor, k: Tensor) -> Tensor:
    B, H, N, D = q.shape
    q, k = (x.reshape(B * H, N // module.block, module.block, D) for x in (q, k))
    return module.sort_matrix(q, k, H).detach()


@pytest.mark.parametrize("sort", ["bilinear", "learned"])
def test_sort_matrix_is_doubly_stochastic_after_twenty_iterations(sort: str) -> None:
    q, k, _ = draw(32)
    S = sort_matrix(sinkhorn(f"block=4,iterations=20,sort={sort}", 32), q, k)
    ones = torch.ones(6, 8, dtype=torch.float64)
    torch.testing.assert_close(S.sum(-1), ones, atol=1e-12, rtol=0)
    torch.testing.assert_close(S.sum(-2), ones, atol=1e-4, rtol=0)
    assert float(S.std()) > 0.02  # and not merely uniform
    once = sort_matrix(sinkhorn(f"block=4,iterations=1,sort={sort}", 32), q, k)
    assert float((once.sum(-2) - 1).abs().max()) > 0.01


def test_causal_sort_matrix_is_strictly_lower_triangular_and_its_rows_are_averages() -> None:
    q, k, _ = draw(32)
    S = sort_matrix(sinkhorn("block=4", 32, causal=True), q, k)
    assert torch.equal(S.triu(), torch.zeros_like(S))
    torch.testing.assert_close(S.sum(-1)[:, 1:], torch.ones(6, 7, dtype=torch.float64))


@pytest.mark.parametrize("causal", [False, True])
def test_a_number_added_to_all_scores_of_a_block_of_keys_cancels(causal: bool) -> None:
    scores, added = torch.randn(2, 7, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(), hidden(scores.dtype))
    plain, biased = (Balance.apply(x, 3, causal) for x in (scores, scores + added))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(plain, biased, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_in_several_pieces_and_weights_kept_or_not_give_the_same_output_and_gradients(
    kept: int, causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiling.TUNED, "sinkhorn.weights", tiling.Tuned(1 << 6, 1))  # two blocks at a time
    monkeypatch.setattr(mixing, "_KEPT", kept)  # of no block, of 22 of 30, of all
    q, k, v = (x.requires_grad_() for x in draw(20, scale=1.0))
    mask = torch.arange(20) < torch.tensor([[13], [20]]) if masked else None
    module = sinkhorn("block=4,iterations=3", 20, causal=causal)
    out = module(q, k, v, key_mask=mask)
    torch.testing.assert_close(out, module.dense(q, k, v, key_mask=mask), atol=1e-11, rtol=1e-11)
    assert torch.autograd.gradcheck(lambda *x: module(*x, key_mask=mask), (q, k, v), fast_mode=True)
    first, again = (torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_one_tensor_may_be_queries_keys_and_values() -> None:
    x = draw(8, H=1, D=3)[0].requires_grad_()
    module = build("sinkhorn:block=2", Shape(2, 1, 8, 3))
    assert torch.autograd.gradcheck(lambda x: module(x, x, x), (x,), fast_mode=True)


@pytest.mark.parametrize("cut", [1, 3])
def test_sort_cut_with_a_hard_permutation_shows_every_query_the_first_sorted_blocks_only(cut: int) -> None:
    q, k, v = draw(16, D=6, scale=0.5)
    order, axes = torch.tensor([2, 0, 3, 1]), torch.eye(4, 6, dtype=torch.float64).repeat_interleave(4, 0)
    q = q + 20 * axes
    k = k + 20 * axes.view(4, 4, 6)[order.argsort()].view(16, 6)
    seen = (torch.arange(16) // 4 == order[:cut, None]).any(0)
    expected = masked_attention(q, k, v, seen.expand(16, 16))
    torch.testing.assert_close(sinkhorn(f"block=4,sort_cut={cut}", 16)(q, k, v), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_sort_cut_in_half_precision_gradients_and_empty_rows(masked: bool) -> None:
    q, k, v = (x.requires_grad_() for x in draw(10, H=1, D=3))
    mask = torch.tensor([[False], [True]]) & (torch.arange(10) < 7) if masked else None
    module = build("sinkhorn:block=4,sort_cut=2,iterations=3", Shape(2, 1, 10, 3)).double()
    assert torch.autograd.gradcheck(lambda *x: module(*x, key_mask=mask), (q, k, v), fast_mode=True)
    half = module(q.half(), k.half(), v.half(), key_mask=mask)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.double(), module(q, k, v, key_mask=mask), atol=0.01, rtol=0.01)
    assert bool((half[0] == 0).all()) == masked


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("options", ["sort=bilinear", "sort=learned", "sort=bilinear,iterations=1"])
def test_decoding_sorts_by_earlier_queries_when_a_block_begins(options: str, scale: float) -> None:
    q, k, v = draw(22, scale=scale)
    module = sinkhorn(f"block=4,{options}", 22, causal=True)
    expected = module(q, k, v)
    for prompt in (0, 7, 8, 9):
        state = module.begin(*(x[:, :, :prompt] for x in (q, k, v)))
        for t in range(prompt, 22):
            out, state = module.step(state, *(x[:, :, t : t + 1] for x in (q, k, v)))
            torch.testing.assert_close(out, expected[:, :, t : t + 1], atol=1e-9, rtol=1e-9)
    # Beside the cache one number per block and iteration, not one per pair of blocks.
    assert state.columns.shape == (2, 3, module.iterations, 5)
    assert state.cache.k.shape == (2, 3, 22, 6)


def test_a_token_costs_the_same_wherever_it_stands_unless_it_begins_a_block() -> None:
    def flops(n: int) -> int:
        module, (q, k, v) = sinkhorn("block=8", 200, causal=True), draw(n + 1)
        state = module.begin(*(x[:, :, :n] for x in (q, k, v)))
        return count(lambda: module.step(state, *(x[:, :, n:] for x in (q, k, v)))).matmul_flops

    assert flops(19) == flops(163)
    assert flops(16) < flops(160)
