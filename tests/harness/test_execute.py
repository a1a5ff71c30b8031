from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.traits import Traits
from attnbench.contract.variant import VARIANTS, Variant, register
from attnbench.harness.inside import call
from attnbench.harness.inside.call import kept_draw
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire import process
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure import limits
from attnbench.measure.limits import Limits
from attnbench.measure.status import Status
from attnbench.measure.time import Sample, TimingRules, summarise
from attnbench.models.encoder import as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import Architecture, Cell, Level, ModelSize, Pass

QUICK = TimingRules(quick=True)


def measure(cell: Cell, memory_limit: int | None = None) -> Record:
    limits = Limits(matmul_rate=1e9, exp_rate=1e8)
    return run_cell(VisitCell(cell, QUICK), limits=limits, memory_limit=memory_limit)[0]


def cell(variant: str = "softmax", **changes: object) -> Cell:
    return Cell(
        **{
            "suite": "s",
            "sweep": "w",
            "variant": Spec(variant),
            "shape": Shape(heads=2, seq_len=64, head_dim=8),
            **changes,
        }
    )  # type: ignore[arg-type]


def test_a_cell_near_the_memory_limit_is_measured_with_the_allocator_as_shipped_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Or all later tests would run with an allocator that keeps memory, whose resident memory says nothing.
    monkeypatch.setattr(process, "keep_freed_memory", lambda: True)
    peak = measure(cell()).peak_bytes
    assert peak is not None
    assert measure(cell(), memory_limit=3 * peak).process == ""
    assert measure(cell(), memory_limit=3 * peak - 1).process == "as-shipped"


def test_a_later_round_keeps_the_warnings_of_the_first_look_and_takes_back_those_of_its_times() -> None:
    asked = cell(measure=("time",))
    earlier = [{"seconds": 1.0 + place, "calls": 1, "switches": 0} for place in range(9)]
    (unstable,) = summarise([[Sample(**one) for one in earlier]]).warnings
    previous = replace(Record.of(asked, Status.OK), warnings=f"{unstable}; it was another algorithm")
    again = run_cell(VisitCell(asked, TimingRules(min_time=0, max_time=0.01), 1, [earlier], previous))[0]
    assert again.time_rounds == 2
    assert "it was another algorithm" in again.warnings.split("; ")
    assert unstable not in again.warnings


def test_flops_rate_and_fraction_follow_from_the_count_and_the_time() -> None:
    record = measure(cell())
    assert record.matmul_flops == 4 * 2 * 64 * 64 * 8
    assert record.time_median_s is not None
    assert record.flops_per_s == record.matmul_flops / record.time_median_s
    assert record.peak_fraction == pytest.approx(record.flops_per_s / 1e9)
    assert record.exponentials == 2 * 64 * 64
    assert record.floor_s == pytest.approx(record.matmul_flops / 1e9 + record.exponentials / 1e8)
    assert record.examples_per_s == 1 / record.time_median_s


LEVELS: list[Level] = ["operator", "layer", "model"]
ASKED: list[tuple[Pass, bool]] = [
    ("forward", False),
    ("training", False),
    ("training", True),
    ("decode", True),
    ("backward", False),
]
SMALL = ModelSize(layers=2, ffn=8)
RUNNABLE = [entry for entry in VARIANTS if not entry.traits.compiled]


def runs_where_it_claims(entry: Variant, level: Level, pass_: Pass, causal: bool) -> None:
    entry = entry.at(level)
    traits = entry.traits
    spec = parse_spec(f"{entry.name}:{entry.settings[0]}".rstrip(":"))
    shape = Shape(heads=2, seq_len=24, head_dim=4, causal=causal)
    asked = cell(level=level, pass_=pass_, measure=("time",), model=SMALL if level == "model" else None)
    record = measure(replace(asked, variant=spec, shape=shape))
    possible = (entry.kind == "operator" or level != "operator") and bool(traits.causal or not causal)
    if pass_ == "decode":
        possible = possible and level != "model" and bool(traits.decode)
    possible = possible and not traits.emulated
    wanted = Status.OK if possible else Status.UNSUPPORTED
    assert record.status is wanted, (level, pass_, causal, record.reason)
    assert bool(record.reason) is not possible


@pytest.mark.parametrize(("number", "entry"), list(enumerate(RUNNABLE)), ids=[entry.name for entry in RUNNABLE])
def test_every_variant_runs_in_two_passes_at_two_levels_where_it_claims_to(number: int, entry: Variant) -> None:
    """Every pair of level and pass meets two in fifteen of the variants."""
    for place in (number, number + 2):
        runs_where_it_claims(entry, LEVELS[place % len(LEVELS)], *ASKED[place % len(ASKED)])


