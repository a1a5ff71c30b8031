from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from attnbench.catalogue.attention.stack import turns
from attnbench.catalogue.build import build
from attnbench.contract.inputs import doubt, draw_sizes
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import SuiteError, Unsupported
from attnbench.suite.cell import UNTOUCHED, Cell
from attnbench.suite.document import read_document
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite, shipped_descriptions, shipped_suites, suite_path
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

ROOT = Path(__file__).parents[2]
SUITES = (
    *("catalogue", "claims", "decoding", "forms", "founding", "generate", "gpu", "headline", "headline-long"),
    *("heads", "hybrids", "kernels", "linformer", "lra", "lra-score", "operators", "packed", "performer"),
    *("positions", "precision", "prefill", "published", "pretrained", "quick", "recall-state", "scaling", "score"),
    *("score-long", "selection", "served", "share"),
)
WITH_A_PLUGIN = ("peers",)
ORACLES = {"oracle-lowrank", "oracle-topk", "oracle-blocks"}
EMULATED = {"quantised", "quantised-cache"}
BUDGETS = {"expected-attention", "h2o", "keydiff", "knorm", "quest", "snapkv", "tova"}
"""Softmax attention until something follows a prompt; then they decode."""

REFUSED = {
    "positions": {
        ("biases", name, "bias") for name in ("linear", "performer", "retnet", "gated-delta", "fox", "nystrom")
    }
}
"""Suite -> sweep, variant and axis of the rows that are there to say that nothing can be measured."""


def test_these_suites_are_shipped() -> None:
    assert shipped_suites() == sorted((*SUITES, *WITH_A_PLUGIN))


def test_a_suite_that_needs_a_plugin_says_how_to_get_it() -> None:
    with pytest.raises(
        SuiteError, match=r"peers.yaml:\d+: unknown variant 'peer.performer'; install it with: make peers$"
    ):
        load_suite("peers")


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_a_shipped_suite_has_cells_on_every_device(name: str, device: str) -> None:
    cells = expand(load_suite(name), device=device)
    assert 10 < len(cells) < 1500
    assert {cell.suite for cell in cells} == {name}


@pytest.mark.parametrize("name", SUITES)
def test_a_shipped_suite_is_the_same_by_name_and_by_path_and_after_writing_it(name: str) -> None:
    suite = load_suite(name)
    assert expand(load_suite(suite_path(name))) == expand(suite)
    assert expand(Suite.of(read_document(suite.to_yaml())[0], Origin())) == expand(suite)


def test_a_description_says_what_it_stands_beside_if_it_does_and_repeats_no_phrase() -> None:
    told = shipped_descriptions().values()
    assert 5 <= sum("stands beside" in description.lower() for description in told) < len(told)
    for description in told:
        assert "stands beside no" not in description.lower()
        assert "\n" not in description


@pytest.mark.parametrize(("name", "absent"), [("catalogue", set()), ("scaling", ORACLES | EMULATED | BUDGETS)])
def test_every_variant_of_the_package_is_in_the_suites_that_promise_it(name: str, absent: set[str]) -> None:
    ours = {entry.name for entry in VARIANTS if getattr(entry.make, "__module__", "").startswith("attnbench.")}
    cells = expand(load_suite(name))
    assert {cell.variant.name for cell in cells} == ours - absent


def test_the_catalogue_decodes_with_every_variant_that_can() -> None:
    ours = {entry.name for entry in VARIANTS if getattr(entry.make, "__module__", "").startswith("attnbench.")}
    able = {name for name in ours if VARIANTS.get(name).traits.decode} - ORACLES - EMULATED
    assert {cell.variant.name for cell in expand(load_suite("catalogue")) if cell.pass_ == "decode"} == able


@pytest.mark.parametrize("name", ["quick", "scaling", "lra", "catalogue"])
def test_what_replaces_the_layer_is_not_measured_as_an_operator(name: str) -> None:
    for cell in expand(load_suite(name)):
        assert not (cell.level == "operator" and VARIANTS.get(cell.variant.name).kind == "mixer"), cell.label


