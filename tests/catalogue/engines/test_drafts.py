"""Several tokens in one step, the way back, and states in few bits: what is computed, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import NarrowState, rolled_back, taken
from attnbench.contract.capabilities import Decoding
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import draw_reads
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws.own_error import measure_own_error
from attnbench.measure.memory import state_bytes
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.models.decoder import Decoder
from attnbench.models.encoder import as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, Level, ModelSize, Pass

SHAPE = Shape(batch=2, heads=4, kv_heads=2, seq_len=21, head_dim=8, causal=True)


def inputs_of(variant: str, shape: Shape = SHAPE) -> list[Tensor]:
    spec = parse_spec(variant)
    reads = VARIANTS.get(spec.name).at("operator").claims(spec, causal=True).reads
    return [x.double() for x in (*draw_qkv(Spec("gaussian"), shape, 0), *draw_reads(reads, shape, 0))]


@pytest.mark.parametrize("mask", ["none", "sliding:5", "document:4+9"])
@pytest.mark.parametrize("change", [{}, {"bias": "alibi"}, {"sink": "learned"}])
@pytest.mark.parametrize("variant", ["softmax", "sdpa", "chunked:query_chunk=4,key_chunk=5"])
def test_exact_variants_hide_what_the_shape_hides_from_each_of_several_tokens(
    variant: str, change: dict[str, str], mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnbench.catalogue.attention.exact.sdpa._ROWS", 4)
    shape = replace(SHAPE, mask=mask, **change)  # type: ignore[arg-type]  # the values are those of the fields
    module, inputs = build(variant, shape, seed=0).double(), inputs_of(variant)
    with torch.no_grad():
        expected = module(*inputs)
        state = cast(Decoding, module).begin(*(x[:, :, :6] for x in inputs))
        found, _ = taken(module, state, *(x[:, :, 6:] for x in inputs))
    torch.testing.assert_close(found, expected[:, :, 6:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ["linear", "mla", "mla:form=absorbed"])
def test_a_long_step_is_cut_into_parts(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnbench.catalogue.engines.linear.feature_attention._ROWS", 4)
    monkeypatch.setattr("attnbench.catalogue.attention.exact.mla._ROWS", 6)
    shape = replace(SHAPE, kv_heads=None)
    module, x = as_layer(variant, shape).double(), torch.randn(2, 21, 32, dtype=torch.float64)
    with torch.no_grad():
        state = cast(Decoding, module).begin(x[:, :5])
        first, state = taken(module, state, x[:, 5:18])
        second, _ = taken(module, state, x[:, 18:])
        expected = module(x)[:, 5:]
    torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("variant", ["softmax", "local:window=3", "linear", "retnet", "gated-delta:chunk=4"])
@pytest.mark.parametrize("rotary", [False, True])
def test_layers_and_models_take_several_tokens_and_go_back(variant: str, rotary: bool) -> None:
    if rotary and VARIANTS.get(parse_spec(variant).name).kind == "mixer":
        return
    size = ModelSize(2, 16, 11, "rotary" if rotary else "learned")
    shape, tokens = replace(SHAPE, kv_heads=None), torch.arange(2 * 21).view(2, 21) * 5 % 11
    model = Decoder(variant, shape, size).double()
    with torch.no_grad():
        expected = model(tokens)
        before = model.begin(tokens[:, :8])
        out, after = taken(model, before, torch.cat((tokens[:, 8:11], tokens.flip(1)[:, 11:16]), 1))
        state = rolled_back(model, before, after, tokens[:, 8:11], of=8)
        rest, _ = taken(model, state, tokens[:, 11:])
    torch.testing.assert_close(torch.cat((out[:, :3], rest), 1), expected[:, 8:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("variant", "shared"), [("softmax", True), ("mla", True), ("gla", False), ("local", False)])
def test_a_cache_is_cut_and_another_state_made_again(variant: str, shared: bool) -> None:
    """Cutting is free: the numbers stay where they are."""
    mixer = variant == "mla"
    shape = replace(SHAPE, kv_heads=None)
    module = as_layer(variant, shape) if mixer else build(variant, shape, seed=0, level="operator")
    inputs = [torch.randn(2, 21, 32)] if mixer else [x.float() for x in inputs_of(variant, shape)]
    with torch.no_grad():
        before = cast(Decoding, module).begin(*(x[..., :9, :] for x in inputs))
        _, after = taken(module, before, *(x[..., 9:14, :] for x in inputs))
        state = rolled_back(module, before, after, *(x[..., 9:11, :] for x in inputs), of=5)
    first, second = (one if isinstance(one, Tensor) else one[0] for one in (after, state))
    assert (first.data_ptr() == second.data_ptr()) is shared


def cell(variant: str = "gla", pass_: Pass = "decode", level: Level = "operator", **changes: Any) -> Cell:
    shape = replace(SHAPE, kv_heads=None)
    asked = Cell("s", "w", parse_spec(variant), shape, pass_=pass_, level=level, architecture="encoder")
    return replace(asked, **changes)


def measured(asked: Cell) -> Record:
    record, _ = run_cell(VisitCell(asked, TimingRules(quick=True), 0))
    return record


@pytest.mark.parametrize("variant", ["softmax", "sdpa", "local:window=3", "linear", "gla", "kda"])
def test_a_row_of_several_tokens_has_the_time_of_the_way_back(variant: str) -> None:
    one, several = (measured(cell(variant, new_tokens=count)) for count in (0, 4))
    assert (one.status, several.status) == (Status.OK, Status.OK), several.reason
    assert one.rollback_s is None
    assert several.rollback_s is not None
    assert several.rollback_s > 0
    assert several.tokens_per_s == pytest.approx(2 * 4 / (several.time_median_s or 0))
    assert (several.new_tokens, several.seq_len, several.output_bytes) == (4, 21, 4 * (one.output_bytes or 0))


def test_the_tokens_of_a_step_are_the_last_ones() -> None:
    asked = cell("softmax", new_tokens=4, dtype="float64")
    whole = replace(asked, pass_="forward", new_tokens=0)
    found, expected = (prepare(one).on(0)() for one in (asked, whole))
    torch.testing.assert_close(found, expected[:, :, -4:], rtol=1e-9, atol=1e-10)


def test_a_state_is_kept_in_fewer_bits() -> None:
    wide, narrow = (measured(cell(state_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert narrow.status is Status.OK, narrow.reason
    assert wide.state_bytes == 2 * 4 * 8 * 8 * 4 == 2 * (narrow.state_bytes or 0)
    assert measured(cell()).state_bytes == wide.state_bytes


@pytest.mark.parametrize("variant", ["linear", "retnet", "ssd", "gla", "kda", "rwkv7", "mesa"])
def test_the_error_of_a_state_grows_with_its_rounding(variant: str) -> None:
    """The own error of single steps against the whole sequence: rounding of float32, of float16, of bfloat16."""
    asked = cell(variant, "stepwise", measure=("own_error",), shape=replace(SHAPE, kv_heads=None, seq_len=64))
    found = [measure_own_error(replace(asked, state_dtype=dtype)) for dtype in ("float32", "float16", "bfloat16")]
    errors = [one.output or 0.0 for one in found]
    assert 0 < errors[0] < 1e-5
    assert 1e-5 < errors[1] < 0.02
    assert 3 * errors[1] < errors[2] < 0.2
    assert all((one.late or 0) > 0 for one in found)


def test_a_state_type_at_every_level_and_pass_of_decoding() -> None:
    for level in ("operator", "layer", "model"):
        for pass_ in ("decode", "stepwise", "generate"):
            architecture = "decoder" if level == "model" else "encoder"
            asked = cell("gated-delta", cast(Pass, pass_), cast(Level, level), state_dtype="bfloat16")
            record = measured(replace(asked, architecture=architecture, model=ModelSize(2, 16, 11)))
            assert record.status is Status.OK, (level, pass_, record.reason)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (cell("softmax", state_dtype="bfloat16"), "keeps tokens, as wide as dtype, .*; remove state_dtype"),
        (cell("s4d", level="layer", state_dtype="bfloat16"), "no state of real numbers; remove state_dtype"),
        (cell("softmax", new_tokens=22), "22 in one step are more than all 21; write fewer"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_remedy(asked: Cell, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        prepare(asked)


@pytest.mark.parametrize(
    ("axes", "pass_", "said"),
    [
        ({"new_tokens": 9}, "decode", "--new-tokens 9: more than n = 8; write fewer, or a larger --n"),
        ({"state_dtype": "float16"}, "forward", "only decoding keeps a state; add --pass decode"),
    ],
)
def test_a_question_that_cannot_be_is_refused(axes: dict[str, Any], pass_: Pass, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CompareQuestion(["gla", "linear"], 8, axes=axes, pass_=pass_, device="cpu").prepare()


def test_numbers_beyond_a_type_are_refused_with_others() -> None:
    module = NarrowState(build("gla", replace(SHAPE, kv_heads=None), seed=0, level="operator"), torch.float16)
    inputs = [1e3 * x.float() if place < 3 else x.float() for place, x in enumerate(inputs_of("gla"))]
    with pytest.raises(Unsupported, match="beyond float16; write float32 or bfloat16"):
        module.begin(*inputs)


def test_bytes_of_a_narrow_state_count_its_numbers_alone() -> None:
    module: Callable[..., Any] = NarrowState(build("linear", SHAPE, seed=0), torch.bfloat16).begin
    state = module(*(x.float() for x in inputs_of("linear")))
    assert state_bytes(state) == 2 * 2 * (8 * 8 + 8) * 2 + 2 * 2 * 4, "sums in two bytes, the scale in four"
