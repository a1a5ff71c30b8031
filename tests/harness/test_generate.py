"""A prompt and what follows it: the numbers of one call, two times that make up the whole, a cache and an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import sleep

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import answered
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import SuiteError, Unsupported, UsageError
from attnbench.harness.compare.compare import _side
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.compare.length import Length
from attnbench.harness.inside import call, execute
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws import exact_error
from attnbench.laws.exact_error import measure_error
from attnbench.measure.laps import Laps, first_share
from attnbench.measure.status import Status
from attnbench.measure.time import Sample, TimingRules
from attnbench.models.decoder import Decoder
from attnbench.models.encoder import as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import NEW_TOKENS, Architecture, Cell, Level, ModelSize
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

LEVELS: list[tuple[Level, Architecture]] = [("operator", "encoder"), ("layer", "encoder"), ("model", "decoder")]
levels = pytest.mark.parametrize(("level", "architecture"), LEVELS)
SHAPE = Shape(batch=2, heads=4, kv_heads=2, seq_len=12, head_dim=8)


def cell(variant: str = "softmax", **changes: object) -> Cell:
    asked = Cell("s", "w", parse_spec(variant), SHAPE, pass_="generate", new_tokens=5, model=ModelSize(2, 16, 11))
    return replace(asked, **changes)  # type: ignore[arg-type]


def measure(asked: Cell) -> Record:
    record, _ = run_cell(VisitCell(asked, TimingRules(quick=True), 0))
    return record


@levels
@pytest.mark.parametrize("variant", ["softmax", "sdpa", "linear", "retnet", "local:window=3"])
def test_it_computes_what_one_call_does_for_prompt_and_new_tokens(
    level: Level, architecture: Architecture, variant: str
) -> None:
    asked = cell(variant, level=level, architecture=architecture, dtype="float64")
    whole = replace(asked, pass_="forward", new_tokens=0, shape=replace(asked.whole_shape, causal=True))
    found, expected = (call.prepare(one).on(1)() for one in (asked, whole))
    assert found.shape[-2] == 1 + 5
    torch.testing.assert_close(found, expected[..., 11:, :], rtol=1e-9, atol=1e-10)


@levels
def test_a_row_has_the_two_times_of_a_generation(level: Level, architecture: Architecture) -> None:
    record = measure(cell(level=level, architecture=architecture))
    assert record.status is Status.OK, record.reason
    assert (record.causal, record.new_tokens, record.seq_len) == (True, 5, 12)
    assert record.time_median_s is not None
    assert record.first_token_s is not None
    assert record.token_s is not None
    assert record.first_token_s + 5 * record.token_s == pytest.approx(record.time_median_s)
    assert record.tokens_per_s == 2 * 5 / record.time_median_s
    layers = 2 if level == "model" else 1
    assert record.state_bytes == layers * 2 * 2 * (12 + 5) * 2 * 8 * 4  # room for all of k and v, of 2 heads
    assert record.state_bytes_per_token == record.state_bytes / (2 * 17)


@levels
@pytest.mark.parametrize("variant", ["softmax", "sdpa", "linear", "retnet", "gated-delta:chunk=4"])
def test_behind_a_kept_prefix_it_computes_the_same_for_each_request(
    level: Level, architecture: Architecture, variant: str
) -> None:
    shape = replace(SHAPE, kv_heads=None)
    asked = cell(variant, shape=shape, level=level, architecture=architecture, dtype="float64")
    expected = call.prepare(asked).on(0)()
    behind = call.prepare(replace(asked, kept_prefix=5))
    others = behind.on(1)()
    torch.testing.assert_close(behind.on(0)(), expected, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(others, expected)
    torch.testing.assert_close(behind.on(1)(), others, rtol=0, atol=0)


def test_a_kept_prefix_costs_nothing_and_its_state_is_part_of_the_whole() -> None:
    none, most = (measure(cell("gla", shape=replace(SHAPE, kv_heads=None), kept_prefix=kept)) for kept in (0, 11))
    assert (none.status, most.status) == (Status.OK, Status.OK), most.reason
    assert (none.kept_prefix, most.kept_prefix) == (0, 11)
    assert (most.matmul_flops or 0) < (none.matmul_flops or 0) / 2
    assert most.state_bytes == none.state_bytes
    assert most.first_token_s


@pytest.mark.parametrize(("variant", "level"), [("sdpa", "operator"), ("linear", "operator"), ("mla", "layer")])
def test_a_long_rest_makes_no_matrix_of_all_its_pairs(variant: str, level: Level) -> None:
    shape = Shape(heads=1, seq_len=4096, head_dim=16)
    record = measure(cell(variant, shape=shape, level=level, kept_prefix=1024, new_tokens=1))
    assert record.status is Status.OK, record.reason
    assert (record.peak_bytes or 0) < 3072 * 3072 * 4


def test_the_error_and_the_held_rows_are_those_behind_the_prefix() -> None:
    result = measure_error(cell("sdpa", dtype="float64", kept_prefix=4))
    assert result.rel_error is not None
    assert result.rel_error < 1e-12
    prepared = call.prepare(cell("sdpa", kept_prefix=4))
    assert prepared.hold is not None
    assert prepared.hold() == ""


def test_rows_of_other_passes_have_neither_time() -> None:
    record = measure(cell(pass_="decode", new_tokens=0))
    assert record.status is Status.OK, record.reason
    assert (record.first_token_s, record.token_s, record.new_tokens, record.tokens_kept) == (None, None, 0, None)


def test_rows_of_earlier_versions_lack_the_columns_and_are_read() -> None:
    new = ("new_tokens", "first_token_s", "token_s", "tokens_kept", "kept_mass")
    data = measure(cell(pass_="decode", new_tokens=0)).to_json()
    read = Record.from_json({name: value for name, value in data.items() if name not in new})
    assert [getattr(read, name) for name in new] == [0, None, None, None, None]


class Slow(nn.Module):
    """Takes 20 ms for a prompt and 5 ms for a step."""

    def forward(self, x: Tensor) -> Tensor:
        sleep(0.02)
        return x

    def begin(self, x: Tensor) -> tuple[()]:
        return ()

    def step(self, state: tuple[()], x: Tensor) -> tuple[Tensor, tuple[()]]:
        sleep(0.005)
        return x, ()


def test_the_time_of_a_prompt_is_told_from_that_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "as_layer", lambda *_, **__: Slow())
    prepared = call.prepare(cell(level="layer"))
    for _ in range(3):
        prepared.run()
    assert prepared.laps is not None
    assert sorted(prepared.laps.of_calls(0, 3))[1] == pytest.approx(20 / (20 + 5 * 5), abs=0.2)


def test_the_share_of_the_prompt_is_the_median_over_the_clean_calls_of_the_last_samples() -> None:
    laps = Laps("cpu")
    for first in (100, 1, 9, 2, 3):  # the first one is a warm-up
        laps.add(0, first, 128)
    samples = [Sample(1.0, 2, switches=10**6), Sample(1.0, 2)]
    assert first_share(laps, samples) == 2.5 / 128
    assert first_share(laps, [Sample(1.0, 2, waited=1.0)] * 2) is None
    assert first_share(laps, [Sample(1.0, 4, stopped=True)]) is None


@pytest.mark.parametrize("share", [0.6, None])
def test_shares_of_rounds_are_averaged_and_the_parts_make_up_the_time_of_all_rounds(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.2, share])
    monkeypatch.setattr(execute, "first_share", lambda laps, samples: next(shares))
    rules = TimingRules(min_time=0.001, max_time=0.01, min_samples=6, warmup_time=0.001, rounds=2)
    record, _ = run_cell(VisitCell(cell(), rules, 0))
    slow = [Sample(1.0, 1, waited=0.0).to_json()] * 1000  # a round at a hundred times the time of the other one
    record, _ = run_cell(VisitCell(cell(), rules, 1, [slow], record))
    assert record.status is Status.OK, record.reason
    assert record.time_median_s == 1.0
    assert record.first_token_s == pytest.approx(0.4 if share else 0.2)
    assert record.token_s == pytest.approx((0.6 if share else 0.8) / 5)


def test_a_side_of_a_comparison_divides_its_time_in_turns_between_its_prompt_and_its_steps() -> None:
    found = Length({0: Record.of(cell(), Status.OK)}, prompts={0: [0.2, 0.4]})
    side = _side(found, 0, [[9.0, 10.0], [11.0]])
    assert (side.time, side.record.first_token_s, side.record.token_s) == (10.0, pytest.approx(3.0), pytest.approx(1.4))
    assert side.record.time_median_s is None


# What it is held against


def test_the_error_is_that_of_the_steps_alone() -> None:
    for variant in ("softmax", "sdpa"):
        result = measure_error(cell(variant, dtype="float64", error_draws=2))
        assert result.rel_error is not None
        assert result.rel_error < 1e-12
        assert result.kept_mass is None
    cut = measure_error(cell("knorm:budget=2", dtype="float64", error_draws=2))
    assert cut.rel_error is not None
    assert cut.rel_error > 0.1  # the prompt is answered exactly, what follows it is not
    assert cut.kept_mass is not None
    assert 0 < cut.kept_mass < 0.9
    whole = measure_error(cell("knorm:ratio=0.0", dtype="float64", error_draws=2))
    assert whole.kept_mass == pytest.approx(1)
    assert whole.trivial_error == cut.trivial_error


def test_the_error_of_a_budget_is_that_of_a_loop() -> None:
    asked = cell("tova:budget=3", dtype="float64", error_draws=1)
    q, k, v = (x.double() for x in call.draw_qkv(asked.inputs, asked.whole_shape, asked.seed))
    exact = exact_attention(q, k, v, causal=True)[:, :, 12:]
    module = call.build(asked.variant, asked.whole_shape).double()
    state, outputs = module.begin(q[:, :, :12], k[:, :, :12], v[:, :, :12]), []  # type: ignore[operator]
    for t in range(12, 17):
        out, state = module.step(state, *(x[:, :, t : t + 1] for x in (q, k, v)))  # type: ignore[operator]
        outputs.append(out)
    wanted = float((torch.cat(outputs, 2) - exact).norm() / exact.norm())
    assert measure_error(asked).rel_error == pytest.approx(wanted, rel=1e-9)


@levels
def test_a_budget_is_told_in_tokens_and_makes_the_cache_smaller(level: Level, architecture: Architecture) -> None:
    record = measure(cell("snapkv:ratio=0.75,window=2", level=level, architecture=architecture))
    assert record.status is Status.OK, record.reason
    assert record.tokens_kept == 3
    layers = 2 if level == "model" else 1
    assert record.state_bytes == layers * 2 * 2 * (3 + 5) * 2 * 8 * 4


# Prompts of layers and models


def counting(layer: nn.Module) -> Callable[[], int]:
    """How often the projections of a layer were computed."""
    seen: list[int] = []
    layer.qkv.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    return lambda: len(seen)


def test_a_layer_projects_its_prompt_once() -> None:
    layer = as_layer("softmax", replace(SHAPE, causal=True))
    projected = counting(layer)
    x = torch.randn(2, 12, 32)
    out, state = answered(layer, x)
    assert projected() == 1
    torch.testing.assert_close(out, layer(x))
    torch.testing.assert_close(state.k, layer.begin(x).k)  # type: ignore[operator]


@pytest.mark.parametrize("added", [0, 3])
def test_a_decoder_answers_the_last_token_of_its_prompt_and_goes_on(added: int) -> None:
    model = Decoder("linear", replace(SHAPE, added_tokens=added), ModelSize(2, 16, 11)).double()
    tokens = torch.randint(11, (2, 12))
    expected = model(tokens)
    out, state = answered(model, tokens[:, :7])
    torch.testing.assert_close(out, expected[:, 6:7])
    for t in range(7, 12):
        out, state = model.step(state, tokens[:, t : t + 1])
        torch.testing.assert_close(out, expected[:, t : t + 1])


# What is asked


def test_what_cannot_generate_says_why() -> None:
    for measured in (("time",), ("error",)):
        assert "sees the future" in measure(cell("linformer", measure=measured)).reason
        assert "all sequences have one length" in measure(cell(padding=0.5, measure=measured)).reason
    assert "compiled anew" in measure(cell(compile=True)).reason
    assert "whole sequences" in measure(cell(level="model")).reason
    for measured in (("time",), ("error",)):
        assert "leave none of a prompt of 12" in measure(cell(kept_prefix=12, measure=measured)).reason
        assert "take one token each" in measure(cell("local:window=3", kept_prefix=4, measure=measured)).reason
    assert "take one token each" in measure(cell("local:window=3", kept_prefix=4, level="layer")).reason
    with pytest.raises(Unsupported, match="no q, k, v"):
        call.prepare(cell("dense", shape=replace(SHAPE, kv_heads=None)))


def test_a_generation_has_new_tokens_and_other_passes_have_none() -> None:
    assert Cell("s", "w", Spec("softmax"), SHAPE, pass_="generate").new_tokens == NEW_TOKENS
    assert Cell("s", "w", Spec("softmax"), SHAPE).new_tokens == 0
    assert cell().whole_shape.N == 17
    assert cell().cell_id != cell(new_tokens=6).cell_id


def suite(pass_: str, **axes: object) -> Suite:
    matrix = {"variant": "softmax", "seq_len": 8, **axes}
    return Suite.of({"name": "x", "sweeps": [{"name": "s", "pass": pass_, "matrix": matrix}]}, Origin("x.yaml"))


def test_new_tokens_are_an_axis_of_two_passes() -> None:
    cells = expand(suite("generate", new_tokens=[2, 4]))
    assert [one.new_tokens for one in cells] == [2, 4]
    assert [one.new_tokens for one in expand(apply_overrides(suite("generate"), {"new_tokens": "7"}))] == [7]
    assert [one.whole_shape.N for one in expand(suite("decode", new_tokens=[1, 4]))] == [8, 8]
    with pytest.raises(SuiteError, match="'new_tokens' does nothing without pass: generate or decode"):
        suite("stepwise", new_tokens=2)
    with pytest.raises(UsageError, match="only sweeps with pass: generate or decode have this axis"):
        apply_overrides(suite("forward"), {"new_tokens": "7"})
    with pytest.raises(SuiteError, match="'kept_prefix' does nothing without pass: generate; remove it"):
        suite("decode", kept_prefix=2)
    for pass_, kept, said in (("decode", 3, "add --pass generate"), ("generate", 8, "no rest; write fewer")):
        with pytest.raises(UsageError, match=f"--kept-prefix {kept}: .*{said}"):
            CompareQuestion(["softmax", "linear"], 8, axes={"kept_prefix": kept}, pass_=pass_, device="cpu").prepare()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="add --pass generate or decode"):
        CompareQuestion(["softmax", "linear"], 8, axes={"new_tokens": 3}, device="cpu").prepare()
    (asked, _) = (
        CompareQuestion(["softmax", "linear"], 8, axes={"new_tokens": 3}, pass_="generate", device="cpu")
        .prepare()
        .cells
    )
    assert asked.new_tokens == 3


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_the_error_is_told_over_the_steps_and_of_the_first_and_last_quarter(steps: int) -> None:
    asked = cell("snapkv:budget=6,window=2", new_tokens=steps, measure=("error",), error_draws=1)
    record, _ = run_cell(VisitCell(asked, TimingRules(quick=True), 0))
    assert record.status is Status.OK, record.reason
    q, k, v = draw_qkv(asked.inputs, asked.whole_shape, 0)
    operator = build(asked.variant, asked.whole_shape, seed=0)
    state, outputs = operator.begin(*(x[:, :, :12] for x in (q, k, v))), []
    for t in range(12, 12 + steps):
        out, state = operator.step(state, *(x[:, :, t : t + 1] for x in (q, k, v)))
        outputs.append(out.double())
    got, exact = torch.cat(outputs, 2), exact_attention(q, k, v, causal=True)[:, :, 12:]

    def off(first: int, last: int) -> float:
        wanted = exact[:, :, first:last]
        return float((got[:, :, first:last] - wanted).norm() / wanted.norm())

    quarter = -(-steps // 4)
    assert record.rel_error_first == pytest.approx(off(0, quarter), rel=1e-6)
    assert record.rel_error_last == pytest.approx(off(steps - quarter, steps), rel=1e-6)
    count = min(32, steps)
    ends = [i * steps // count for i in range(count + 1)]
    wanted = [off(a, b) for a, b in pairwise(ends)]
    assert json.loads(record.rel_error_steps) == pytest.approx(wanted, rel=1e-3)
    assert record.rel_error == pytest.approx(off(0, steps), rel=1e-6)


def test_other_passes_have_no_error_over_steps() -> None:
    asked = replace(cell(measure=("error",), error_draws=1), pass_="forward", new_tokens=0)
    record, _ = run_cell(VisitCell(asked, TimingRules(quick=True), 0))
    assert record.rel_error is not None
    assert (record.rel_error_first, record.rel_error_last, record.rel_error_steps) == (None, None, "")


def test_a_stretch_without_an_error_is_null_in_a_row_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(inputs: Spec, shape: Shape, seed: int) -> tuple[Tensor, ...]:
        q, k, v = draw_qkv(inputs, shape, seed)
        v[:, :, :-1] = 0
        return q, k, v

    monkeypatch.setattr(exact_error, "draw_qkv", late)
    record = measure(cell("local:window=3", measure=("error",), error_draws=1, seed=77))
    assert record.status is Status.OK, record.reason
    *without, last = json.loads(record.rel_error_steps)
    assert (record.rel_error_first, without) == (None, [None] * 4)
    assert last == pytest.approx(record.rel_error, rel=1e-3)
    json.dumps(record.to_json(), allow_nan=False)
