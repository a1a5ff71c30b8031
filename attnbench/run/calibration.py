"""Whether a task tells variants apart here: softmax must solve it, and mixing no tokens must not help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnbench.cell import Cell
from attnbench.record import Record
from attnbench.scores import NO_MIXING, REFERENCE, Summary, summary
from attnbench.trained import choose, trained


def doubts(cells: Sequence[Cell], records: Mapping[str, Record]) -> dict[str, str]:
    """What speaks against all scores of a cell's task, by cell id, where the suite says what softmax must reach.

    It says nothing before softmax or identity was trained.
    """
    wanted = {
        cell.cell_id: cell.training.solved
        for cell in cells
        if cell.training is not None and cell.training.solved is not None and cell.cell_id in records
    }
    choices = choose(trained(records[cell_id] for cell_id in wanted))
    found: dict[str, str] = {}
    for problem in dict.fromkeys(choice.problem for choice in choices):
        here = [choice for choice in choices if choice.problem == problem]
        cell_ids = [one.cell_id for choice in here for one in choice.rows]
        scores = {one.variant: one for choice in here if (one := summary(choice)) is not None}
        said = _said(scores, max((wanted[cell_id] or 0.0 for cell_id in cell_ids), default=0.0))
        found |= dict.fromkeys(cell_ids, said) if said else {}
    return found


def _said(scores: Mapping[str, Summary], solved: float) -> str:
    exact, still = scores.get(REFERENCE), scores.get(NO_MIXING)
    parts = []
    if exact is not None and exact.over_seeds.mean < solved:
        parts.append(f"softmax scores {exact.over_seeds.mean:.2f} of the {solved:g} that this task needs to tell apart")
    if still is not None and still.ends is not None and still.chance is not None and still.ends[0] > still.chance:
        parts.append(f"identity scores {still.over_seeds.mean:.2f} without mixing, above chance ({still.chance:.2f})")
    return " and ".join(parts)
