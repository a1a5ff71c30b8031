from __future__ import annotations

import math

import pytest
import torch

from attnbench.catalogue.attention.selection.hyperattention.causal_blocks import rectangles, spans
from attnbench.catalogue.engines import tiling
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.test_hyperattention import draw, hyper, weights

F64 = torch.float64
SMALL = ["block=4,samples=5,bits=3", "block=6,samples=0,bits=2", "block=1,samples=4,bits=4", "block=3,samples=7,bits=1"]
each_small = pytest.mark.parametrize("options", SMALL)


def test_rectangles_tile_the_triangle_below_the_diagonal_once() -> None:
    for n in range(1, 40):
        for block in (1, 3, 4, 50):
            times = torch.zeros(n, n)
            for at in rectangles(n, block):
                for first in range(0, at.repeats * at.step, at.step):
                    query, key = at.first_query + first, at.first_key + first
                    assert query + at.queries <= n
                    times[query : query + at.queries, key : key + at.keys] += 1
                    assert query == key or (key + at.keys == query and at.queries <= at.keys)
            assert torch.equal(times.tril(), torch.ones(n, n).tril())
            assert int(times.triu(block).sum()) == 0


def test_a_token_asks_the_spans_in_whose_rectangles_it_is() -> None:
    for t in range(60):
        asked = [
            (at.first_key + first, at.keys)
            for at in rectangles(t + 1, 4)
            for first in range(0, at.repeats * at.step, at.step)
            if at.first_query > at.first_key and 0 <= t - at.first_query - first < at.queries
        ]
        assert sorted(asked) == list(spans(t // 4 * 4, 4))
        assert sum(size for _, size in asked) == t // 4 * 4


@each_small
def test_a_prefix_alone_gives_what_it_gives_before_more_tokens(options: str) -> None:
    q, k, v = draw(40)
    whole = hyper(options, 40, causal=True)(q, k, v)
    for n in (1, 7, 13, 31):
        short = hyper(options, n, causal=True)(*(x[:, :, :n] for x in (q, k, v)))
        torch.testing.assert_close(short, whole[:, :, :n], rtol=0, atol=1e-12)


def test_without_a_sample_a_query_sees_its_own_block_and_one_of_each_earlier_half() -> None:
    q, k, _ = draw(32)
    seen = weights(hyper("block=4,samples=0,bits=2", 32, causal=True), q, k) > 0
    i = torch.arange(32)
    assert torch.equal(seen, seen.tril())
    for half in (8, 16):
        rectangle = seen[:, :, half : 2 * half, :half].sum(-1)
        assert torch.equal(rectangle, torch.full_like(rectangle, 4))
    halves = torch.tensor([(t // 4).bit_count() for t in range(32)])
    assert torch.equal(seen.sum(-1), (i % 4 + 1 + 4 * halves).expand(2, 2, -1))


def test_queries_with_the_hash_of_all_keys_spread_over_the_blocks_by_their_place() -> None:
    q, k = torch.ones(1, 1, 32, 4, dtype=F64), torch.ones(1, 1, 32, 4, dtype=F64)
    seen = weights(hyper("block=4,samples=0,bits=3", 32, H=1, causal=True), q, k)[0, 0] > 0
    own = torch.arange(16)[:, None] // 4 == torch.arange(16) // 4
    assert torch.equal(seen[16:, :16], own)


def test_a_hash_that_no_key_has_falls_into_the_block_of_its_neighbours() -> None:
    module = hyper("block=2,samples=0,bits=2", 16, H=1, D=2, causal=True)
    module.projections.copy_(torch.eye(2))
    signs = torch.tensor([[-1.0, -1.0], [-1, 1], [1, 1], [1, -1]], dtype=F64)  # hashes 0, 1, 2, 3
    k = signs[torch.tensor([0, 3] * 4 + [0] * 8)]
    q = signs[torch.tensor([0] * 8 + [0, 1, 2, 3] * 2)]
    seen = weights(module, q[None, None], k[None, None])[0, 0, 8:, :8] > 0
    # Keys 0, 2, 4, 6 have hash 0, the others 3; hashes 1 and 2 lie before the first of those.
    found = [row.nonzero()[:, 0].tolist() for row in seen]
    assert found == [[0, 2], [1, 3], [1, 3], [1, 3], [4, 6], [1, 3], [1, 3], [5, 7]]


def test_numerator_and_denominator_are_right_on_average_over_the_draws() -> None:
    q, k, _ = draw(24, B=1, H=1)
    module = hyper("block=3,samples=4,bits=2", 24, H=1, causal=True)
    kernel = (q @ k.mT * 0.5).exp().tril()
    total, grid, rounds = torch.zeros_like(kernel), 1 << 20, 32
    for offset in range(rounds):
        module.draws.copy_(torch.full((4,), (2 * offset + 1) * grid // (2 * rounds)))
        got = weights(module, q, k)
        denominator = (kernel / got).diagonal(dim1=2, dim2=3).unsqueeze(3)  # the own key always counts once
        total += got * denominator
    torch.testing.assert_close(total / rounds, kernel, rtol=0.13, atol=0)


@pytest.mark.parametrize("training", [False, True])
def test_memory_grows_with_the_length_and_not_with_the_halvings(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiles of their usual size would hide what depends on the length.
    monkeypatch.setitem(tiling.TUNED, "hyperattention.weights", tiling.Tuned(1 << 13))

    def peak(n: int, block: int) -> int:
        module = hyper(f"block={block},samples={block}", n, H=1, causal=True).float()
        inputs = [torch.randn(1, 1, n, 4, requires_grad=training) for _ in range(3)]

        def call() -> object:
            output = module(*inputs)
            return torch.autograd.grad(output.sum(), inputs) if training else output

        return peak_tensor_bytes(call) or 0

    few_halvings = peak(2048, 128)
    assert few_halvings <= 4.4 * peak(512, 128)
    assert peak(2048, 16) <= 1.05 * few_halvings


def test_work_grows_with_the_length_times_its_logarithm() -> None:
    b, m, D = 16, 24, 4

    def flops(n: int) -> int:
        module, x = hyper(f"block={b},samples={m},bits=1", n, H=1, D=D, causal=True).float(), torch.randn(1, 1, n, D)
        return count(lambda: module(x, x, x)).matmul_flops

    for n in (1024, 4096):
        levels = math.log2(n / b)
        # Half of the tokens are queries of a rectangle of each size; at most one chunk of each block is not full.
        assert flops(n) <= 4 * D * n * (b + levels / 2 * 2 * (b + m)) + 4 * n * D
