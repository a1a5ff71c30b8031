"""Each recipe of CONTRIBUTING.md, followed once in a copy of the package; ``tests/suite/test_axes.py`` adds an axis."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
VARIANT = '''"""The mean of the values, gated by the query."""

import torch

from attnbench.contract.variant import No, Traits, register


@register(
    "gated-mean",
    family="reference",
    source="this test",
    formula="σ(q)·mean(V)",
    cost="O(n·d)",
    traits=Traits(
        target="other",
        causal=No("the mean is over all tokens"),
        v_dim=No("each channel of the query gates one of the values"),
        key_padding=No("it takes no mask"),
        rows_sum_to_one=False,
        permutable=True,
    ),
    settings=("",),
)
class GatedMean(torch.nn.Module):
    """Mean of the values, gated by the query."""

    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        return q.sigmoid() * v.mean(2, keepdim=True)

    def dense(self, q, k, v, *, key_mask=None):
        rows = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype) / k.shape[2]
        return torch.sigmoid(q) * (rows @ v)
'''
INPUT = '''"""The same numbers for queries, keys and values."""

import torch

from attnbench.contract.inputs import register_input


@register_input("tied")
def tied(shape, generator):
    """q, k and v are equal."""
    x = torch.randn(shape.B, shape.H, shape.N, shape.D, generator=generator)
    return x, x.clone(), x.clone()
'''
TASK = '''"""The parity of all bits so far."""

import torch

from attnbench.catalogue.tasks.streams import Stream
from attnbench.contract.task import Examples, Form, register_task


@register_task("parity", source="this test")
class Parity(Stream):
    """Is the number of ones up to here odd?"""

    def __init__(self, shape, *, test: int = 16):
        form = Form(vocab=(2,), classes=2, per_token=True)
        super().__init__("parity", shape, form, settings={}, version=1, test=test)

    def draw(self, count, generator):
        tokens = torch.randint(2, (count, self.n), generator=generator)
        return Examples(tokens, tokens.cumsum(1) % 2)
'''
FIGURE = '''"""The time of each row, as a bar."""

from attnbench.figures.kit.page import new_page
from attnbench.figures.kit.style import in_style

NEEDS = "a time"


@in_style
def draw_bars(frame, *, x="label"):
    """Draw a bar for each row."""
    page = new_page("Times", [f"over {x}"], [], room=2.0)
    page.figure.add_axes([0.1, 0.2, 0.8, 0.5]).bar(frame[x], frame["time_median_s"] * 1e3)
    return page.figure
'''
SUITE = """name: own
rounds: 1
sweeps:
  - name: one
    measure: [time]
    matrix: {variant: gated-mean, inputs: tied, seq_len: 16, heads: 2, head_dim: 4}
"""
OPTION = '    most_cells: Annotated[int | None, typer.Option(help="Refuse a larger plan."), Default(None)]\n'
NEW = {
    "catalogue/attention/reference/gated_mean.py": VARIANT,
    "catalogue/inputs/tied.py": INPUT,
    "catalogue/tasks/parity.py": TASK,
    "figures/bars.py": FIGURE,
}
"""Files that the recipes add, below attnbench/."""
ADDED = [
    (
        "catalogue/attention/__init__.py",
        '    ("pattern", "local ',
        '    ("reference", "gated-mean"),\n',
    ),
    ("catalogue/inputs/__init__.py", '    "gaussian"', '    "tied": "tied",\n'),
    ("catalogue/tasks/__init__.py", '    "recall"', '    "parity": "parity",\n'),
    (
        "results/record.py",
        "    select_s: ",
        '    joules: Annotated[float | None, Column(unit="J")] = None\n    """Energy."""\n',
    ),
    ("harness/inside/execute.py", "            looks = _first_look(", "            record.joules = 2.5\n"),
    ("figures/__init__.py", '    *("served", "steps", "map", "speedup", "share", "swap"),\n', '    "bars",\n'),
    ("cli/options.py", '    device: Annotated[Device, Default("auto")]\n    select:', OPTION),
    ("harness/plan.py", "    dry: bool = False\n", "    most_cells: int | None = None\n"),
    (
        "harness/plan.py",
        "    settings = Settings(\n",
        "    if options.most_cells is not None and len(cells) > options.most_cells:\n"
        "        from attnbench.errors import UsageError\n\n"
        '        raise UsageError(f"more than {options.most_cells} cells")\n',
    ),
]
"""Lines that they add: file, the line before which they stand, the lines."""
FOLLOWED = """
import contextlib, inspect, io, json
import torch
import attnbench
from attnbench.catalogue.build import build
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import TASKS
from attnbench.errors import UsageError
from attnbench.figures import figure_kinds
from attnbench.laws import check_variant
from attnbench.results.record import FIELDS

