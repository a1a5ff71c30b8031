from __future__ import annotations

from dataclasses import replace

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import UsageError
from attnbench.suite.cell import Cell, ModelSize
from attnbench.suite.describe import address, name, varying
from attnbench.suite.select import choose

CELL = Cell(
    "s", "speed", parse_spec("performer:features=64"), Shape(seq_len=4096, heads=4), inputs=parse_spec("gaussian")
)
CAUSAL = replace(
    CELL, shape=replace(CELL.shape, causal=True, bias="alibi"), dtype="bfloat16", compile=True, padding=0.5
)
MODEL = replace(CELL, level="model", pass_="training", model=ModelSize())
LONGER = replace(CELL, shape=replace(CELL.shape, seq_len=40960), dtype="float16")
CELLS = [CELL, CAUSAL, MODEL, LONGER]


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("speed", CELLS),
        ("causal", [CAUSAL]),
        ("not causal and operator", [CELL, LONGER]),
        ("bfloat16", [CAUSAL]),
        ("float16", [LONGER]),
        ("alibi", [CAUSAL]),
        ("compiled", [CAUSAL]),
        ("padding", [CAUSAL]),
        ("model", [MODEL]),
        ("training", [MODEL]),
        ("forward", [CELL, CAUSAL, LONGER]),
        ("gaussian", [CELL, CAUSAL, LONGER]),
        ("n4096", [CELL, CAUSAL, MODEL]),
        ("n40960", [LONGER]),
        ("heads=4", CELLS),
        ("features=6 or n4", []),
    ],
)
def test_every_axis_of_a_cell_is_chosen_by_its_word(expression: str, chosen: list[Cell]) -> None:
    if chosen:
        assert choose(expression, CELLS) == chosen
    else:
        with pytest.raises(UsageError):
            choose(expression, CELLS)


@pytest.mark.parametrize(
    ("expression", "remedy"),
    [
        ("perfomer", "no cell has 'perfomer'; did you mean 'performer'?"),
        ("n4096 and not xyz and backward", f"no cell has 'xyz'; a cell is called {address(CELL)}"),
        ("model and causal", f"no cell matches; a cell is called {address(CELL)}"),
    ],
)
def test_a_choice_of_nothing_says_which_word_is_in_no_cell_and_what_cells_are_called(
    expression: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        choose(expression, CELLS)
    assert str(refused.value) == f"-k {expression!r}: {remedy}"


def test_an_address_holds_every_axis() -> None:
    assert address(CAUSAL) == (
        "speed/performer:features=64/n4096/operator/forward/causal/alibi/compiled/bfloat16/gaussian/"
        "batch=1/heads=4/head_dim=64/padding=0.5/seed=0"
    )
    assert "gaussian" not in address(MODEL)  # a model reads tokens


def test_a_name_holds_the_axes_in_which_cells_of_one_sweep_differ() -> None:
    axes = varying([CELL, CAUSAL])
    assert axes == ["causal", "bias", "compile", "padding", "dtype"]
    assert (
        name(CAUSAL, axes)
        == "performer:features=64 n=4096 causal=true bias=alibi compile=true padding=0.5 dtype=bfloat16"
    )
    assert varying([CELL, replace(CAUSAL, sweep="other")]) == []
    assert name(CELL, []) == "performer:features=64 n=4096"
