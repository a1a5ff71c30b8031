"""``attnbench check FILE.py:Class``: what a module really does that is no registered variant."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from attnbench.cli import console
from attnbench.errors import Exit, Unsupported, UsageError

if TYPE_CHECKING:
    from attnbench.probing import Found, Wanted
    from attnbench.run.isolation import Settings


def check_module(wanted: Wanted, settings: Settings, *, label: str | None, timeout: float, as_json: bool) -> None:
    """Probe and print; exit code 1 where the module does not do what its name, or ``label``, promises."""
    from attnbench.probing import contradictions, lines
    from attnbench.run.isolation import CellFailed, Worker
    from attnbench.run.module import ProbeModule
    from attnbench.variant import VARIANTS

    if label is not None:
        VARIANTS.get(label)
    name = wanted.name  # refused before a process is started
    with console.progress(1) as bar, Worker(settings) as worker:
        bar.update(bar.task_ids[0], description=f"probing {name}")
        try:
            found = ProbeModule(wanted).ask(worker, timeout)
        except CellFailed as failed:
            raise Unsupported(f"{wanted.source}: {failed.reason}") from None
    broken = contradictions(found, name, label)
    if as_json:
        console.data(_as_data(wanted, found, broken))
    else:
        title = wanted.source if wanted.call else f"{wanted.source}, called with {found.call}"
        console.table(["question", "answer"], [list(line) for line in lines(found)], title=title)
        console.line()
        if broken:
            console.line(f"{name} is not what it says it is:")
        for sentence in broken:
            console.line(f"  {sentence}")
        if not broken:
            console.line(f"nothing contradicts the name {label or name}")
    if broken:
        raise typer.Exit(Exit.FAILED)


def _as_data(wanted: Wanted, found: Found, broken: list[str]) -> dict[str, Any]:
    from attnbench.probing import lines

    answers = {line.question: line.answer for line in lines(found)}
    return {"module": wanted.source, "held": not broken, "broken": broken, "answers": answers, "found": asdict(found)}


def refuse_mixture(variants: list[str]) -> None:
    """Raise UsageError where modules and variants stand together."""
    if len(variants) > 1:
        raise UsageError("check looks at one FILE.py:Class at a time, without variants beside it")
