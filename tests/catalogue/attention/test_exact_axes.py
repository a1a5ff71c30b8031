"""Every combination of the axes in each exact variant, forward and backward, beside the formula."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.catalogue.attention.exact import sdpa
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.flex.flex_attention import FlexKernel, Mod
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from tests.compilers import compiles
from tests.pairwise import covering

B, H, N, D = 2, 4, 140, 4  # flex has two blocks of 128 queries
START = 30
MASKS = ("none", "prefix:50", "document:17+40", "sliding:9")
EXACT = ("softmax", "sdpa", "sdpa:backend=math", "chunked:query_chunk=32,key_chunk=48", "flex")

Case = tuple[str, bool, int, int, int, str, str, bool]
"""Mask, causality, q_start, kv_heads, v_dim, bias, sink, and whether keys are padded."""

EVERY: list[Case] = [
    case
    for case in product(
        MASKS, (False, True), (0, START), (4, 2, 1), (D, 7), ("none", "alibi", "relative"), ("none", "learned"), (0, 1)
    )
    if not (case[2] and not case[1] and case[0] == "none")  # without places nothing has a first place
    and not (case[0].startswith("prefix") and not case[1])  # a prefix is causal behind its end
]
SOME = covering(EVERY)


def shape_of(case: Case) -> Shape:
    mask, causal, start, kv_heads, v_dim, bias, sink, _ = case
    return Shape(
        B,
        H,
        N,
        D,
        causal=causal,
        bias=bias,
        kv_heads=kv_heads,
        v_dim=v_dim,
        mask=mask,
        q_start=start,
        sink=sink,  # type: ignore[arg-type]  # words of a list
    )


def sees(shape: Shape) -> Tensor:
    """``(N, M)``, each kind of mask by its definition."""
    i, j = torch.arange(shape.M)[shape.q_start :, None], torch.arange(shape.M)
    seen = j <= i if shape.causal else torch.ones(shape.N, shape.M, dtype=torch.bool)
    kind, _, size = shape.mask.partition(":")
    if kind == "prefix":
        return seen | (j < int(size))
    if kind == "sliding":
        return seen & ((i - j).abs() < int(size))
    if kind == "document":
        document = torch.tensor([17, 57, 74, 114, 131, 171])
        return seen & (torch.bucketize(i, document, right=True) == torch.bucketize(j, document, right=True))
    return seen


def formula(module: Any, shape: Shape, given: tuple[Tensor, Tensor, Tensor], real: Tensor | None) -> Tensor:
    """Sums of exponentials in float64, with shared keys repeated."""
    q, k, v = given[0], *(x.repeat_interleave(shape.G, 1) for x in given[1:])
    logits = q @ k.mT / D**0.5
    if module.position_bias is not None:
        places = slice(shape.q_start, shape.q_start + shape.N)
        logits = logits + module.position_bias(places, slice(0, shape.M), torch.float64)
    allowed = sees(shape) if real is None else sees(shape) & real[:, None, None]
    weights = logits.exp() * allowed
    total = weights.sum(-1, keepdim=True)
    if module.sink is not None:
        total = total + module.sink.logit.exp()[:, None, None]
    return weights @ v / total.where(allowed.any(-1, keepdim=True), 1.0)


def by_pairs(
    kernel: FlexKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Callable[[], BlockMask],
    *,
    pairs: int,
    learned: bool,
    score_mod: Mod | None = None,
) -> Tensor:
    """What FlexAttention computes of its blocks and functions, in torch's own operations, so that it has gradients."""
    made, M = blocks(), k.shape[2]
    b, h, i, j = torch.meshgrid(*map(torch.arange, (*q.shape[:3], M)), indexing="ij")
    asked, full = torch.zeros(2, *b.shape, dtype=torch.bool)
    assert made.full_kv_num_blocks is not None
    assert made.full_kv_indices is not None
    for kind, counts, indices in (
        (asked, made.kv_num_blocks, made.kv_indices),
        (full, made.full_kv_num_blocks, made.full_kv_indices),
    ):
        for row in range(counts.shape[2]):
            for block in indices[0, 0, row, : counts[0, 0, row]].tolist():
                kind[:, :, 128 * row : 128 * row + 128, 128 * block : 128 * block + 128] = True
    assert not (asked & full).any()
    assert (asked | full)[0].sum() == pairs
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[3] ** 0.5
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    seen = full | (asked & made.mask_mod(b, h, i, j))
    return scores.masked_fill(~seen, -1e300).softmax(-1) @ v


