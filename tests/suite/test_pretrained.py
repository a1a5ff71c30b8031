from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from attnbench.errors import SuiteError
from attnbench.harness.forecast import estimate
from attnbench.harness.plan import Options, make_plan
from attnbench.suite.cell import Cell, Pretrained
from attnbench.suite.expand import apply_overrides
from attnbench.suite.load import load_suite
from attnbench.suite.schema import Suite

PLAIN = """name: x
sweeps:
- name: s
  level: pretrained
  measure: [time, loss]
  model: listops
  matrix:
    variant: [none, sdpa]
    seq_len: 64
"""


needs_models = pytest.mark.skipif(
    not find_spec("transformers"), reason="needs the extra models: make .venv/installed-models"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


def cells_of(file: Path, text: str) -> list[Cell]:
    file.write_text(text)
    return make_plan(file, Options(device="cpu")).cells


def test_the_sizes_of_the_model_are_filled_in(file: Path) -> None:
    cells = cells_of(file, PLAIN)
    assert [cell.variant.label for cell in cells] == ["none", "sdpa"]
    for cell in cells:
        shape = cell.shape
        assert (shape.H, shape.K, shape.D, shape.causal, shape.N) == (2, 2, 32, False, 64)
        assert cell.pretrained == Pretrained("listops", "", 16)
        assert cell.measure == ("time", "loss")
        assert Cell.from_json(cell.to_json()) == cell


def test_sizes_that_are_the_models_may_be_named(file: Path) -> None:
    named = PLAIN + "    heads: 2\n    kv_heads: null\n    causal: false\n"
    assert cells_of(file, named) == cells_of(file, PLAIN)


def test_windows_tell_cells_apart_where_a_loss_is_measured(file: Path) -> None:
    first = cells_of(file, PLAIN)[0]
    other = cells_of(file, PLAIN.replace("  model", "  windows: 8\n  model"))[0]
    assert first.cell_id != other.cell_id
    assert cells_of(file, PLAIN.replace(", loss", ""))[0].pretrained == Pretrained("listops", "", 0)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("64", "64\n    heads: 4", 10, "'heads': the model listops has 2, not 4; remove heads"),
        ("64", "64\n    causal: true", 10, "'causal': the model listops has false, not true; remove causal"),
        ("seq_len: 64", "seq_len: 256", 9, "'seq_len': the model listops reads at most 128 tokens, not 256"),
        ("64", "64\n    padding: 0.5", 10, "'padding' is the trained model's own at level pretrained; remove it"),
        ("64", "64\n    task: recall", 10, "'task' is the trained model's own at level pretrained; remove it"),
        pytest.param(
            *("listops", "no-such-model", 6, "no model 'no-such-model'; give a folder with config.json"),
            marks=needs_models,
        ),
        ("listops", "listops\n  text: a.txt", 7, "'text': the model listops reads trees of its own; remove text"),
        pytest.param(
            *("listops", "some-folder\n  text: a.txt", 7, "'text': no file 'a.txt'; check the path"),
            marks=needs_models,
        ),
        ("  model: listops\n", "", 4, "'model' is missing, without which there is nothing trained"),
        ("model: listops", "model: {layers: 2}", 6, "'model' must be the name of a trained model, not sizes"),
        ("model: listops", "model: 5", 6, "'model' must be a mapping, got 5"),
        ("pretrained", "model", 6, "'model' must be sizes at level model, got 'listops'"),
        ("pretrained", "layer", 6, "'model' does nothing at level layer; remove it or write level: pretrained"),
        ("  model: listops", "  model: listops\n  pass: decode", 7, "has no pass decode; write pass: forward"),
        ("  model: listops", "  model: listops\n  windows: 5", 7, "'windows' must be at least 6, got 5"),
        ("[time, loss]\n", "[time]\n  windows: 8\n", 6, "'windows' does nothing without measure: loss"),
        ("[time, loss]", "[time, score]", 5, "'score' is measured by training a model"),
        ("[time, loss]", "[time, error]", 5, "'error' is measured at level operator only"),
        ("[none, sdpa]", "[nonne]", 8, "unknown variant 'nonne'"),
    ],
)
def test_a_mistake_is_one_line_with_its_place_and_its_remedy(
    old: str, new: str, line: int, said: str, file: Path
) -> None:
    assert old in PLAIN
    with pytest.raises(SuiteError) as refused:
        cells_of(file, PLAIN.replace(old, new))
    assert str(refused.value).startswith(f"{file}:{line}: ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["text: a.txt", "windows: 8", "measure: [loss]"])
def test_what_is_for_trained_models_is_refused_elsewhere(key: str, file: Path) -> None:
    file.write_text(f"name: x\nsweeps:\n- name: s\n  {key}\n  matrix: {{variant: sdpa, seq_len: 64}}\n")
    with pytest.raises(SuiteError, match="write level: pretrained"):
        load_suite(file)


def test_a_model_as_it_is_stands_only_where_one_is_trained(file: Path) -> None:
    with pytest.raises(SuiteError, match=r"x.yaml:4: 'variant': none is a trained model as it is; write level: pretr"):
        cells_of(file, "name: x\nsweeps:\n- name: s\n  matrix: {variant: [sdpa, none], seq_len: 64}\n")


def test_axes_that_the_model_has_itself_are_left_alone_by_an_override(file: Path) -> None:
    file.write_text(PLAIN + "- name: t\n  matrix: {variant: sdpa, seq_len: 64}\n")
    cells = make_plan(apply_overrides(load_suite(file), {"padding": "0.5"}), Options(device="cpu")).cells
    assert [cell.padding for cell in cells] == [0.0, 0.0, 0.5]


def test_the_schema_takes_a_name_or_sizes() -> None:
    key = TypeAdapter(Suite).json_schema()["$defs"]["Sweep"]["properties"]["model"]
    assert key["anyOf"] == [{"$ref": "#/$defs/Size"}, {"type": "string"}, {"type": "null"}]


def test_planning_and_estimating_read_no_weights(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of(file, PLAIN)
    for needed in ("models.pretrained.pretrained_cell.open_model", "models.pretrained.listops.small_encoder.load_file"):
        monkeypatch.setattr(f"attnbench.{needed}", None)
    found = [one for _, one in estimate(cells, 1)]
    assert {one.reason for one in found} == {"without what flash_cpu holds inside"}
    layers, width, n = 4, 64, 64
    products = 2 * n * (layers * (3 + 1 + 2 + 2) * width**2 + width * 10)  # qkv, merge and the two of feed; the classes
    assert {one.matmul_flops for one in found} == {products + layers * 4 * n * n * width}


def test_a_loss_alone_has_nothing_to_foresee_but_a_refusal(file: Path) -> None:
    cells = cells_of(file, PLAIN.replace("time, ", "").replace("sdpa", "fnet"))
    fine, refused = (one.reason for _, one in estimate(cells, 1))
    assert fine == "loss only"
    assert refused.startswith("unsupported: a mixer replaces the projections as well")


def test_without_the_library_a_model_of_it_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SuiteError, match=r"x.yaml:6: this model needs transformers; install it with: pip install"):
        cells_of(file, PLAIN.replace("listops", "some-folder"))
