"""Stacks: a name for models whose layers are several variants in turn, wherever one names a variant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnbench.catalogue.attention.stack import refusal, turns
from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, No
from attnbench.errors import SuiteError, Unsupported, UsageError
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.score.score import score
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.models.decoder import Decoder, EncoderDecoder
from attnbench.models.encoder import Encoder, as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, ModelSize
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite
from tests.harness.score.models import cell as trainable

SHAPE = Shape(2, 2, 10, 4)
SIZE = ModelSize(layers=5, ffn=16, vocab=20)
CELL = Cell(
    "s", "t", parse_spec("stack:layers=2*gla[rank=3]+sdpa"), SHAPE, level="model", model=SIZE, measure=("time",)
)


def measure(cell: Cell) -> Record:
    return run_cell(VisitCell(cell, TimingRules(quick=True)))[0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("stack:3*gla+sdpa", ["gla", "gla", "gla", "sdpa"]),
        ("stack:layers=gla+local[window=64]", ["gla", "local:window=64"]),
        ("stack:sdpa", ["sdpa"]),
        (
            "stack:layers=kernel[sim=relu2,order=dense]+2*gla[rank=4]",
            ["kernel:order=dense,sim=relu2", *["gla:rank=4"] * 2],
        ),
        ("gla:rank=4", ["gla:rank=4"]),
    ],
)
def test_a_stack_names_the_variants_that_layers_have_in_turn(text: str, names: list[str]) -> None:
    assert [spec.label for spec in turns(parse_spec(text))] == names


def test_the_layers_of_a_stack_are_those_of_the_variants_that_it_names() -> None:
    stack, listed = (
        Encoder("stack:layers=2*gla[rank=3]+sdpa", SHAPE, SIZE),
        Encoder(["gla:rank=3"] * 2 + ["sdpa"], SHAPE, SIZE),
    )
    tokens = torch.randint(20, (2, 10))
    assert torch.equal(stack(tokens), listed(tokens))
    assert [type(block.layer).__name__ for block in stack.blocks] == ["GLA", "GLA", "MultiHead", "GLA", "GLA"]


def test_it_writes_token_by_token_what_it_scores_in_one_call() -> None:
    model, tokens = Decoder("stack:layers=gla[rank=3]+sdpa", SHAPE, SIZE).double(), torch.randint(20, (2, 10))
    expected, (state, rows) = model(tokens), (model.begin(tokens[:, :4]), [])
    for t in range(4, 10):
        row, state = model.step(state, tokens[:, t : t + 1])
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), expected[:, 4:], rtol=1e-9, atol=1e-10)


def test_the_row_of_a_stack_names_it() -> None:
    record = measure(CELL)
    assert record.status is Status.OK, record.reason
    assert record.label == "stack:layers=2*gla[rank=3]+sdpa"
    assert json.loads(record.options) == {"layers": "2*gla[rank=3]+sdpa"}
    assert record.own_form.startswith("gla:rank=3: ")
    assert replace(CELL, shape=replace(SHAPE, causal=True)).cell_id != CELL.cell_id


def test_a_suite_names_stacks_among_its_variants(tmp_path: Path) -> None:
    file = tmp_path / "stacks.yaml"
    text = """
name: stacks
sweeps:
  - name: models
    level: model
    measure: time
    model: {layers: 4}
    matrix:
      variant: ["stack:3*gla+sdpa", {name: stack, layers: [gla+sdpa, "gla[rank=4]+sdpa"]}, sdpa]
      seq_len: 64
"""
    file.write_text(text, encoding="utf-8")
    assert [cell.variant.label for cell in expand(load_suite(str(file)))] == [
        "stack:layers=3*gla+sdpa",
        "stack:layers=gla+sdpa",
        "stack:layers=gla[rank=4]+sdpa",
        "sdpa",
    ]
    file.write_text(text.replace("3*gla+sdpa", "3*glaa+sdpa"), encoding="utf-8")
    with pytest.raises(SuiteError, match=r"stacks.yaml:9: .*unknown variant 'glaa'; did you mean 'gla'\?"):
        load_suite(str(file))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stack", "option 'layers' is required"),
        ("stack:3*gla+", "'' is not a variant such as gla, 3\\*gla"),
        ("stack:0*gla", "is not a variant"),
        ("stack:gla+stack", "a stack has no stack in it"),
        ("stack:layers=gla[rank=x]", "rank=x must be a whole number"),
        ("stack:1001*gla", "more than 1000 layers in one turn"),
        ("stack:99999999999*gla", "is not a variant"),
    ],
)
def test_what_is_no_stack_is_told(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Encoder(text, SHAPE, SIZE)


def test_no_single_layer_is_a_stack() -> None:
    for make in (build, as_layer):
        with pytest.raises(Unsupported, match="a stack has layers of several variants; use level model"):
            make("stack:gla+sdpa", SHAPE)
    for level in ("operator", "layer"):
        record = measure(replace(CELL, level=level, model=None))
        assert record.status is Status.UNSUPPORTED
        assert "level" in record.reason
    with pytest.raises(Unsupported, match="one sequence"):
        EncoderDecoder("stack:gla+sdpa", SHAPE, SIZE)


def test_a_stack_can_do_what_all_of_its_variants_can() -> None:
    claims = VARIANTS.get("stack").claims(parse_spec("stack:gla+linformer"), causal=False)
    assert str(claims.causal).startswith("linformer: ")
    assert claims.stochastic
    causal = replace(SHAPE, causal=True)
    assert str(refusal(parse_spec("stack:gla+xca"), causal)).startswith("xca: causal: ")
    assert refusal(parse_spec("stack:gla+sdpa"), causal, decode=True) is None
    assert refusal(parse_spec("xca"), causal) == f"causal: {VARIANTS.get('xca').traits.causal}"
    for part in ("fnet", "linformer"):
        record = measure(replace(CELL, variant=parse_spec(f"stack:gla+{part}"), architecture="decoder"))
        assert record.status is Status.UNSUPPORTED


def test_what_pads_or_decodes_asks_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    padded, decoding = replace(CELL, padding=0.5), replace(CELL, architecture="decoder", pass_="decode")
    assert measure(padded).status is Status.OK
    assert measure(decoding).status is Status.OK
    linear = VARIANTS.get("linear")
    unable = replace(linear.traits, key_padding=No("it knows no padding"), decode=No("it has no steps"))
    monkeypatch.setitem(VARIANTS._entries, "linear", replace(linear, traits=unable))
    for cell, reason in ((padded, "key padding: it knows no padding"), (decoding, "decode: it has no steps")):
        record = measure(replace(cell, variant=parse_spec("stack:gla+linear")))
        assert (record.status, record.reason) == (Status.UNSUPPORTED, f"linear: {reason}")


def test_it_is_found_by_name_and_stands_in_no_list_of_variants() -> None:
    assert "stack" in VARIANTS
    assert "stack" not in VARIANTS.names()
    assert "stack" not in [entry.name for entry in VARIANTS]
    with pytest.raises(UsageError, match="'stack' is registered already"):
        VARIANTS.add(VARIANTS.get("stack"))


def test_a_stack_is_trained_and_scored_like_any_other_model() -> None:
    scored = score(trainable("stack:layers=gla[rank=3]+sdpa", steps=4))
    alone = score(trainable("sdpa", steps=4))
    assert scored.columns["trainable_params"] > alone.columns["trainable_params"]  # by the gates of one layer
    assert 0 <= scored.columns["score"] <= 1
    with pytest.raises(Unsupported, match="guide: stack replaces the layer"):
        score(trainable("stack:gla+sdpa", steps=4, guide=1.0))
