"""The kind of a model is an axis: it says where kv_len and causal mean something."""

from __future__ import annotations

from typing import Any

import pytest

from attnbench.errors import SuiteError, UsageError
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.suite.cell import Cell
from attnbench.suite.describe import address
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite
from attnbench.suite.select import choose


def suite(level: str = "model", **axes: Any) -> Suite:
    matrix = {"variant": "softmax", "seq_len": 64, **axes}
    return Suite.of({"name": "s", "sweeps": [{"name": "w", "level": level, "matrix": matrix}]}, Origin("x.yaml"))


def only(cells: list[Cell]) -> Cell:
    (cell,) = cells
    return cell


def test_an_encoder_decoder_reads_kv_len_tokens_and_writes_seq_len() -> None:
    cell = only(expand(suite(architecture="encoder-decoder", kv_len=128)))
    assert (cell.shape.N, cell.shape.M, cell.shape.causal) == (64, 128, False)
    assert not only(expand(suite(architecture="encoder-decoder", causal=[False, True]))).shape.causal


def test_a_decoder_is_causal_whatever_the_suite_says() -> None:
    cell = only(expand(suite(architecture="decoder", causal=[False, True])))
    assert cell.shape.causal


def test_several_kinds_of_models_are_cells_with_addresses_of_their_own() -> None:
    cells = expand(suite(architecture=["encoder", "decoder", "encoder-decoder"]))
    assert len({cell.cell_id for cell in cells}) == 3
    assert ["decoder" in address(cell).split("/") for cell in cells] == [False, True, False]
    assert choose("encoder-decoder", cells) == cells[2:]


@pytest.mark.parametrize(
    ("level", "axes", "said"),
    [
        ("layer", {"architecture": "decoder"}, "does nothing at level layer; remove it or write level: model"),
        ("model", {"kv_len": 32}, "'kv_len' does nothing in a model of one sequence; remove it or write architecture: "
         "encoder-decoder"),
        ("model", {"kv_len": 32, "architecture": "decoder"}, "'kv_len' does nothing in a model of one sequence"),
        ("layer", {"kv_len": 32}, "'kv_len' does nothing at level layer; remove it or write level: operator"),
        ("model", {"task": "copy", "architecture": "decoder"}, "a task is answered by an encoder; remove"),
        ("model", {"architecture": "decodr"}, "'architecture' cannot be 'decodr'; did you mean 'decoder'?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_remedy(level: str, axes: dict[str, Any], said: str) -> None:
    with pytest.raises(SuiteError) as refused:
        suite(level, **axes)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_kv_len_can_be_set_together_with_the_architecture_in_any_order() -> None:
    asked = {"kv_len": "32,128", "architecture": "encoder-decoder"}
    for overrides in (asked, dict(reversed(asked.items()))):
        assert [cell.shape.M for cell in expand(apply_overrides(suite(), overrides))] == [32, 128]
    with pytest.raises(UsageError, match="only sweeps at level operator or of an encoder-decoder have this axis"):
        apply_overrides(suite(), {"kv_len": "32"})
    with pytest.raises(UsageError, match="--set architecture: only sweeps at level model have this axis"):
        apply_overrides(suite("operator"), {"architecture": "decoder"})


def test_compare_refuses_an_architecture_without_a_model() -> None:
    with pytest.raises(UsageError, match="--architecture decoder: only a model has one; add --level model"):
        CompareQuestion(["softmax", "linear"], 8, axes={"architecture": "decoder"}, device="cpu").prepare()
    asked = CompareQuestion(
        ["softmax", "linear"], 8, axes={"architecture": "decoder"}, device="cpu", level="model"
    ).prepare()
    assert {(cell.architecture, cell.shape.causal) for cell in asked.cells} == {("decoder", True)}
