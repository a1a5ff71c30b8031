"""Published shapes by name: in suites, and for compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnbench.cli.app import main
from attnbench.cli.compare import question_of
from attnbench.contract.problem.shape import Shape
from attnbench.errors import SuiteError, UsageError
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.load import load_suite
from attnbench.suite.messages import Origin
from attnbench.suite.named_shapes import NAMED, spelled_out
from attnbench.suite.schema import Suite

DOCS = (Path(__file__).parents[2] / "docs" / "suites.md").read_text(encoding="utf-8")


def suite(matrix: dict[str, Any], **more: Any) -> Suite:
    data = {"name": "x", "sweeps": [{"name": "s", "matrix": {"variant": "sdpa", "seq_len": 8, **matrix}}], **more}
    return Suite.of(data, Origin("x.yaml"))


@pytest.mark.parametrize("name", NAMED)
def test_a_named_shape_is_a_shape_and_the_docs_name_it(name: str) -> None:
    shape = Shape(seq_len=1024, **NAMED[name])
    assert shape.causal
    assert f"`{name}`" in DOCS.partition("## Shapes by name")[2].partition("\n## ")[0]
    (cell,) = expand(suite({"shape": name}))
    assert cell.shape == Shape(seq_len=8, **NAMED[name])


def test_what_stands_beside_a_name_wins() -> None:
    cells = expand(suite({"shape": "llama3-8b", "causal": [True, False], "heads": 16}))
    assert [(cell.shape.causal, cell.shape.H, cell.shape.K) for cell in cells] == [(True, 16, 8), (False, 16, 8)]
    assert spelled_out({"heads": 4, "shape": "moba"}) == {"batch": 2, "heads": 4, "head_dim": 128, "causal": True}


def test_an_include_row_may_name_another_shape_and_an_override_wins_over_both() -> None:
    both = suite({"shape": "llama3-8b"}, include=[{"shape": "qwen3.5", "batch": 3}])
    assert [(c.shape.H, c.shape.K, c.shape.D, c.shape.B) for c in expand(both)] == [(32, 8, 128, 1), (32, 2, 256, 3)]
    wider = expand(apply_overrides(both, {"head_dim": 256, "batch": 3}))
    assert {(c.shape.K, c.shape.D, c.shape.B) for c in wider} == {(8, 256, 3), (2, 256, 3)}


def test_an_unknown_name_is_one_line_with_the_nearest() -> None:
    with pytest.raises(SuiteError, match="unknown shape 'llama3'; did you mean 'llama3-8b'"):
        suite({"shape": "llama3"})
    with pytest.raises(UsageError, match="unknown shape 'moby'; did you mean 'moba'"):
        question(shape="moby")


def question(**given: Any) -> CompareQuestion:
    return question_of(["sdpa", "softmax"], given, given.keys())


def test_compare_takes_a_shape_and_options_beside_it() -> None:
    named = question(shape="llama3-8b").axes
    assert {axis: named[axis] for axis in ("heads", "kv_heads", "head_dim", "causal")} == NAMED["llama3-8b"]
    assert question(shape="llama3-8b", heads=16).axes["heads"] == 16
    assert question(shape="llama3-8b", heads=8).axes["heads"] == 8


@pytest.mark.parametrize(("beside", "heads"), [([], 32), (["--heads", "8"], 8)])
def test_an_option_beside_a_shape_wins_also_if_it_is_the_default(
    beside: list[str], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def prepare(self: CompareQuestion) -> None:
        asked.append(self.axes["heads"])
        raise UsageError("enough")

    monkeypatch.setattr(CompareQuestion, "prepare", prepare)
    assert main(["compare", "sdpa", "softmax", "--n", "64", "--shape", "llama3-8b", *beside]) == 2
    assert asked == [heads]


def test_the_published_suite_has_the_shapes_of_its_tables() -> None:
    cells = expand(load_suite("published"), device="cuda")
    shapes = {name: [c.shape for c in cells if c.sweep == name] for name in dict.fromkeys(c.sweep for c in cells)}
    assert {s.B * s.N for s in shapes["flash"]} == {32_768}
    assert {s.H * s.D for s in shapes["flash"]} == {2048}
    table = {(1, 8192, 96, 128), (2, 16384, 16, 128), (4, 2048, 16, 128), (4, 4096, 64, 128), (8, 2048, 32, 256)}
    assert {(s.B, s.N, s.H, s.D) for s in shapes["fla"]} == table | {(8, 1024, 8, 64)}
    assert {(s.N, s.H, s.D) for s in shapes["nsa"]} >= {(8192, 32, 128), (131072, 128, 256)}
    assert {(s.N, s.M - s.N) for s in shapes["chunks"]} >= {(256, 8192), (2048, 131072)}
    assert {c.dtype for c in cells} == {"bfloat16"}


def test_the_gpu_suite_has_24_variants_beside_the_exact_kernel_in_each_sweep() -> None:
    cells = expand(load_suite("gpu"), device="cuda")
    assert len({cell.variant.name for cell in cells} - {"sdpa", "identity"}) == 24
    for sweep in {cell.sweep for cell in cells}:
        assert {cell.shape.N for cell in cells if cell.sweep == sweep and cell.variant.name == "sdpa"} == {
            4096,
            16384,
            65536,
        }
    assert {(cell.level, cell.pass_) for cell in cells} == {
        (level, pass_) for level in ("operator", "layer") for pass_ in ("forward", "training")
    }