found = {}
frame = attnbench.run("own.yaml", progress=False, unchecked=True, quick=True, device="cpu")
(row,) = frame.to_dict("records")
found["variant"] = [row["label"], row["status"], row["family"]]
found["laws"] = check_variant("gated-mean", laws=["formula", "causality", "build", "finite differences"]).faults
found["input"] = row["inputs"]
found["column"] = [row["joules"], FIELDS["joules"].unit, "joules" in open("RUN/results.csv".replace("RUN", str(
    next(iter(frame.attrs["folders"]))[1]))).readline()]
task = TASKS.get("parity").make(Shape(seq_len=8))
drawn = task.draw(2, torch.Generator().manual_seed(0))
found["task"] = [drawn.tokens.tolist(), drawn.labels.tolist()]
found["figure"] = [list(figure_kinds())[-7], list(attnbench.plot(frame, figures=["bars"], x="time_median_s"))]
parameter = inspect.signature(attnbench.run).parameters["most_cells"]
with contextlib.redirect_stdout(io.StringIO()) as out:
    main(["run", "--help"])
shown = ["--most-cells" in out.getvalue(), "Refuse a larger plan." in attnbench.run.__doc__]
found["option"] = [parameter.default, *shown]
try:
    attnbench.run("own.yaml", progress=False, most_cells=0)
except UsageError as error:
    found["option"].append(str(error))
print(json.dumps(found))
"""


def add(file: Path, before: str, lines: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert before in text, f"{file}: {before}"
    place = text.index(before)
    file.write_text(text[:place] + lines + text[place:], encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What a copy of the package says after all recipes were followed in it."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT / "attnbench", copy / "attnbench", ignore=lambda folder, names: {*names} & {"data", "__pycache__"}
    )
    for data in (ROOT / "attnbench").rglob("data"):
        (copy / data.relative_to(ROOT)).symlink_to(data)
    (copy / "suites").symlink_to(ROOT / "suites")
    for name, text in NEW.items():
        (copy / "attnbench" / name).write_text(text, encoding="utf-8")
    for name, before, lines in ADDED:
        add(copy / "attnbench" / name, before, lines)
    (copy / "own.yaml").write_text(SUITE, encoding="utf-8")
    (copy / "followed.py").write_text(FOLLOWED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "followed.py"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "100", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_a_file_and_an_import_make_a_variant(found: Mapping[str, Any]) -> None:
    assert found["variant"] == ["gated-mean", "ok", "reference"]
    assert found["laws"] == []


def test_a_file_and_an_import_make_an_input(found: Mapping[str, Any]) -> None:
    assert found["input"] == "tied"


def test_a_file_and_an_import_make_a_task(found: Mapping[str, Any]) -> None:
    tokens, labels = found["task"]
    assert labels == [[sum(row[: i + 1]) % 2 for i in range(len(row))] for row in tokens]


def test_a_field_and_a_number_make_a_column(found: Mapping[str, Any]) -> None:
    assert found["column"] == [2.5, "J", True]


def test_a_file_and_its_name_make_a_figure(found: Mapping[str, Any]) -> None:
    assert found["figure"] == ["bars", ["bars"]]


def test_a_field_makes_an_option_of_a_command_and_of_a_function(found: Mapping[str, Any]) -> None:
    assert found["option"] == [None, True, True, "more than 0 cells"]


def test_every_recipe_names_the_files_that_it_changes() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    changed = {f"attnbench/{name}" for name, *_ in ADDED} | {f"attnbench/{Path(name).parent}" for name in NEW}
    folders = {re.sub(r"/reference$", "", name) for name in changed}
    assert [name for name in sorted(folders) if name not in page] == []
