"""The axis of positions: one value for a layer or a model, whether a matrix says it or the sizes of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnbench.answers.gate.phrases import address as address_of_row
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import SuiteError, UsageError
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.models.encoder import Encoder, sinusoids
from attnbench.results.frame.words import in_words, is_expected
from attnbench.results.record import Record
from attnbench.suite.axes import POSITIONS
from attnbench.suite.cell import Cell, ModelSize, Positions
from attnbench.suite.describe import address
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

SHAPE = Shape(1, 2, 12, 8, causal=True)


def suite(level: str = "model", model: dict[str, Any] | None = None, **more: Any) -> Suite:
    sweep = {"name": "w", "level": level, "matrix": {"variant": "softmax", "seq_len": 8, **more}}
    return Suite.of({"name": "s", "sweeps": [sweep | ({"model": model} if model else {})]}, Origin("x.yaml"))


def positions_of(cells: list[Cell]) -> list[object]:
    return [cell.at("positions") for cell in cells]


def measure(**changes: Any) -> Record:
    cell = Cell("s", "w", Spec("softmax"), SHAPE, **changes)
    return run_cell(VisitCell(cell, TimingRules(quick=True)))[0]


def test_the_axis_has_the_values_of_the_type() -> None:
    assert set(POSITIONS) == set(Positions.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", POSITIONS)
def test_a_matrix_and_the_sizes_of_the_model_say_the_same(kind: str) -> None:
    (listed,), (sized,) = expand(suite(positions=kind)), expand(suite(model={"positions": kind}))
    assert listed == sized
    assert listed.cell_id == sized.cell_id
    assert positions_of([listed, sized]) == [kind, kind]
    record = Record.of(listed, Status.OK)
    assert record.positions == kind
    assert address_of_row(record) == address(listed)
    assert ("/learned" in address(listed)) is False
    assert (f"/{kind}" in address(listed)) is (kind != "learned")


def test_one_sweep_has_several_and_each_is_another_cell() -> None:
    cells = expand(suite(positions=list(POSITIONS)))
    assert positions_of(cells) == list(POSITIONS)
    assert len({cell.cell_id for cell in cells}) == len(POSITIONS)
    layers = expand(suite("layer", positions=["none", "rotary"]))
    assert positions_of(layers) == [None, "rotary"]
    assert layers[0] == expand(suite("layer"))[0]
    assert [Record.of(cell, Status.OK).positions for cell in layers] == ["", "rotary"]


def test_without_quotes_none_is_none() -> None:
    assert positions_of(expand(suite(positions=[None, "learned"]))) == ["none", "learned"]


def test_set_goes_before_the_sizes_of_the_model() -> None:
    changed = apply_overrides(suite(model={"layers": 2, "positions": "sinusoid"}), {"positions": "rotary,none"})
    assert positions_of(expand(changed)) == ["rotary", "none"]
    assert {cell.model.layers for cell in expand(changed) if cell.model} == {2}


def test_a_suite_says_them_once() -> None:
    said = r"x.yaml:1: 'positions' stands in the matrix as well; remove one of them"
    with pytest.raises(SuiteError, match=said):
        suite(model={"positions": "learned"}, positions="rotary")


def test_excluded_is_what_a_cell_has_without_saying_so() -> None:
    asked = suite(heads=[1, 2])
    for level, kind in (("model", "learned"), ("layer", "none")):
        data = {**asked.data, "exclude": [{"positions": kind, "heads": 2}]}
        data["sweeps"] = [{**data["sweeps"][0], "level": level}]
        assert [cell.shape.H for cell in expand(Suite.of(data, Origin("x.yaml")))] == [1]


def test_attention_alone_has_none() -> None:
    with pytest.raises(SuiteError, match="'positions' does nothing at level operator; remove it or write level: layer"):
        suite("operator", positions="rotary")
    with pytest.raises(UsageError, match="--positions rotary: that is a matter of layers; add --level layer or model"):
        CompareQuestion(["softmax", "linear"], 8, axes={"positions": "rotary"}, device="cpu").prepare()
    record = measure(positions="rotary")
    assert (record.status, record.reason.partition(":")[0]) == (Status.UNSUPPORTED, "positions")


@pytest.mark.parametrize("kind", ["learned", "sinusoid"])
def test_a_layer_has_nothing_to_add_them_to(kind: Positions) -> None:
    record = measure(level="layer", positions=kind)
    assert record.status is Status.UNSUPPORTED
    assert "a model adds" in record.reason


@pytest.mark.parametrize("pass_", ["forward", "training", "decode", "stepwise", "generate"])
def test_a_layer_is_measured_with_rotary_ones(pass_: Any) -> None:
    record = measure(level="layer", pass_=pass_, positions="rotary")
    assert record.status is Status.OK, record.reason
    assert record.positions == "rotary"


def test_compare_asks_for_them() -> None:
    for level, kind, said in (
        ("layer", "rotary", "rotary positions"),
        ("model", "none", "no positions"),
        ("model", "learned", ""),
        ("layer", "none", ""),
    ):
        contest = CompareQuestion(
            ["softmax", "linear"],
            8,
            axes={"positions": kind},
            level=level,
            device="cpu",  # type: ignore[arg-type]  # from the table
        ).prepare()
        assert contest.cells[0].at("positions") == (None if (level, kind) == ("layer", "none") else kind)
        assert (said in str(contest)) if said else ("positions" not in str(contest))


def test_where_some_are_usual_none_is_news() -> None:
    words: Callable[[str], str] = lambda kind: in_words("positions", kind)  # noqa: E731
    assert [words(kind) for kind in ("none", "rotary", "")] == ["no positions", "rotary positions", "unknown positions"]
    assert [is_expected("positions", kind) for kind in ("learned", "", "none", "rotary")] == [True, True, False, False]


def test_a_model_that_is_given_another_size_has_its_positions() -> None:
    cell = Cell("s", "w", Spec("softmax"), SHAPE, level="model", positions="rotary")
    assert cell.model == ModelSize(positions="rotary")
    assert replace(cell, model=ModelSize(layers=2)).at("positions") == "learned"


def test_sinusoids_stay_as_they_are_unless_they_are_called_learned() -> None:
    tokens, table = torch.randint(9, (2, 7)), sinusoids(7, 8)
    for kind, learns in (("sinusoid", False), ("trained-sinusoid", True), ("learned", True)):
        model = Encoder("softmax", Shape(2, 2, 7, 4), ModelSize(1, 8, 9, positions=kind))  # type: ignore[arg-type]
        assert torch.equal(model.position, table) == (kind != "learned")
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        model(tokens).square().sum().backward()
        optimiser.step()
        assert torch.equal(model.position, table) == (kind == "sinusoid")
        assert ("position" in dict(model.named_parameters())) == learns