def test_the_long_range_arena_suite_is_its_released_text_configuration() -> None:
    cells = [cell for cell in expand(load_suite("lra")) if cell.sweep == "speed"]
    assert {(cell.level, cell.pass_, cell.measure) for cell in cells} == {("model", "training", ("time", "memory"))}
    assert {(cell.model.layers, cell.model.ffn, cell.model.vocab) for cell in cells if cell.model} == {(4, 1024, 256)}
    assert {(cell.shape.B, cell.shape.H, cell.shape.D) for cell in cells} == {(1, 4, 64)}
    assert [cell.shape.N for cell in cells if cell.variant.name == "softmax"] == [1024, 2048, 3072, 4096]
    on_gpu = [cell for cell in expand(load_suite("lra"), device="cuda") if cell.sweep == "speed"]
    assert {cell.shape.B for cell in on_gpu} == {32}


def test_speed_and_error_of_the_long_range_arena_suite_share_their_labels() -> None:
    cells = expand(load_suite("lra"))
    speed = {
        cell.variant for cell in cells if cell.sweep == "speed" and VARIANTS.get(cell.variant.name).kind != "mixer"
    }
    error = {cell.variant for cell in cells if cell.sweep == "error"}
    assert {spec.label for spec in speed - error} == {"identity"}


@pytest.mark.parametrize("suite", ["lra", "catalogue"])
@pytest.mark.parametrize("inputs", ["smollm2", "minilm"])
def test_errors_on_a_captured_model_are_of_all_that_have_one_there_and_of_what_it_holds(
    suite: str, inputs: str
) -> None:
    cells = [cell for cell in expand(load_suite(suite)) if cell.measure == ("error",)]
    on_captured = [cell for cell in cells if cell.sweep == inputs]
    assert {cell.inputs.name for cell in on_captured} == {inputs, "gaussian"}
    (shape,) = {cell.shape for cell in on_captured}
    draw_sizes(Spec(inputs), shape, 0)  # raises where the file does not hold it
    assert doubt(Spec(inputs), shape) == ""

    def fits(spec: Spec) -> bool:
        try:
            build(spec, shape)
        except Unsupported:
            return False
        return True

    elsewhere = {cell.variant for cell in cells if cell.sweep in ("error", "oracles")}
    assert {cell.variant for cell in on_captured} == {spec for spec in elsewhere if fits(spec)}


def test_the_linformer_suite_leaves_out_ranks_that_save_nothing() -> None:
    for cell in expand(load_suite("linformer"), device="cuda"):
        if cell.variant.name == "linformer":
            assert dict(cell.variant.options).get("rank", 256) < cell.shape.N


def test_the_list_of_packages_is_complete() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "attnbench").rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(settings["packages"]) == packages | {"attnbench.suites"}


def test_what_is_built_holds_the_suites(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    commands = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path]
    code = [sys.executable, "setup.py", "-q", *commands, "--build-lib", tmp_path / "lib"]
    subprocess.run(code, cwd=ROOT, check=True, capture_output=True)
    built = tmp_path / "lib" / "attnbench" / "suites"
    assert sorted(path.stem for path in built.glob("*.yaml")) == sorted((*SUITES, *WITH_A_PLUGIN))


@pytest.mark.parametrize("name", SUITES)
def test_every_variant_of_a_shipped_suite_can_be_built_at_its_shortest_length(name: str) -> None:
    shortest: dict[tuple[str, str], Cell] = {}
    for cell in expand(load_suite(name)):
        known = shortest.setdefault((cell.sweep, cell.variant.label), cell)
        if cell.shape.N < known.shape.N:
            shortest[cell.sweep, cell.variant.label] = cell
    refused = set()
    for cell in shortest.values():
        if cell.variant.name != UNTOUCHED:
            try:
                for layer in turns(cell.variant):
                    build(layer, cell.shape)
            except Unsupported as no:
                if str(no).startswith("form=triton needs"):  # a GPU, or the interpreter of its code
                    continue
                refused.add((cell.sweep, cell.variant.name, str(no).partition(":")[0]))
    assert refused == REFUSED.get(name, set())
