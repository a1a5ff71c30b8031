"""An axis stands once in the table, as a field, and as a column; everything else follows."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

import attnbench.cli.compare
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.results.record import COLUMNS
from attnbench.suite.axes import AXES, IN_ROWS, Axis
from attnbench.suite.cell import Cell, Training

OWNERS = {"cell": Cell, "shape": Shape, "training": Training}


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_what_has_the_axis_has_a_field_with_its_default(axis: Axis) -> None:
    defaults = {field.name: field.default for field in fields(OWNERS[axis.of])}
    assert axis.name in defaults, f"attnbench/{axis.of}.py: {OWNERS[axis.of].__name__} has no field {axis.name}"
    assert axis.required or defaults[axis.name] == axis.default


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_is_a_column(axis: str) -> None:
    assert axis in COLUMNS, f"attnbench/results/record.py: Record has no column {axis}"


@pytest.mark.parametrize(
    "axis", [axis for axis in IN_ROWS if axis != "kv_len"]
)  # lengths of compare are self-attention
@pytest.mark.parametrize("compare", [attnbench.compare, attnbench.cli.compare.compare], ids=["Python", "command"])
def test_compare_takes_every_axis_in_which_rows_may_differ(compare: object, axis: str) -> None:
    parameters = {name.rstrip("_"): one for name, one in inspect.signature(compare).parameters.items()}
    assert axis in parameters, f"{compare.__module__}: compare has no parameter {axis}"
    default = AXES[axis].default
    assert parameters[axis].default == (default.label if isinstance(default, Spec) else default)


def test_an_axis_that_follows_another_stands_for_its_value() -> None:
    following = [axis for axis in AXES.values() if axis.same_as]
    assert [axis.name for axis in following] == ["kv_len", "kv_heads", "qk_heads", "v_dim", "test_len"]
    assert all(axis.default is None and axis.same_as in AXES for axis in following)


PRETENCE = """
import importlib.util, json, sys
from dataclasses import replace
from pathlib import Path

def load(name, before, added):
    spec = importlib.util.find_spec(name)
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert source.count(before) == 1, name
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(before, before + added), spec.origin, "exec"), module.__dict__)

load("attnbench.suite.axes", "_TABLE = (\\n",
    '    Axis("shift", Whole(0, 9), "cell", "how far", default=0, added=True),\\n')
load("attnbench.suite.cell", "    padding: float = 0.0\\n", "    shift: int = 0\\n")
load("attnbench.results.record", "    new_tokens: int\\n", "    shift: int\\n")

from attnbench.suite.cell import Cell
from attnbench.cli import completion
from attnbench.answers.match.budget import circumstances
from attnbench.results.key import key_of
from attnbench.answers.match.from_run import _SHAPE
from attnbench.results.export import tables as export_tables
from attnbench.answers.gate.phrases import address as address_of_row, name, telling
from attnbench.results.frame.words import in_words
from attnbench.results.frame.settings import SAME
from attnbench.results.record import Record
from attnbench.answers.report.table_rows import _ABOUT
from attnbench.harness.compare.compare import _ASKED
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.measure.status import Status
from attnbench.suite.describe import address, varying
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite
from attnbench.results.trainings import SAME_MODEL

matrix = {"variant": "softmax", "seq_len": 8, "shift": [0, 3, 4]}
data = {"name": "x", "sweeps": [{"name": "s", "matrix": matrix}], "exclude": [{"shift": ">3"}]}
suite = Suite.of(data, Origin("x.yaml"))
plain, shifted = expand(suite)
assert (plain.shift, shifted.shift) == (0, 3)
assert plain.cell_id == sys.argv[1] != shifted.cell_id, plain.cell_id
assert Cell.from_json(json.loads(json.dumps(shifted.to_json()))) == shifted
assert [cell.shift for cell in expand(apply_overrides(suite, {"shift": "2"}))] == [2]
assert varying([plain, shifted]) == ["shift"]
assert "shift=3" in address(shifted) and "shift" not in address(plain)
row = Record.of(shifted, Status.OK, inputs="gaussian")
older = {name: value for name, value in row.to_json().items() if name != "shift"}
assert address_of_row(row) == address(shifted)
assert name(row, telling([row, Record.of(plain, Status.OK, inputs="gaussian")])) == "softmax n=8 shift=3"
assert circumstances(row)["shift"] == 3
assert key_of(row) != key_of(replace(row, shift=4)) and "shift" in _SHAPE
assert "shift" in export_tables._AXES and "shift" in _ABOUT
assert (row.shift, Record.from_json(older).shift) == (3, 0)
definitions = Suite.model_json_schema()["$defs"]
assert all("shift" in definitions[name]["properties"] for name in ("Axes", "Matrix", "Include", "Exclude"))
assert completion.axes("shi") == ["shift="]
assert in_words("shift", 3) == "shift 3"
assert "shift" in SAME and "shift" in SAME_MODEL and "shift" in _ASKED
(_, asked) = CompareQuestion(["softmax", "linear"], 8, axes={"shift": 2}, device="cpu").prepare().cells
assert asked.shift == 2
"""


def test_a_row_a_field_and_a_column_make_an_axis_everywhere() -> None:
    plain = Cell("x", "s", Spec("softmax"), Shape(seq_len=8))
    done = subprocess.run([sys.executable, "-c", PRETENCE, plain.cell_id], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
