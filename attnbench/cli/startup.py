"""What makes a command start and end sooner. A command would do the same without any of it.

* :class:`OnDemand` imports the one command that is used. The options of all take as long to load as typer does.
* :func:`attnbench.suite.load.refuse_early` finds most mistakes of a suite before torch is imported, in seconds.
* :func:`worker_ahead` has the measuring process import torch at the same time as this process, not after it.
* :func:`importing` keeps Python from searching imported modules for garbage, again and again as they become more: a
  tenth of a second each time once torch is there.
* :func:`end_without_search` saves the last such search, when Python ends: 0.2 s after torch.

The measuring process does the last two for itself (:mod:`attnbench.run.worker`).
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from attnbench.cli.usage import COMMANDS

if TYPE_CHECKING:
    from attnbench.run.isolation import Worker


class OnDemand(TyperGroup):
    """Commands of which one is imported once it is known which; until then a line of help stands for each."""

    def __init__(self, **settings: Any) -> None:
        known = {name: TyperCommand(name, help=command.what) for name, command in COMMANDS.items()}
        super().__init__(**{**settings, "commands": known})

    def load(self, name: str | None) -> Any:
        """Import the command of this name."""
        raise NotImplementedError

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and self.load(name), rest


@contextmanager
def worker_ahead(threads: int | None, *, wanted: bool) -> Iterator[Worker]:
    """A measuring process that imports torch while this one does; all its settings but the threads may follow.

    Args:
        wanted: False where nothing will be measured; the process is then not started.
    """
    from attnbench.machine import default_threads
    from attnbench.run.isolation import Settings, Worker

    with Worker(Settings(threads=threads or default_threads())) as worker:
        if wanted:
            worker.begin()
        yield worker


@contextmanager
def importing() -> Iterator[None]:
    """Search for no garbage in this block, nor later among what it leaves: imports are not garbage."""
    from attnbench.measure.time import garbage_collection_off

    with garbage_collection_off():
        yield
        gc.freeze()


def end_without_search() -> None:
    """Let Python end without a search for garbage."""
    atexit.register(gc.freeze)


def quiet_libraries() -> None:
    """Keep libraries from printing beside what a command prints, and from settings for windows that none opens."""
    os.environ.pop("MPLBACKEND", None)  # matplotlib refuses to be imported with a name that it does not know
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where a home cannot be written