@pytest.mark.slow
@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.name)
def test_every_variant_runs_in_every_pass_at_every_level(entry: Variant) -> None:
    for level in LEVELS:
        for pass_, causal in ASKED:
            runs_where_it_claims(entry, level, pass_, causal)


def test_a_mixer_alone_says_why_it_cannot_be_measured() -> None:
    assert "has no q, k, v" in measure(cell("synthesizer")).reason


def test_training_takes_more_products_than_forward_and_backward_the_difference() -> None:
    flops = {pass_: measure(cell(level="model", pass_=pass_)).matmul_flops for pass_ in ("forward", "backward")}
    training = measure(cell(level="model", pass_="training")).matmul_flops
    assert flops["forward"]
    assert flops["backward"]
    assert training == flops["forward"] + flops["backward"]


def test_a_decoding_step_holds_the_cache_of_all_tokens_before_it() -> None:
    for level in ("operator", "layer"):
        record = measure(cell(level=level, pass_="decode"))
        assert record.status is Status.OK
        assert record.causal
        assert record.state_bytes == 2 * 64 * 2 * 8 * 4  # k and v, room for 64 tokens, 2 heads of 8 numbers of 4 bytes
        assert record.state_bytes_per_token == record.state_bytes / 63
        assert record.time_median_s is not None
        assert record.tokens_per_s == 1 / record.time_median_s


@pytest.mark.cuda
@pytest.mark.parametrize("pass_", ["forward", "backward", "training"])
def test_compiled_code_runs_in_every_pass_on_a_gpu(pass_: Pass) -> None:
    shape = Shape(heads=2, seq_len=256, head_dim=16)
    record = measure(replace(cell("flex", pass_=pass_, device="cuda"), shape=shape))
    assert record.status is Status.OK, record.reason
    products = {"forward": 2, "backward": 5, "training": 7}[pass_]
    assert (record.kernel, record.matmul_flops) == ("flex", products * 2 * 2 * 256 * 256 * 16)


@pytest.mark.parametrize("level", ["operator", "layer", "model"])
def test_an_option_that_does_nothing_beside_another_is_a_row_with_the_reason(level: Level) -> None:
    asked = cell(level=level, model=SMALL if level == "model" else None)
    record = measure(replace(asked, variant=parse_spec("kernel:order=dense,chunk=5")))
    assert record.status is Status.UNSUPPORTED
    assert record.reason == "chunk: does nothing without order=associated; write that as well, or leave chunk out"


def test_what_cannot_decode_says_why() -> None:
    record = measure(cell("linformer", pass_="decode"))
    assert record.status is Status.UNSUPPORTED
    assert "sees the future" in record.reason
    assert "whole sequences" in measure(cell(level="model", pass_="decode")).reason
    crossed = cell(level="model", pass_="stepwise", architecture="encoder-decoder")
    assert "no step of cross-attention" in measure(crossed).reason
    assert "compiled anew" in measure(cell(pass_="stepwise", compile=True)).reason


WRITING: list[tuple[Level, str]] = [("operator", "encoder"), ("layer", "encoder"), ("model", "decoder")]


@pytest.mark.parametrize(("level", "architecture"), WRITING)
def test_step_by_step_a_cell_computes_what_it_does_in_one_call(level: Level, architecture: str) -> None:
    """So the ratio of the two times is about the order of the work alone."""
    asked = cell("linear", level=level, architecture=architecture, dtype="float64")
    asked = replace(asked, shape=replace(asked.shape, batch=2, seq_len=17, causal=True))
    both = (call.prepare(replace(asked, pass_=pass_)) for pass_ in ("stepwise", "forward"))  # type: ignore[arg-type]
    steps, whole = (one.on(1)() for one in both)
    assert steps.shape[-2] == 17
    torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-10)


def test_a_sequence_of_steps_counts_all_its_tokens_and_is_causal() -> None:
    record = measure(cell(pass_="stepwise"))
    assert record.status is Status.OK, record.reason
    assert record.causal
    assert record.time_median_s is not None
    assert record.tokens_per_s == 64 / record.time_median_s
    assert record.matmul_flops == 4 * 2 * 8 * sum(range(1, 65))
    assert record.output_bytes == measure(cell()).output_bytes


def test_a_decoder_decodes_against_the_caches_of_all_its_layers() -> None:
    record = measure(cell(level="model", pass_="decode", architecture="decoder", model=ModelSize(layers=3, ffn=16)))
    assert record.status is Status.OK, record.reason
    assert record.state_bytes == 3 * 2 * 64 * 2 * 8 * 4
    assert (record.architecture, record.causal, record.layers) == ("decoder", True, 3)


