"""Sequences of unequal length in one decoding step, and a cache in pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import rolled_back, taken
from attnbench.catalogue.engines.decoding.pages import Paged
from attnbench.catalogue.engines.decoding.unequal import joined
from attnbench.contract.problem.padding import real_tokens
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws.laws import Case, cases
from attnbench.measure.memory import state_bytes
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.models.encoder import MultiHead, as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, ModelSize

SHAPE = Shape(batch=4, heads=4, kv_heads=2, seq_len=24, head_dim=8, causal=True)
ENDS = real_tokens(4, 24, 0.5)
CACHED = ("softmax", "sdpa", "sdpa:backend=math", "sdpa:page=5", "chunked:query_chunk=5,key_chunk=7")


def drawn(shape: Shape = SHAPE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape.H, shape.D), (shape.K, shape.D), (shape.K, shape.E))
    return [torch.randn(shape.B, heads, shape.N, width, generator=generator).double() for heads, width in sizes]


def begun(module: Any, inputs: Sequence[Tensor], ends: Sequence[int]) -> Any:
    each = [module.begin(*(x[row : row + 1, ..., :end, :] for x in inputs)) for row, end in enumerate(ends)]
    return joined(module, each)


def at(inputs: Sequence[Tensor], ends: Sequence[int], count: int) -> list[Tensor]:
    """The ``count`` tokens of each sequence from its end on."""
    return [torch.stack([x[row, ..., end : end + count, :] for row, end in enumerate(ends)]) for x in inputs]


@pytest.mark.parametrize("sink", ["none", "learned"])
@pytest.mark.parametrize(
    ("variant", "several"), [(one, count) for one in CACHED for count in (1, 3) if count == 1 or one[:4] != "chun"]
)
def test_each_sequence_gets_the_output_of_its_own_tokens(variant: str, several: int, sink: Any) -> None:
    module, inputs = build(variant, replace(SHAPE, sink=sink), seed=0).double(), drawn()
    ends = [end - several for end in ENDS]
    with torch.no_grad():
        out, _ = taken(module, begun(module, inputs, ends), *at(inputs, ends, several))
        expected = at([module(*inputs)], ends, several)[0]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_tiles_of_unequal_sequences_take_one_token() -> None:
    module, inputs = build("chunked", SHAPE, seed=0).double(), drawn()
    state = begun(module, inputs, [1, 5, 9, 13])
    with pytest.raises(Unsupported, match="take one token; remove new_tokens or padding"):
        taken(module, state, *at(inputs, [1, 5, 9, 13], 2))


@pytest.mark.parametrize("variant", ["sdpa", "sdpa:page=5"])
def test_drafts_of_unequal_sequences_are_cut_off(variant: str) -> None:
    module, inputs, ends = build(variant, SHAPE, seed=0).double(), drawn(), [0, 4, 9, 16]
    with torch.no_grad():
        before = begun(module, inputs, ends)
        wrong = [torch.cat((x, 3 * y), 2) for x, y in zip(at(inputs, ends, 2), at(inputs, ends, 3), strict=True)]
        _, after = taken(module, before, *wrong)
        state = rolled_back(module, before, after, *at(inputs, ends, 2), of=5)
        out, _ = module.step(state, *at(inputs, [end + 2 for end in ends], 1))
        expected = at([module(*inputs)], [end + 2 for end in ends], 1)[0]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert state.cache.k.data_ptr() == after.cache.k.data_ptr()


@pytest.mark.parametrize("variant", ["softmax", "sdpa", "sdpa:page=5"])
def test_sequences_outgrow_their_room(variant: str) -> None:
    inputs = drawn()
    module, ends = build(variant, replace(SHAPE, seq_len=8), seed=0).double(), [1, 2, 5, 7]
    whole = build("softmax", SHAPE, seed=0).double()
    with torch.no_grad():
        state, expected = begun(module, inputs, ends), whole(*inputs)
        for step in range(12):
            here = [end + step for end in ends]
            out, state = module.step(state, *at(inputs, here, 1))
            torch.testing.assert_close(out, at([expected], here, 1)[0], rtol=1e-10, atol=1e-12)


# The pool


def test_pages_lie_in_no_order_and_belong_to_one_sequence() -> None:
    _, k, v = drawn()
    paged = Paged.of(k, v, 24, 5)
    numbers = paged.table.flatten().tolist()
    assert sorted(numbers) == list(range(4 * 5))
    assert all(row != sorted(row) for row in paged.table.tolist())
    assert all(torch.equal(*both) for both in ((paged.keys, k), (paged.values, v)))


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (4, 4), (5, 8), (9, 12)])
def test_a_state_has_the_bytes_of_its_pages_and_its_table(tokens: int, pages: int) -> None:
    _, k, v = (x[:, :, :tokens] for x in drawn())
    assert state_bytes(Paged.of(k, v, 24, 4)) == pages * 2 * 2 * 4 * 8 * 8 + 4 * 6 * 8


def test_unequal_sequences_hold_the_pages_of_their_own_tokens() -> None:
    module, ends = build("sdpa:page=4", SHAPE, seed=0).double(), [1, 4, 5, 20]
    found = state_bytes(begun(module, drawn(), ends))
    assert found == (1 + 1 + 2 + 5) * 2 * 2 * 4 * 8 * 8 + 4 * 6 * 8 + 4 * 8


# Every variant

CACHE = "its step reads a cache in which all sequences have one length"
COUNTS = "its state counts the tokens of all sequences alike"
SIZE = "its state has another size after other tokens"
OF_ONE_LENGTH = (
    *("mla", "quantised-cache", "oracle-topk", "noise", "rwwn", "local", "streaming", "sparse", "graph", "per-head"),
    *("reformer", "sinkhorn", "topk", "indexed", "nsa", "expected-attention", "h2o", "keydiff", "knorm", "quest"),
    *("snapkv", "tova", "moba", "msa", "monotonic", "hyperattention", "additive", "differential", "fox", "path"),
    *("deltaformer", "parallax", "csa", "hca", "memory-compressed", "synthesizer", "location", "gmlp", "long-conv"),
    *("hyena", "aft", "kernel:order=dense"),
)
REFUSED = {
    **dict.fromkeys(OF_ONE_LENGTH, CACHE),
    **dict.fromkeys(("mean-value", "cosformer", "retnet", "log-linear", "linear:rotary=true"), COUNTS),
    **dict.fromkeys(("aft:mode=local,window=3", "aft:mode=simple", "aft:mode=conv"), COUNTS),
    **dict.fromkeys(("aft:mode=local,window=9", "pooling:pool=15"), SIZE),
}
"""Variants, or settings of them, whose decoding step takes one length, and the reason. Of two the longer one counts."""


def reason(case: Case) -> str:
    """The reason why two sequences of unequal length have no state together; empty if they have one."""
    try:
        begun(case.module(), case.draw(), [4, 21])
    except Unsupported as why:
        return str(why)
    return ""


def expected(case: Case) -> str:
    options = set(dict(case.spec.options).items())
    found = [one for one in map(parse_spec, REFUSED) if one.name == case.spec.name and options >= {*one.options}]
    return REFUSED[max(map(str, found), key=len)] if found else ""


DECODING = [entry.name for entry in VARIANTS if entry.traits.decode and not entry.traits.compiled]


@pytest.mark.parametrize("name", DECODING)
def test_a_step_takes_unequal_lengths_or_says_why_not(name: str) -> None:
    """The law "unequal lengths" holds those that have a state to what each sequence gets alone."""
    asked = [case for case in cases(VARIANTS.get(name)) if case.causal and case.traits.decode and _possible(case)]
    assert asked
    for case in asked:
        found, wanted = reason(case), expected(case)
        assert (bool(found), wanted in found) == (bool(wanted), True), (str(case), found)


def _possible(case: Case) -> bool:
    try:
        case.module()
    except Unsupported:
        return False
    return True


# In cells


def cell(variant: str, **changes: Any) -> Cell:
    shape = replace(SHAPE, kv_heads=changes.pop("kv_heads", None), batch=changes.pop("batch", 4))
    return Cell("s", "w", parse_spec(variant), shape, **{"pass_": "decode", "padding": 0.5, **changes})


def measured(asked: Cell) -> Record:
    record, _ = run_cell(VisitCell(asked, TimingRules(quick=True), 0))
    return record


@pytest.mark.parametrize("several", [0, 3])
@pytest.mark.parametrize("variant", ["softmax", "sdpa", "sdpa:page=4", "linear", "gla"])
def test_a_row_of_unequal_lengths(variant: str, several: int) -> None:
    record = measured(cell(variant, new_tokens=several))
    assert (record.status, record.reason, record.warnings) == (Status.OK, "", "")
    assert record.tokens_per_s == pytest.approx(4 * (several or 1) / (record.time_median_s or 0))
    held = (record.state_bytes or 0) / (sum(ENDS) - 4 * (several or 1))
    assert record.state_bytes_per_token == pytest.approx(held)
    assert (record.rollback_s is None) is (not several)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("variant", ["sdpa", "sdpa:page=4", "linear"])
def test_the_tokens_of_a_step_are_the_last_ones_of_each_sequence(variant: str, kv_heads: int | None) -> None:
    asked = cell(variant, new_tokens=2, dtype="float64", kv_heads=kv_heads)
    whole = replace(asked, pass_="forward", new_tokens=0, padding=0.0)
    found, expected = (prepare(one).on(0)() for one in (asked, whole))
    torch.testing.assert_close(found, at([expected], [end - 2 for end in ENDS], 2)[0], rtol=1e-9, atol=1e-10)


def test_a_row_of_a_cache_that_forgets_the_shorter_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are held to the formula: here it sees what lies behind the end of a sequence."""
    from attnbench.catalogue.engines.decoding.kv_cache import Unequal

    def all_of_them(state: Unequal, rows: int) -> Tensor:
        return torch.ones(len(state.lengths), 1, rows, state.cache.length, dtype=torch.bool)

    monkeypatch.setattr(Unequal, "seen", all_of_them)
    found = [measured(cell("sdpa", dtype="float64")) for _ in range(8)]  # the longest sequence alone would be right
    assert any("off by" in record.reason for record in found)