def padded() -> Tensor:
    """Half of the keys of the first example, and the first ones of the second, which some queries do not see."""
    real = torch.rand(B, N + START) < 0.5
    real[1] = torch.arange(N + START) > 60
    return real


def holds(text: str, case: Case) -> None:
    shape = shape_of(case)
    real = padded()[:, : shape.M] if case[-1] else None
    module = build(text, shape).double()
    q = torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(B, shape.K, shape.M, width, dtype=torch.float64, requires_grad=True) for width in (D, shape.E))
    learned = (q, k, v, *module.parameters())
    output, expected = module(q, k, v, key_mask=real), formula(module, shape, (q, k, v), real)
    torch.testing.assert_close(output, expected)
    grad = torch.randn_like(expected)
    for found, wanted in zip(
        torch.autograd.grad(output, learned, grad), torch.autograd.grad(expected, learned, grad), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_these_are_the_exact_variants() -> None:
    assert {parse_spec(text).name for text in EXACT} == {one.name for one in VARIANTS if one.traits.exact}


@pytest.fixture
def _by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_ROWS", 50)
    monkeypatch.setattr(FlexKernel, "__call__", by_pairs)


@pytest.mark.usefixtures("_by_parts")
@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize("text", EXACT)
def test_axes_that_meet_two_by_two_give_the_formula_and_its_gradients(text: str, case: Case) -> None:
    holds(text, case)


@pytest.mark.slow
@pytest.mark.usefixtures("_by_parts")
@pytest.mark.parametrize("text", EXACT)
def test_all_axes_together_give_the_formula_and_its_gradients(text: str) -> None:
    for case in EVERY:
        holds(text, case)


@compiles
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        ("none", False, 0, 2, 7, "none", "learned", 0),
        ("none", True, START, 1, 7, "alibi", "learned", 1),
        ("sliding:9", True, START, 2, D, "relative", "learned", 1),
        ("document:17+40", False, 0, 2, D, "alibi", "none", 1),
    ],
    ids=str,
)
@torch.no_grad()
def test_compiled_kernels_take_sinks_and_shared_keys_as_well(case: Case) -> None:
    shape = shape_of(case)
    module, real = build("flex", shape), padded()[:, : shape.M] if case[-1] else None
    q, k, v = torch.randn(B, H, N, D), torch.randn(B, shape.K, shape.M, D), torch.randn(B, shape.K, shape.M, shape.E)
    expected = formula(module.double(), shape, (q.double(), k.double(), v.double()), real)
    torch.testing.assert_close(module.float()(q, k, v, key_mask=real), expected.float())


@compiles
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@torch.no_grad()
def test_a_compiled_step_sees_the_sink_in_front_of_the_cache() -> None:
    shape = Shape(B, H, N, D, causal=True, kv_heads=2, bias="alibi", sink="learned")
    module, (q, k, v) = build("flex", shape), (torch.randn(B, heads, N, D) for heads in (H, 2, 2))
    expected = formula(module.double(), shape, (q.double(), k.double(), v.double()), None).float()
    module, state = module.float(), module.begin(*(x[:, :, :124] for x in (q, k, v)))
    for t in range(124, N):  # from one block of the cache to the next
        output, state = module.step(state, *(x[:, :, t : t + 1] for x in (q, k, v)))
        torch.testing.assert_close(output, expected[:, :, t : t + 1])