@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_models_that_write_are_measured_forward_and_in_training(architecture: Architecture) -> None:
    asked = replace(cell("linear", level="model", architecture=architecture), model=ModelSize(layers=2, ffn=16))
    if architecture == "encoder-decoder":
        asked = replace(asked, shape=replace(asked.shape, kv_len=40))
    records = {pass_: measure(replace(asked, pass_=pass_)) for pass_ in ("forward", "backward", "training")}
    assert {one.status for one in records.values()} == {Status.OK}, [one.reason for one in records.values()]
    flops = {pass_: one.matmul_flops or 0 for pass_, one in records.items()}
    assert flops["training"] == flops["forward"] + flops["backward"]
    assert records["forward"].kv_len == (40 if architecture == "encoder-decoder" else 64)
    # The logits of 64 tokens among 256, in float32.
    assert records["forward"].output_bytes == 64 * 256 * 4


def test_an_encoder_decoder_costs_what_its_three_kinds_of_attention_cost() -> None:
    """Products of softmax attention and of the projections, counted by hand."""
    n, m, width, ffn, vocab = 64, 40, 16, 16, 256
    asked = replace(cell(level="model", architecture="encoder-decoder"), model=ModelSize(layers=2, ffn=ffn))
    record = measure(replace(asked, shape=replace(asked.shape, kv_len=m)))
    encoder = 8 * m * width**2 + 4 * m * m * width + 4 * m * width * ffn
    decoder = 8 * n * width**2 + 4 * n * n * width + 4 * n * width * ffn
    cross = 4 * n * width**2 + 4 * m * width**2 + 4 * n * m * width
    head = 2 * n * width * ffn + 2 * n * ffn * vocab
    assert record.matmul_flops == 2 * (encoder + decoder + cross) + head


def test_padding_belongs_to_what_an_encoder_decoder_reads() -> None:
    asked = replace(cell(level="model", architecture="encoder-decoder", padding=0.5), model=ModelSize(layers=1, ffn=16))
    record = measure(asked)
    assert record.status is Status.OK, record.reason
    assert record.time_median_s is not None
    assert record.tokens_per_s == 64 / record.time_median_s  # all that are written
    written = measure(replace(asked, architecture="decoder", pass_="training"))
    assert written.time_median_s is not None
    assert written.tokens_per_s == 32 / written.time_median_s


def test_a_decoder_is_no_answer_to_a_task() -> None:
    assert (
        "answered by an encoder" in measure(cell(level="model", architecture="decoder", task=parse_spec("copy"))).reason
    )


def test_added_tokens_cost_what_a_longer_sequence_costs() -> None:
    asked = cell(level="layer", pass_="training")
    added = measure(replace(asked, shape=replace(asked.shape, seq_len=60, added_tokens=4)))
    longer = measure(asked)
    assert added.status is Status.OK, added.reason
    assert added.matmul_flops == longer.matmul_flops
    assert added.param_bytes == (longer.param_bytes or 0) + 4 * 16 * 4
    assert added.output_bytes is not None
    assert (added.added_tokens, added.seq_len) == (4, 60)


def test_a_layer_decodes_what_it_gives_for_the_whole_sequence() -> None:
    shape = Shape(batch=2, heads=2, seq_len=9, head_dim=4, causal=True)
    layer = as_layer("softmax", shape).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    state = layer.begin(x[:, :5])
    for t in range(5, 9):
        out, state = layer.step(state, x[:, t : t + 1])
        torch.testing.assert_close(out, layer(x)[:, t : t + 1])


