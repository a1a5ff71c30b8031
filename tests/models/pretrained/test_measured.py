from __future__ import annotations

import csv
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.inputs.listops_encoder import ExactAttention
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Exit, Unsupported, UsageError
from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.swap.loss import measure_loss
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.time import TimingRules
from attnbench.models.pretrained.listops.small_encoder import trained_encoder
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.models.pretrained.pretrained_cell import Opened, cached, opened, swapped
from attnbench.models.pretrained.sizes import Sizes, sizes_of
from attnbench.results.validation import checked
from attnbench.suite.cell import UNTOUCHED, Cell, Pretrained

N, W = 24, 6
QUICK = TimingRules(min_time=0.01, max_time=0.1, warmup_time=0.0, rounds=1, quick=True)
SHAPE = Shape(batch=3, heads=2, seq_len=N, head_dim=32)


def cell(variant: str, **more: Any) -> Cell:
    spec = Spec(UNTOUCHED) if variant == UNTOUCHED else parse_spec(variant)
    given = {"level": "pretrained", "measure": ("time", "memory", "loss"), "pretrained": Pretrained("listops", "", W)}
    return Cell("s", "s", spec, **{"shape": SHAPE, **given, **more})


def near(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Softmax attention to the keys at most two places away, from its formula."""
    far = (torch.arange(N)[:, None] - torch.arange(N)).abs() > 2
    logits = q @ k.mT / q.shape[-1] ** 0.5
    return logits.masked_fill(far, -math.inf).softmax(-1) @ v


@pytest.fixture
def by_hand() -> Any:
    """The shipped encoder with that attention in every layer."""
    encoder = trained_encoder()
    for module in encoder.modules():
        if isinstance(module, ExactAttention):
            module.forward = near  # type: ignore[method-assign]
    return encoder


def test_the_loss_is_that_of_a_swap_written_by_hand(by_hand: Any) -> None:
    held = Trees(N).held_out(W)
    losses = {}
    with torch.inference_mode():
        for name, encoder in {"after": by_hand, "before": trained_encoder()}.items():
            logits = encoder.classify(encoder.read(held.tokens))
            losses[name] = [
                float(torch.nn.functional.cross_entropy(one[asked != NO_LABEL], asked[asked != NO_LABEL]))
                for one, asked in zip(logits, held.targets, strict=True)
            ]
    found = measure_loss(cell("local:window=2"))
    assert found["loss"] == pytest.approx(sum(losses["after"]) / W, abs=1e-6)
    assert found["loss_base"] == pytest.approx(sum(losses["before"]) / W, abs=1e-6)
    deltas = sorted(a - b for a, b in zip(losses["after"], losses["before"], strict=True))
    assert found["loss_delta"] == pytest.approx((deltas[2] + deltas[3]) / 2, abs=1e-6)
    interval = found["loss_delta_low"], found["loss_delta_high"]
    assert interval == pytest.approx((deltas[0], deltas[-1]), abs=1e-6), "of six windows, least and largest"
    assert abs(found["loss"] - found["loss_base"]) > 0.01, "two places are not the same as all"


@pytest.mark.parametrize(
    ("replaced", "error", "said"),
    [("4", UsageError, "replaced: 4: the model has 4 layers"), ("1+2", Unsupported, "layer 1: it sees a window")],
)
def test_a_layer_that_is_not_there_or_has_to_stay_is_refused(
    replaced: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = OwnEncoder(N)
    first, second, *rest = subject.layers
    subject.layers = (first, replace(second, kept="it sees a window"), *rest)
    monkeypatch.setattr("attnbench.models.pretrained.pretrained_cell.cached", lambda *_: Opened(subject, Trees(N), ()))
    with pytest.raises(error, match=said):
        measure_loss(cell("softmax", replaced=replaced))


def test_layers_that_are_named_are_replaced_and_no_others() -> None:
    found = {which: measure_loss(cell("mean-value", replaced=which))["kl"] for which in ("0", "2", "0+2", "all")}
    assert len(set(found.values())) == 4
    assert min(found.values()) > 0.01


def test_the_call_is_the_swapped_model_from_tokens_to_logits(by_hand: Any) -> None:
    tokens = Trees(N).batch(0, 0, 3).tokens
    untouched = trained_encoder()
    with torch.inference_mode():
        swapped_, wanted = (encoder.classify(encoder.read(tokens)) for encoder in (by_hand, untouched))
        assert torch.equal(prepare(cell(UNTOUCHED)).on(0)(), wanted)
        assert torch.allclose(prepare(cell("softmax")).on(0)(), wanted, atol=1e-4)
        assert torch.allclose(prepare(cell("local:window=2")).on(0)(), swapped_, atol=1e-4)
        assert not torch.allclose(swapped_, wanted, atol=0.1)
    assert not torch.allclose(*(prepare(cell("softmax")).on(number)() for number in (0, 1))), "inputs take turns"


def test_a_step_gives_the_gradient_of_every_weight(by_hand: Any) -> None:
    windows = Trees(N).batch(0, 0, 3)
    logits = by_hand.classify(by_hand.read(windows.tokens))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows.targets.flatten(), ignore_index=NO_LABEL)
    wanted = torch.autograd.grad(loss, list(by_hand.parameters()))
    got = prepare(cell("local:window=2", pass_="training")).on(0)()
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_cell_leaves_the_kept_model_as_it_is() -> None:
    one = opened(cell("softmax"))
    before = [weight.clone() for weight in one.weights.parameters()]
    module, _ = swapped(cell("performer"))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.to(torch.float64)
    again = opened(cell("performer"))
    assert all(torch.equal(x, y) for x, y in zip(again.weights.parameters(), before, strict=True))
    assert all(x is y for x, y in zip(again.weights.parameters(), again.subject.module.parameters(), strict=False))


def test_nothing_is_dropped_out_and_training_does_not_change_that() -> None:
    module, _ = swapped(cell("softmax"))
    assert not any(part.training for part in module.train().modules())


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"shape": replace(SHAPE, heads=4)}, UsageError, r"2 heads of width 32 over 2 of keys and values, not causal"),
        ({"shape": replace(SHAPE, causal=True)}, UsageError, "not causal, which the cell does not say"),
        ({"compile": True}, Unsupported, "not one graph"),
        ({"pretrained": None}, UsageError, "write model: listops in a suite"),
        ({"variant": parse_spec("fnet")}, Unsupported, "a mixer replaces the projections as well"),
        ({"variant": parse_spec("linformer:rank=256")}, Unsupported, "rank 256 is above the 24 keys"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        prepare(replace(cell("softmax"), **changed))


def test_layers_that_stay_as_they_are_stand_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = measure_loss(cell("mean-value"))["loss"]
    assert everywhere is not None
    subject, text = OwnEncoder(N), Trees(N)
    kept = replace(subject.layers[0], kept="it sees a window of 4 tokens, which a variant would not")
    subject.layers = (kept, *subject.layers[1:3], kept)
    said = "layers left as they are: 0, 3: it sees a window of 4 tokens, which a variant would not"
    assert Opened(OwnEncoder(N), text, ()).left == ""
    monkeypatch.setattr("attnbench.models.pretrained.pretrained_cell.cached", lambda *_: Opened(subject, text, ()))
    monkeypatch.setattr(OwnEncoder, "copy", lambda self: self)
    record, _ = run_cell(VisitCell(cell("mean-value"), QUICK))
    assert record.status == "ok", record.reason
    assert said in record.warnings
    assert record.loss is not None
    assert abs(record.loss - everywhere) > 0.01, "two layers are replaced, not all"


def header(**stated: Any) -> bytes:
    """A GGUF file that states these numbers, words and short lists, then its tokens, and ends."""

    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    parts = [b"GGUF", struct.pack("<IQQ", 3, 0, len(stated) + 1)]
    for name, value in stated.items():
        parts.append(text(name))
        if isinstance(value, str):
            parts += [struct.pack("<I", 8), text(value)]
        elif isinstance(value, list):
            parts += [struct.pack("<IIQ", 9, 8, len(value)), *map(text, value)]
        else:
            parts += [struct.pack("<I", 4), struct.pack("<I", value)]
    return b"".join([*parts, text("tokenizer.ggml.tokens"), struct.pack("<IIQ", 9, 8, 49152)])


def test_a_gguf_file_is_read_as_far_as_its_tokens(tmp_path: Path) -> None:
    names = {"embedding_length": 576, "attention.head_count": 9, "attention.head_count_kv": 3, "context_length": 8192}
    stated = {
        "general.architecture": "llama",
        "general.tags": ["a", "b"],
        **{f"llama.{k}": v for k, v in names.items()},
    }
    (tmp_path / "x.gguf").write_bytes(header(**stated))
    assert sizes_of(str(tmp_path / "x.gguf")) == Sizes(9, 3, 64, causal=True, longest=8192)
    (tmp_path / "x.gguf").write_bytes(header(**stated)[:60])
    with pytest.raises(UsageError, match="does not state its heads"):
        sizes_of(str(tmp_path / "x.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match="does not state its heads"):
        sizes_of(str(tmp_path / "x.gguf"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("family", ["Llama", "GPT-2", "OPT", "BERT", "DistilBERT", "ModernBERT"])
def test_a_configuration_states_what_the_model_turns_out_to_have(family: str, bare: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")
    from attnbench.models.pretrained.language_model import LanguageModel
    from tests.models.pretrained import families

    model = families.make(families.FAMILIES[family])
    model = model.base_model if bare else model
    model.save_pretrained(tmp_path)
    (layer,) = {replace(one, kept="", kind="") for one in LanguageModel(family, model, 16).layers}
    found = sizes_of(str(tmp_path))
    shape = layer.shape
    assert (found.heads, found.kv_heads) == (shape.H, shape.H // layer.sharing)
    assert (found.head_dim, found.causal) == (shape.D, shape.causal)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_the_library_answers_by_itself_and_by_the_variant(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")
    from attnbench.models.pretrained.language_model import LanguageModel
    from tests.models.pretrained import families

    subject = LanguageModel("tiny", families.make(families.FAMILIES["Llama"]), 16)
    tokens = torch.randint(61, (2, 16))
    with torch.inference_mode():
        assert torch.equal(subject.answer(tokens), subject.read(tokens).logits)
        own = subject.copy()
        own.restore()
        assert own.module.config._attn_implementation != subject.module.config._attn_implementation
        assert own.answer(tokens) == pytest.approx(subject.answer(tokens), abs=1e-5)
        with pytest.raises(Unsupported, match="0 of its 3 attention layers were reached"):
            own.answer(tokens, lambda place, q, k, v, exact: v)
        mean = subject.answer(tokens, lambda place, q, k, v, exact: v.mean(-2, keepdim=True).expand_as(q))
        assert not torch.allclose(mean, subject.answer(tokens), atol=1e-3)


def test_a_row_may_say_that_a_loss_fell_but_not_that_it_left_its_interval() -> None:
    from attnbench.measure.status import Status
    from attnbench.results.record import Record

    row = Record.of(cell("softmax"), Status.OK, loss_delta=-0.2, loss_delta_low=-0.3, loss_delta_high=0.1, kl=-1e-9)
    assert checked(row) is row
    with pytest.raises(ValueError, match="loss_delta is above loss_delta_high"):
        checked(replace(row, loss_delta=0.2))
    with pytest.raises(ValueError, match="loss is -1"):
        checked(replace(row, loss=-1.0))


@pytest.mark.usefixtures("forks")
def test_a_suite_runs_by_the_command_goes_on_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    Path("s.yaml").write_text(
        "name: s\nmin_time: 0.01\nrounds: 1\nsweeps:\n- name: p\n  level: pretrained\n  measure: [time, memory, loss]\n"
        "  model: listops\n  windows: 6\n  matrix: {variant: [none, 'local:window=4', linformer], seq_len: 24}\n"
    )
    run = ["run", "s.yaml", "--device", "cpu", "--threads", "1", "--out", "out"]
    assert main(run) == Exit.OK
    said = capsys.readouterr().out
    assert "linformer" in said
    assert "unsupported" in said
    (folder,) = Path("out/s").iterdir()
    with (folder / "results.csv").open(newline="") as file:
        rows = {row["label"]: row for row in csv.DictReader(file)}
    none, local = rows["none"], rows["local:window=4"]
    assert (rows["linformer"]["status"], rows["linformer"]["time_median_s"]) == ("unsupported", "")
    assert "rank 256 is above the 24 keys" in rows["linformer"]["reason"]
    assert (none["status"], none["family"], none["model"], none["heads"]) == ("ok", "exact", "listops", "2")
    assert float(none["loss_delta"]) == 0.0
    assert float(local["loss"]) == pytest.approx(measure_loss(cell("local:window=4"))["loss"], abs=1e-6)
    assert float(local["time_median_s"]) > 0
    assert int(local["peak_bytes"]) > 0
    assert local["warnings"] == "" or "the cell" not in local["warnings"]
    before = (folder / "records.jsonl").read_bytes()
    assert main(run) == Exit.OK
    assert (folder / "records.jsonl").read_bytes() == before, "there was nothing left to do"
    assert main(["plot", str(folder)]) == Exit.OK
    assert (folder / "plots" / "tradeoff.svg").is_file()


def test_a_visit_keeps_one_model_for_the_next() -> None:
    cached.forget()
    record, _ = run_cell(VisitCell(cell("softmax"), QUICK))
    assert record.status == "ok", record.reason
    assert (record.model, record.text, record.windows) == ("listops", "ListOps trees", W)
    assert len(cached._results) == 1


def test_no_two_inputs_of_a_call_are_the_same_however_short_the_text() -> None:
    few = cell("softmax", shape=replace(SHAPE, batch=1))
    seen = [prepare(few).on(number)() for number in range(12)]
    assert not any(torch.equal(one, other) for place, one in enumerate(seen) for other in seen[:place])
