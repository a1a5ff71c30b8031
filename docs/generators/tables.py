"""The tasks to train on, and the inputs that q, k and v come from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from attnbench.contract.inputs import INPUTS
from attnbench.contract.registry import Entry
from attnbench.contract.task import TASKS, TaskEntry
from generators.catalogue import options
from generators.markdown import first_line, page, prose, source, text


def pages() -> Iterator[tuple[str, str]]:
    """One page for each table."""
    tasks = [entry for entry in TASKS if _home(entry).startswith("attnbench.")]
    inputs = [entry for entry in INPUTS if _home(entry).startswith("attnbench.")]
    yield (
        "reference/tasks.md",
        page(
            "# The tasks",
            "A model is trained on a task to get a score. [Scores by training](../scores.md) says how. "
            "Nothing is downloaded: if the files of a task are missing, its row is `unsupported` and says where to "
            "get them.",
            *(part for entry in tasks for part in _entry(entry)),
        ),
    )
    yield (
        "reference/inputs.md",
        page(
            "# The inputs",
            "At level `operator`, q, k and v come from an input. The error of a method depends on the input more than "
            "on the method. The axis `inputs` of a suite and the option `--inputs` of `compare` take the name of an "
            "input with its options: `gaussian:logit_std=2`.",
            *(part for entry in inputs for part in _entry(entry)),
        ),
    )


def _home(entry: Entry) -> str:
    return str(inspect.unwrap(entry.make).__module__)


def _entry(entry: Entry) -> Iterator[str]:
    yield f"## {entry.name}"
    yield text(entry.summary)
    if isinstance(entry, TaskEntry):
        yield f"Source: {source(entry.source)}." + (
            f" Licence of the data: {text(entry.licence)}." if entry.licence else ""
        )
    yield options(entry)
    yield prose(first_line(entry.make.__doc__)[1])