@pytest.mark.parametrize(
    ("true_float32", "default", "onednn", "windows", "wanted"),
    [
        (True, 1.0, 2.0, 0.9, (("oneDNN", "default"), False)),
        (True, 1.0, 2.0, 1.15, (("oneDNN", "default"), False)),  # chance does not decide
        (True, 1.0, 2.0, 1.3, (("oneDNN", "oneDNN"), False)),
        (True, 1.05, 1.0, 0.9, (("oneDNN", "default"), False)),  # nor here
        (True, 1.2, 1.0, 1.2, (("default", "default"), False)),
        (False, 1.0, 2.0, 2.0, (("default", "default"), True)),
    ],
)
def test_the_tuned_process_takes_the_faster_products_that_are_true_float32(
    true_float32: bool,
    default: float,
    onednn: float,
    windows: float,
    wanted: tuple[tuple[str, str], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_float32_matmul_precision()
    rate = lambda *_, **__: {"highest": default, "medium": onednn}[torch.get_float32_matmul_precision()]  # noqa: E731  # stands for a measurement
    of_windows = lambda **_: {"highest": 1.0, "medium": windows}[torch.get_float32_matmul_precision()]  # noqa: E731
    monkeypatch.setattr(limits, "matmul_rate", rate)
    monkeypatch.setattr(limits, "windows_rate", of_windows)
    monkeypatch.setattr(limits, "is_true_float32", lambda: true_float32)
    try:
        assert process.faster_products() == wanted
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("true_float32", "wanted"), [(True, "medium"), (False, "highest")])
def test_the_tuned_process_multiplies_as_it_says(
    true_float32: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(process, "_products", process.Products())
    monkeypatch.setattr(limits, "matmul_rate", lambda *_, **__: 1.0)
    monkeypatch.setattr(limits, "is_true_float32", lambda: true_float32)
    before = torch.get_float32_matmul_precision()
    try:
        _, chosen, notes = process.apply("tuned", threads=torch.get_num_threads(), device="cpu")
        assert torch.get_float32_matmul_precision() == wanted
        assert process._PRECISION[chosen.float32_products] == wanted
        assert bool(notes) is not true_float32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("state", "rounds_to_tf32"), [("tuned", False), ("as-shipped", True)])
def test_float32_on_a_gpu_is_rounded_to_tf32_only_as_torch_ships_it(
    state: process.Process, rounds_to_tf32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_products", process.Products())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert process.apply(state, threads=torch.get_num_threads(), device="cuda:1") == (state, process.Products(), [])
    assert torch.backends.cudnn.allow_tf32 is rounds_to_tf32


@pytest.mark.parametrize(("device", "made"), [("cpu", []), ("cuda", []), ("cuda:0", []), ("cuda:1", [1])])
def test_a_gpu_other_than_the_first_becomes_the_one_on_which_events_and_kernels_are_recorded(
    device: str, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    current = list[int]()
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    process.apply("as-shipped", threads=torch.get_num_threads(), device=device)
    assert current == made


def test_one_disturbed_turn_does_not_decide_who_multiplies_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([0.1, 0.9, 1.0, 0.9, 1.0, 0.9, 1.0, 0.9])  # in turns, the default library first
    monkeypatch.setattr(limits, "matmul_rate", lambda *_, **__: 1.0)
    monkeypatch.setattr(limits, "is_true_float32", lambda: True)
    monkeypatch.setattr(limits, "windows_rate", lambda **_: next(rates))
    before = torch.get_float32_matmul_precision()
    try:
        assert process.faster_products() == (("oneDNN", "default"), False)
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_decoding_step_in_the_tuned_process_does_not_copy_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_products", process.Products("oneDNN"))
    before = torch.get_float32_matmul_precision()
    try:
        wide = replace(cell("identity", level="layer", pass_="decode"), shape=Shape(heads=8, seq_len=8, head_dim=32))
        peak = measure(wide).peak_bytes
        assert torch.get_float32_matmul_precision() == "highest"
        assert peak is not None
        assert peak < 4 * 256 * 256  # the smallest of its matrices
        measure(cell())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_variants_get_the_same_draw_and_none_sees_what_another_wrote_into_it() -> None:
    asked = cell().inputs, cell().shape, 3
    for tensor in kept_draw(*asked):
        tensor.zero_()
    assert all(map(torch.equal, kept_draw(*asked), draw_qkv(*asked)))
    assert all(map(torch.equal, kept_draw(*asked[:2], 4), draw_qkv(*asked[:2], 4)))


def test_a_large_draw_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_KEPT_ELEMENTS", 64 * 2 * 8 - 1)
    monkeypatch.delattr(call, "_last_draw")
    assert all(map(torch.equal, kept_draw(cell().inputs, cell().shape, 3), draw_qkv(cell().inputs, cell().shape, 3)))


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> str:
    """An exact variant whose products come from a library that rounds float32 to bfloat16."""

    class Rounded(nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            q, k, v = (x.bfloat16().to(x.dtype) for x in (q, k, v))
            return exact_attention(q, k, v).to(q.dtype)

    fit = Traits(exact=True, causal=False, cross=False, key_padding=False, v_dim=False, longer=False)
    monkeypatch.setattr(VARIANTS, "_entries", dict(VARIANTS._filled()))
    register("own-rounded", family="exact", source="-", formula="-", cost="-", traits=fit)(Rounded)
    return "own-rounded"


def test_an_exact_variant_whose_error_is_far_above_rounding_is_an_error(rounded: str) -> None:
    asked: dict[str, Any] = {"shape": Shape(heads=2, seq_len=256, head_dim=64), "measure": ("error",)}
    record = measure(cell(rounded, **asked))
    assert record.status is Status.ERROR
    said = r"exact, but off by 0\.00\d+, \d\.\de\+04 roundings of float32: products lose precision, or it is not exact"
    assert re.fullmatch(said, record.reason), record.reason
    assert measure(cell(rounded, **asked, dtype="bfloat16")).status is Status.OK  # as precise as its data
    for honest in ("softmax", "sdpa", "chunked"):
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            assert measure(cell(honest, **asked, dtype=dtype)).status is Status.OK
