"""Documents end to end in one sequence: the calls that are made of them, their cost, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.documents import ByDocuments
from attnbench.contract.problem.mask import mask_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import draw_reads
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.harness.inside.call import prepare
from attnbench.laws.own_error import measure_own_error
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.suite.cell import Cell, Pass

SHAPE = Shape(batch=2, heads=2, seq_len=23, head_dim=4, causal=True)


class Remembering(nn.Module):
    """Running sums, and the sizes and masks that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, ...]] = []
        self.masks: list[Tensor | None] = []

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        self.calls.append(tuple(x.shape))
        self.masks.append(key_mask)
        return x.cumsum(-2)


@pytest.mark.parametrize("masked", [False, True])
def test_documents_of_one_length_are_rows_of_one_call(masked: bool) -> None:
    x, real = torch.randn(2, 3, 23, 5), torch.arange(23) % 3 > 0
    inside = Remembering()
    out = ByDocuments(inside, mask_of("document:5+4+5+9"), padded=False)(x, key_mask=real[None] if masked else None)
    assert inside.calls == [(4, 3, 5, 5), (2, 3, 4, 5), (2, 3, 9, 5)]
    assert torch.equal(out, torch.cat([one.cumsum(2) for one in x.split([5, 4, 5, 9], 2)], 2))
    if masked:
        wanted = [torch.stack([real[:5], real[9:14]]), real[None, 5:9], real[None, 14:]]
        assert all(torch.equal(one, other) for one, other in zip(inside.masks, wanted, strict=True))
    else:
        assert inside.masks == [None] * 3


def test_padded_documents_are_rows_of_one_call_with_a_key_mask() -> None:
    x, inside = torch.randn(1, 23, 5), Remembering()
    out = ByDocuments(inside, mask_of("document:5+4+5+9"), padded=True)(x)
    assert inside.calls == [(4, 9, 5)]
    assert inside.masks[0] is not None
    assert inside.masks[0].sum(1).tolist() == [5, 4, 5, 9]
    assert torch.equal(out, torch.cat([one.cumsum(1) for one in x.split([5, 4, 5, 9], 1)], 1))


def test_a_sequence_of_another_length_has_the_same_documents_again_and_cuts_the_last_one_off() -> None:
    inside = Remembering()
    ByDocuments(inside, mask_of("document:5+4"), padded=False)(torch.randn(1, 12, 5))
    assert inside.calls == [(1, 5, 5), (1, 4, 5), (1, 3, 5)]


@pytest.mark.parametrize("mask", ["document:64", "document:ragged", "padded:64"])
@pytest.mark.parametrize("text", ["linear", "gated-delta", "local", "topk", "fox"])
def test_a_pair_of_two_documents_costs_nothing(text: str, mask: str) -> None:
    n = 2048
    level = "layer" if VARIANTS.get(text).kind == "mixer" and VARIANTS.get(text).core is None else "operator"
    whole = Shape(batch=1, heads=1, seq_len=n, head_dim=16, causal=True)
    packed = replace(whole, mask=mask)
    reads = VARIANTS.get(text).at(level).traits.reads
    inputs = [torch.randn(1, n, 16)] if level == "layer" else list(torch.randn(3, 1, 1, n, 16))
    inputs += draw_reads(reads, whole, 0)
    with torch.inference_mode():
        made = [build(text, shape, level=level) for shape in (packed, whole)]
        some, every = (count(lambda one=one: one(*inputs)).matmul_flops for one in made)
        peak = peak_tensor_bytes(lambda: made[0](*inputs))
    assert some <= 1.2 * every  # chunks that documents do not fill
    if mask != "document:ragged":
        assert peak is not None
        assert peak < n**2  # bytes: a mask of all pairs alone would have as many


@pytest.mark.parametrize("text", ["linear", "linear:chunk=5", "local:window=3", "retnet", "performer:features=16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["document", "padded"])
def test_heads_that_share_keys_read_each_document_alone(text: str, causal: bool, way: str) -> None:
    whole = replace(SHAPE, heads=4, kv_heads=2, causal=causal)
    q, k, v = (torch.randn(2, heads, 23, 4, dtype=torch.float64) for heads in (4, 2, 2))
    out = build(text, replace(whole, mask=f"{way}:5+4+5+9")).double()(q, k, v)
    alone = build(text, whole).double()
    parts = zip(*(x.split([5, 4, 5, 9], 2) for x in (q, k, v)), strict=True)
    torch.testing.assert_close(out, torch.cat([alone(*part) for part in parts], 2))


def test_bfloat16_and_layers_and_models_take_documents() -> None:
    for level in ("layer", "model"):
        for name in ("gated-delta", "linear"):
            shape = replace(SHAPE, mask="document:ragged", batch=1)
            cell = Cell("x", "s", Spec(name), shape, level=level, dtype="bfloat16", pass_="training")  # type: ignore[arg-type]
            prepare(cell).run()


@pytest.mark.parametrize(
    ("text", "shape", "pass_", "words"),
    [
        ("linformer", {"mask": "document:ragged"}, "forward", "mask: it mixes tokens before a query meets them"),
        ("nystrom", {"mask": "document:ragged"}, "forward", "mask: it mixes tokens before a query meets them"),
        ("bigbird", {"mask": "document:ragged"}, "forward", "mask: random blocks are drawn for the length"),
        ("sta", {"mask": "padded:ragged"}, "forward", "key padding: where a window is clamped"),
        ("per-head:parts=local+nystrom", {"mask": "document:9"}, "forward", "mask: nystrom: it mixes tokens"),
        ("flex:window=4", {"mask": "document:9"}, "forward", "mask: its window is a mask"),
        ("linear", {"mask": "document:9"}, "decode", "mask: .* no step or later query continues; remove the mask"),
        ("sdpa", {"mask": "padded:9"}, "generate", "mask: .* no step or later query continues; remove the mask"),
        ("linear", {"mask": "document:9", "q_start": 3}, "forward", "mask: .* no step or later query continues"),
        ("linear", {"mask": "prefix:9"}, "forward", "mask: not built here: all queries read one running sum or state"),
    ],
)
def test_what_cannot_have_documents_says_why(text: str, shape: dict[str, Any], pass_: Pass, words: str) -> None:
    causal = bool(VARIANTS.get(parse_spec(text).name).traits.causal)
    with pytest.raises(Unsupported, match=words):
        prepare(Cell("x", "s", parse_spec(text), replace(SHAPE, causal=causal, **shape), pass_=pass_))


def test_the_own_error_is_that_of_each_document() -> None:
    cell = Cell("x", "s", Spec("gla"), replace(SHAPE, mask="document:ragged"))
    found = measure_own_error(cell)
    assert found.output is not None
    assert found.grad is not None
    assert max(found.output, found.grad) < 1e-5