@pytest.mark.parametrize("variant", ["sdpa", "softmax", "gla", "gated-softmax"])
def test_a_layer_has_a_step_of_unequal_lengths(variant: str) -> None:
    module = as_layer(variant, replace(SHAPE, kv_heads=None)).double()
    x = torch.randn(4, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = [end - 1 for end in ENDS]
    with torch.no_grad():
        out, _ = cast(Any, module).step(begun(module, [x], ends), *at([x], ends, 1))
        torch.testing.assert_close(out, at([module(x)], ends, 1)[0], rtol=1e-10, atol=1e-12)
    assert isinstance(module, MultiHead) is (variant in ("sdpa", "softmax"))
    assert measured(cell(variant, level="layer")).status is Status.OK


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (cell("sdpa", batch=1), "a single sequence has no unequal lengths; write batch: 2 or more"),
        (cell("sdpa", new_tokens=4), "4 in one step are more than the 3 of the shortest sequence; write fewer"),
        (cell("sdpa", pass_="stepwise"), "all sequences have one length; remove it, or write pass: decode"),
        (cell("sdpa", pass_="generate"), "all sequences have one length; remove it, or write pass: decode"),
        (cell("topk:keys=4"), "padding: its step reads a cache in which all sequences have one length; remove"),
        (cell("local:window=4"), "padding: its step reads a cache in which all sequences have one length; remove"),
        (cell("retnet"), "padding: its state counts the tokens of all sequences alike; remove padding"),
        (cell("sdpa", level="layer", positions="rotary"), "counts the tokens of all sequences alike; remove padding"),
        (
            cell("sdpa", level="model", architecture="decoder", model=ModelSize(1, 8, 5)),
            "a model's step has one place for all sequences; write level: operator or layer",
        ),
        (
            replace(cell("sdpa"), shape=replace(SHAPE, bias="alibi")),
            "takes no bias with unequal lengths; remove bias or padding",
        ),
        (
            replace(cell("softmax"), shape=replace(SHAPE, mask="sliding:4")),
            "takes no mask with unequal lengths; remove mask or padding",
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_the_remedy(asked: Cell, said: str) -> None:
    with pytest.raises(Unsupported, match=said) as refused:
        prepare(asked)
    assert "\n" not in str(refused.value)
