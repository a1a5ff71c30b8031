"""``attnbench gate NEW --against OLD``: exit code 1 if a run is worse than older ones, beyond doubt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

import typer

from attnbench.cli.options import Count, Plugins
from attnbench.cli.screen import console, decisions
from attnbench.cli.screen.outputs import refuse_files
from attnbench.cli.signature import command, completed
from attnbench.errors import StoreError, UsageError

if TYPE_CHECKING:
    from attnbench.answers.gate.decide import Decision
    from attnbench.results.measurements import MeasuredRun
    from attnbench.suite.cell import Cell


@command(decisions.JudgeOptions)
def gate(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Folder of a run, or of a suite for its newest run.")],
    against: Annotated[
        list[Path] | None, typer.Option(metavar="OLD", help="A run that was good; the rounds of several are pooled.")
    ] = None,
    against_history: Annotated[
        list[Path] | None,
        typer.Option(metavar="RESULTS", help="The last 8 runs before NEW in this folder that compare with it."),
    ] = None,
    fail_above: Annotated[float, decisions.Ratio(help="Fail if a time is above it, new over old; 1 or more.")] = 1.05,
    on: decisions.OnOption = "time,memory,error,status",
    confirm: Annotated[int, Count(min=0, max=20, help="Measure cells that seem slower for N more rounds.")] = 0,
    missing: Annotated[
        Literal["fail", "warn", "ignore"], typer.Option(help="What to do about cells and numbers that only OLD has.")
    ] = "warn",
    strict: Annotated[bool, typer.Option("--strict", help="Fail also if it is open whether a cell is worse.")] = False,
    plugin: Plugins = None,
    **given: Unpack[decisions.JudgeOptions],
) -> None:
    """Fail if a run is worse than older runs: slower, larger in memory, less accurate, or broken.

    A cell is slower only if the whole interval of its ratio lies above the limit. The intervals of all cells hold
    together, so that of identical programs one gate in twenty fails at most. Less than three rounds of a run have no
    interval: it is then not known whether a cell is slower. The exit code is 0 if nothing is worse beyond doubt, 1 if
    something is, 2 for wrong usage and for runs that cannot be compared, 65 for damaged runs.
    """
    given = completed(decisions.JudgeOptions, given)
    format_, out = given["format_"], given["out"]
    refuse_files(out)
    question = decisions.question_of(fail_above, on, given, missing=missing, strict=strict)

    from attnbench.answers.gate.decide import decide
    from attnbench.answers.gate.decision_table import verdict_line

    now, *before = decisions.read([new, *_olds(new, against or [], against_history or [])])
    decision = decide(now, before, question)
    if confirm:
        decision = _confirmed(decision, now, before, confirm, plugin or [])
    decisions.show(decision, format_, out)
    if decision.exit_code:
        console.error(verdict_line(decision))
        raise typer.Exit(decision.exit_code)
    if format_ == "table" or out is not None:
        console.line(verdict_line(decision))


def _olds(new: Path, against: list[Path], histories: list[Path]) -> list[Path]:
    """The older runs, also those of histories; UsageError if there is none."""
    from attnbench.answers.history import WINDOW, read_history
    from attnbench.results.measurements import load

    if not (against or histories):
        raise UsageError("gate needs a run, and --against an older one; for example: attnbench gate NEW --against OLD")
    found, out = read_history(histories, load(new)) if histories else ([], {})
    for run, why in out.items():
        console.warning(f"left out: {run}: {why}")
    olds = [*against, *(run.path for run in found[-WINDOW:])]
    if not olds:
        raise UsageError(f"--against-history {histories[0]}: no run before {new} compares with it; give --against OLD")
    return olds


def _confirmed(
    decision: Decision,
    new: MeasuredRun,
    olds: list[MeasuredRun],
    rounds: int,
    plugins: list[str],
) -> Decision:
    from attnbench.answers.gate.decide import confirm, doubtful
    from attnbench.harness.runner import Watcher

    cells = doubtful(decision)
    if not cells:
        return decision
    seem, of = ("1 cell seems", "it") if len(cells) == 1 else (f"{len(cells)} cells seem", "each")
    console.note(f"{seem} slower; {rounds} more round{'s' * (rounds > 1)} of {of}")
    with console.progress(total=len(cells) * rounds) as bar:

        class ConfirmScreen(Watcher):
            def visiting(self, cell: Cell) -> None:
                bar.update(bar.task_ids[0], advance=1, description=cell.label)

            def warned(self, message: str) -> None:
                console.warning(message)

        try:
            return confirm(decision, new, olds, rounds, plugins=plugins, watcher=ConfirmScreen())
        except (UsageError, StoreError) as error:  # the verdict is known all the same
            console.warning(f"not measured again: {error}")
            return decision
