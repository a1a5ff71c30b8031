"""The example notebook runs from its first cell to its last, in a kernel of its own, and shows progress."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "docs" / "example.ipynb"
PROGRESS = """
from attnbench.cli.screen import console
bar = console.progress(3).__enter__()
bar.update(bar.task_ids[0], completed=1, description="softmax n=64")
"""

# jupyter_client and its sockets
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def executed(notebook: Any, folder: Path) -> list[Any]:
    import nbclient

    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_the_example_runs_and_shows_tables_and_a_figure(tmp_path: Path) -> None:
    import nbformat

    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    for cell in notebook.cells:  # what takes most of a minute is made small
        cell.source = re.sub(r"min_time=0\.0\d", "min_time=0.01, unchecked=True, threads=1", cell.source)
        cell.source = cell.source.replace("rounds=1", "quick=True")
    outputs = executed(notebook, tmp_path)
    assert not [output for output in outputs if output.output_type == "error"]
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    assert ["<table" in data.get("text/html", "") for data in shown] == [True, True, True, True, False, False]
    assert "data:image/png;base64," in shown[4]["text/html"]
    assert "sdpa:backend=cudnn" in shown[3]["text/html"]
    assert "unsupported" in shown[3]["text/html"]
    assert "Performer(" in shown[-1]["text/plain"]


def test_progress_is_drawn_in_the_output_of_the_cell_and_goes_away(tmp_path: Path) -> None:
    import nbformat

    cells = [nbformat.v4.new_code_cell(PROGRESS), nbformat.v4.new_code_cell(PROGRESS + "bar.stop()")]
    going_on, over = executed(nbformat.v4.new_notebook(cells=cells), tmp_path)
    assert "softmax n=64" in going_on.data["text/html"]
    assert "1/3" in going_on.data["text/html"]
    assert over.data == {"text/plain": ""}
