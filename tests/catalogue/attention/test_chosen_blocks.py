"""Variants that choose blocks of keys: what is kept decides the error, and what is chosen keeps to its rules."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.selection.xattention import XAttention
from attnbench.catalogue.engines.blocks.selecting import BlockSelecting
from attnbench.catalogue.engines.blocks.selection import heaviest
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.measure.coverage import kept
from tests.catalogue.attention.small import built

B, H, N, D = 2, 2, 45, 4
F64 = torch.float64

CHOOSING = [
    "moba:block=5,blocks=2",
    "oracle-blocks:block=5,blocks=2",
    "msa:block=5,blocks=2,index_dim=4",
    "msa:block=5,blocks=2,indexer=exact",
    "xattention:block=6,stride=3,threshold=0.5",
    "flexprefill:block=4,mass=0.5,least=0,distance=0",
    "flexprefill:block=4,mass=0.5,least=0,distance=1",
    "minference:block=4,vertical=4,first=1,slash=3,recent=1,last=3",
    "minference:pattern=a-shape,block=4,sink=3,window=6",
    "sparge:queries=4,keys=2,similarity=0.3,threshold=0.5,rule=holding,smooth_k=false",
]
BY_BLOCK = {
    "xattention:block=6,stride=3,threshold=0.5": 6,
    "sparge:queries=4,keys=2,similarity=0.3,threshold=0.5,rule=holding,smooth_k=false": 4,
}
"""Those whose choice is one for a block of queries, and the queries of a block."""
BY_QUERY = ["moba:block=5,blocks=2", "oracle-blocks:block=5,blocks=2", CHOOSING[8], *CHOOSING[2:4]]

each = pytest.mark.parametrize("text", CHOOSING)
both = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])


def draw(n: int = N, heads: int = H, d: int = D) -> list[Tensor]:
    return [torch.randn(B, heads, n, d, dtype=F64) for _ in "qkv"]


def made(text: str, causal: bool = True, n: int = N, **options: float) -> BlockSelecting:
    return built(BlockSelecting, text, Shape(B, H, n, D, causal=causal), **options)


@each
@both
def test_what_an_output_is_off_by_is_the_mass_that_was_dropped(text: str, causal: bool) -> None:
    """o - ô = (1 - m)(ō - ô), with averages that this test takes by itself."""
    module, (q, k, v) = made(text, causal), draw()
    out, seen = module(q, k, v), module.select(q, k).pairs(slice(0, N))
    visible = torch.ones(N, N, dtype=torch.bool)
    weights = (q @ k.mT * D**-0.5).masked_fill(~(visible.tril() if causal else visible), -torch.inf).softmax(-1)
    mass = (weights * seen).sum(-1, keepdim=True)
    dropped = (weights * ~seen) @ v / (1 - mass).clamp(min=1e-300)
    off = exact_attention(q, k, v, causal=causal) - out
    torch.testing.assert_close(off, (1 - mass) * (dropped - out), rtol=0, atol=1e-12)
    assert bool((off.norm(dim=-1) <= 2 * (1 - mass)[..., 0] * v.norm(dim=-1).max() + 1e-12).all())
    assert 0.05 < float(1 - mass.mean()) < 0.95  # it does drop something
    share = kept(module.select(q, k), q, k, causal=causal)
    assert share.mass == pytest.approx(float(mass.mean()), abs=1e-12)
    every = torch.ones(N, N).tril().sum() if causal else N * N
    assert share.pairs == pytest.approx(float(seen.sum() / (B * H * every)), abs=1e-6)


@pytest.mark.parametrize("text", BY_QUERY)
def test_no_later_token_changes_what_a_query_chooses(text: str) -> None:
    module, (q, k, _) = made(text), draw()
    before = module.select(q, k).pairs(slice(0, N))
    for t in (0, 7, 23, N - 2):
        later = [torch.cat((x[:, :, : t + 1], 3 * x[:, :, t + 1 :].flip(2)), 2) for x in (q, k)]
        assert torch.equal(module.select(*later).pairs(slice(0, N))[:, :, : t + 1], before[:, :, : t + 1])


@pytest.mark.parametrize(("text", "block"), BY_BLOCK.items())
def test_no_token_behind_a_block_changes_what_it_chooses(text: str, block: int) -> None:
    module, (q, k, _) = made(text), draw()
    before = module.select(q, k).pairs(slice(0, N))
    for t in range(block - 1, N - 1, block):
        later = [torch.cat((x[:, :, : t + 1], 3 * x[:, :, t + 1 :].flip(2)), 2) for x in (q, k)]
        assert torch.equal(module.select(*later).pairs(slice(0, N))[:, :, : t + 1], before[:, :, : t + 1])


@pytest.mark.parametrize("text", [text for text in CHOOSING if text not in BY_QUERY])
def test_what_says_that_it_reads_ahead_does(text: str) -> None:
    module, (q, k, _) = made(text), draw()
    before = module.select(q, k).pairs(slice(0, N))
    moved = 0
    for t in range(N - 1):
        later = [torch.cat((x[:, :, : t + 1], 9 * x[:, :, t + 1 :].flip(2)), 2) for x in (q, k)]
        moved += not torch.equal(module.select(*later).pairs(slice(0, N))[:, :, : t + 1], before[:, :, : t + 1])
    assert moved


@pytest.mark.parametrize(
    ("text", "option", "values"),
    [
        ("moba:block=5", "blocks", [1, 2, 4, 9]),
        ("oracle-blocks:block=5", "blocks", [1, 2, 4, 9]),
        ("msa:block=5,index_dim=4", "blocks", [1, 2, 4, 9]),
        ("xattention:block=6,stride=3", "threshold", [0.1, 0.4, 0.7, 1.0]),
        ("flexprefill:block=4,least=0,distance=0", "mass", [0.1, 0.4, 0.7, 1.0]),
        ("flexprefill:block=4,least=0,distance=1", "mass", [0.1, 0.4, 0.7, 1.0]),
        ("flexprefill:block=4,mass=0.1,distance=0", "least", [0, 8, 20, 48]),
        ("flexprefill:block=4,mass=0.1,distance=1", "least", [0, 8, 20, 48]),
        ("minference:block=4,vertical=4,first=1,recent=1,last=3", "slash", [1, 3, 9, 45]),
        ("minference:block=4,slash=2,first=1,recent=1,last=3", "vertical", [0, 4, 20, 45]),
        ("sparge:queries=4,keys=2,similarity=0.3", "threshold", [0.1, 0.4, 0.7, 1.0]),
    ],
)
@both
def test_a_larger_budget_keeps_all_that_a_smaller_one_keeps(
    text: str, option: str, values: list[float], causal: bool
) -> None:
    q, k, _ = draw()
    seen = [made(text, causal, **{option: value}).select(q, k).pairs(slice(0, N)) for value in values]
    for fewer, more in pairwise(seen):
        assert bool((fewer <= more).all())
    visible = torch.ones(N, N, dtype=torch.bool)
    assert torch.equal(seen[-1], (visible.tril() if causal else visible).expand_as(seen[-1]))
    assert not torch.equal(seen[0], seen[-1])


@both
def test_moba_is_a_loop_over_tokens(causal: bool) -> None:
    n, block, count = 22, 4, 3
    (q, k, v), out = draw(n), torch.zeros(B, H, n, D, dtype=F64)
    for b in range(B):
        for h in range(H):
            for i in range(n):
                own = i // block
                gates = []
                for start in range(0, n, block):
                    J = start // block
                    if own != J and (own > J or not causal):
                        keys = k[b, h, start : start + block]
                        gates.append((-sum(float(q[b, h, i] @ x) for x in keys) / len(keys), J))
                chosen = {own} | {J for _, J in sorted(gates)[: count - 1]}
                keys = [j for j in range(n) if j // block in chosen and (j <= i or not causal)]
                logits = [float(q[b, h, i] @ k[b, h, j]) / D**0.5 for j in keys]
                weights = torch.tensor([x - max(logits) for x in logits], dtype=F64).exp()
                for j, weight in zip(keys, weights / weights.sum(), strict=True):
                    out[b, h, i] += weight * v[b, h, j]
    torch.testing.assert_close(made("moba:block=4,blocks=3", causal, n)(q, k, v), out, rtol=0, atol=1e-12)


def test_minference_meets_a_planted_column_and_a_planted_diagonal() -> None:
    n, module = 64, made("minference:block=4,vertical=2,first=0,slash=2,recent=1,last=8", n=64)
    q, k, _ = (x[:1, :1] * 0.01 for x in draw(n, d=D))
    k[:, :, 21] = 100 * torch.ones(D, dtype=F64)
    q += 1.0
    seen = module.select(q, k).pairs(slice(0, n))
    assert bool(seen[0, 0, 21:, 21].all())
    assert not bool(seen[0, 0, 40, 20] | seen[0, 0, 40, 22])  # a column is one key wide


def test_sparge_computes_whatever_does_not_stand_for_its_tokens() -> None:
    n = 64
    module = made("sparge:queries=8,keys=8,similarity=0.6,threshold=0.01,smooth_k=false", n=n)
    q, k = torch.ones(1, 1, n, D, dtype=F64), torch.ones(1, 1, n, D, dtype=F64)
    k[:, :, 8:16] *= (-1.0) ** torch.arange(8, dtype=F64)[:, None]
    seen = module.select(q, k).pairs(slice(0, n))[0, 0]
    assert bool(seen[16:, 8:16].all())
    assert seen[40].nonzero()[:, 0].tolist() == [*range(16)]  # of the others the first of equal masses alone
    q[:, :, 40:48] *= (-1.0) ** torch.arange(8, dtype=F64)[:, None]
    seen = module.select(q, k).pairs(slice(0, n))[0, 0]
    assert bool(seen[40, :41].all())
    assert seen[48].nonzero()[:, 0].tolist() == [*range(16)]


EXPECTED = {
    "moba:block=64,blocks=4": {0.5: (0.514, 0.56, 0.39), 1: (0.542, 0.58, 0.39), 2: (0.726, 0.64, 0.39)},
    "oracle-blocks:block=64,blocks=4": {0.5: (0.514, 0.56, 0.39), 1: (0.547, 0.59, 0.39), 2: (0.196, 0.87, 0.39)},
    "xattention:block=64,stride=8,threshold=0.9": {
        0.5: (0.024, 1.00, 0.99),
        1: (0.041, 0.99, 0.98),
        2: (0.120, 0.98, 0.97),
    },
}
"""Relative error, kept mass and share of the triangle at n = 1024 and D = 64, of Gaussian queries and keys that are so
many times as large; computed once by other code, with other draws."""


def gaussian(scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1024, 64, dtype=F64, generator=generator) for _ in "qkv")
    return [q * scale, k * scale, v]


@cache
def exact(scale: float) -> Tensor:
    return exact_attention(*gaussian(scale), causal=True)


def added_afterwards(threshold: float, masses: Tensor, allowed: Tensor, forced: Tensor) -> Tensor:
    """The first and the own block beside as many as hold the share without them, as that code had it."""
    return heaviest(masses, threshold, allowed=allowed, forced=torch.zeros_like(allowed)) | (forced & allowed)


@pytest.mark.independent
@pytest.mark.parametrize("text", EXPECTED)
@pytest.mark.parametrize("scale", [0.5, 1, 2])
def test_on_gaussian_inputs_error_and_kept_mass_are_those_that_were_computed_elsewhere(
    text: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = gaussian(scale)
    module = built(BlockSelecting, text, Shape(1, 4, 1024, 64, causal=True))
    if isinstance(module, XAttention):
        monkeypatch.setattr(module, "keep", partial(added_afterwards, module.threshold))
    share = kept(module.select(q, k), q, k, causal=True)
    found = relative_error(module(q, k, v), exact(scale)), share.mass, share.pairs
    error, mass, pairs = EXPECTED[text][scale]
    spread = 0.03 if scale == 2 else 0.012  # one draw: that one block of queries drops a block or not makes .008
    assert found[1:] == (pytest.approx(mass, abs=spread), pytest.approx(pairs, abs=spread))
    assert found[0] == pytest.approx(error, abs=0.1 if scale == 2 else 0.04)


def test_the_first_and_the_own_block_count_among_those_that_hold_the_share() -> None:
    """Small logits: every tile of a row has the same mass. Block of queries I then has I blocks and a half (and a bit:
    of 64 queries' tiles on the diagonal, 36), of which one may be left out where it is a tenth or less: from I = 10 on.
    """
    q, k, _ = gaussian(1e-3)
    module = built(BlockSelecting, "xattention:block=64,stride=8,threshold=0.9", Shape(1, 4, 1024, 64, causal=True))
    dropped = 6 * 64 * 64 / (1024 * 1025 / 2)
    assert kept(module.select(q, k), q, k, causal=True).pairs == pytest.approx(1 - dropped, abs=1e-9)


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_sparge_asks_whether_keys_are_alike_without_what_all_keys_share(offset: float) -> None:
    q, k = torch.ones(1, 1, 64, D, dtype=F64), torch.randn(1, 1, 64, D, dtype=F64)
    text = "sparge:queries=8,keys=8,similarity=0.6,threshold=0.5"
    found = [
        made(f"{text},smooth_k={one}", False, n=64).select(q, k + offset).pairs(slice(0, 64))
        for one in ("true", "false")
    ]
    assert bool(found[0].all())  # no eight Gaussian keys are alike
    assert bool(found[1].all()) == (offset == 0)


def test_sparge_stays_within_its_share_and_keeps_no_block_for_its_place() -> None:
    """Eight blocks of four equal keys, whose masses for every query are 1/2, 1/4 and less: two are within 0.8."""
    masses = torch.tensor([1 / 64, 1 / 2, 1 / 64, 1 / 4, 1 / 8, 1 / 32, 1 / 32, 1 / 32], dtype=F64)
    q, k = torch.zeros(1, 1, 32, D, dtype=F64), torch.zeros(1, 1, 32, D, dtype=F64)
    q[..., 0], k[..., 0] = 1.0, (masses.log() * D**0.5).repeat_interleave(4)
    text = "sparge:queries=4,keys=4,similarity=0,threshold=0.8"
    within, holding = (
        made(f"{text},rule={rule}", False, n=32).select(q, k).pairs(slice(0, 32))[0, 0, ::4, ::4]
        for rule in ("within", "holding")
    )
    few = made("sparge:queries=4,keys=4,similarity=0,threshold=0.3", False, n=32).select(q, k).pairs(slice(0, 32))
    assert [row.nonzero()[:, 0].tolist() for row in few[0, 0, ::4, ::4]] == [[1]] * 8  # the first in any case
    assert [row.nonzero()[:, 0].tolist() for row in within] == [[1, 3]] * 8
    assert [row.nonzero()[:, 0].tolist() for row in holding] == [
        sorted({1, 3, own, *extra})
        for own, extra in ((0, [4]), (1, [4]), (2, [4]), (3, [4]), (4, []), (5, [4]), (6, [4]), (7, [4]))
    ]
