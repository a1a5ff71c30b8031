"""The progress bar in a notebook, redrawn in the cell's output without ipywidgets, which rich's own way needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rich.progress import Progress


class NotebookProgress(Progress):
    """A :class:`rich.progress.Progress` whose table of tasks is displayed in the cell and removed at the end."""

    _shown: Any = None

    def start(self) -> None:
        display = import_module("IPython.display").display  # every notebook has IPython; it is not needed elsewhere
        self._shown = display(self.make_tasks_table(self.tasks), display_id=True)

    def stop(self) -> None:
        self._shown.update({"text/plain": ""}, raw=True)

    def update(self, *args: Any, **fields: Any) -> None:
        """Update as in a terminal, and redraw at once: visits to cells are few."""
        super().update(*args, **fields)
        self._shown.update(self.make_tasks_table(self.tasks))

    def advance(self, *args: Any, **fields: Any) -> None:
        """Advance as in a terminal, and redraw at once."""
        super().advance(*args, **fields)
        self._shown.update(self.make_tasks_table(self.tasks))
