"""The progress bar in a notebook, redrawn in the output of its cell: rich's own way to do so needs ipywidgets."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rich.progress import Progress


class NotebookProgress(Progress):
    """A :class:`rich.progress.Progress` whose table of tasks is what the cell displays; it goes away at the end."""

    _shown: Any = None

    def start(self) -> None:
        """Display the bar."""
        display = import_module("IPython.display").display  # IPython is in every notebook, and here only there
        self._shown = display(self.make_tasks_table(self.tasks), display_id=True)

    def stop(self) -> None:
        """Take the bar away."""
        self._shown.update({"text/plain": ""}, raw=True)

    def update(self, *args: Any, **fields: Any) -> None:
        """As in a terminal, and at once: visits of cells are few."""
        super().update(*args, **fields)
        self._shown.update(self.make_tasks_table(self.tasks))

    def advance(self, *args: Any, **fields: Any) -> None:
        """As in a terminal, and at once."""
        super().advance(*args, **fields)
        self._shown.update(self.make_tasks_table(self.tasks))
