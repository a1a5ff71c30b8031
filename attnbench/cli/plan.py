"""A plan before it runs: print its heading, and what ``--dry-run`` predicts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from attnbench.cli import console
from attnbench.units import format_bytes, format_count

if TYPE_CHECKING:
    from attnbench.cell import Cell
    from attnbench.measure.flops import Prediction
    from attnbench.run.estimate import Duration
    from attnbench.run.plan import Plan


def print_heading(plan: Plan) -> None:
    """Print the suite, the process that will measure it, and a line for each sweep."""
    settings = plan.settings
    limit = f", memory limit {format_bytes(settings.memory_limit)}" if settings.memory_limit else ""
    shard = f", shard {plan.options.shard} of {_cells(plan.whole)}" if plan.options.shard else ""
    console.heading(f"{plan.suite.name}: {_cells(len(plan.cells))} on {settings.device}{shard}")
    plural = "" if settings.threads == 1 else "s"
    threads = f"{settings.threads} thread{plural}"
    if plan.options.on is not None:  # its machines have cores and memory of their own
        threads = f"machines of {plan.options.on}: {threads if plan.options.threads else 'threads as each has cores'}"
        limit = limit if plan.options.memory_limit else ""
    console.line(f"{threads}, {settings.process} process{limit}")
    rows = []
    for sweep in dict.fromkeys(cell.sweep for cell in plan.cells):
        cells = [cell for cell in plan.cells if cell.sweep == sweep]
        lengths = sorted({cell.shape.N for cell in cells})
        span = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]}..{lengths[-1]}"
        what = "+".join(cells[0].measure)
        variants = len({cell.variant for cell in cells})
        level = f"{cells[0].level} {cells[0].pass_}"
        rows.append([sweep, level, what, str(variants), span, str(len(cells))])
    console.table(
        ["sweep", "level and pass", "measures", "variants", "n", "cells"], rows, right=["variants", "n", "cells"]
    )


def predict(plan: Plan, *, as_json: bool) -> None:
    """Print a line for each cell, with the axes in which cells differ, or everything as JSON."""
    from attnbench.run.estimate import duration, estimate
    from attnbench.suite.describe import axes_of, shown, varying

    found = []
    with console.progress(total=len(plan.cells)) as bar:
        for cell, one in estimate(plan.cells, plan.settings.threads):
            found.append((cell, one))
            bar.update(bar.task_ids[0], completed=len(found), description=cell.variant.label)
    limit, lasting = plan.settings.memory_limit or math.inf, duration(plan)
    fits = [None if one.peak_bytes is None else one.peak_bytes <= limit for _, one in found]
    if as_json:
        cells = [_cell(cell, one, fit) for (cell, one), fit in zip(found, fits, strict=True)]
        console.data({**_as_data(plan, cells), **asdict(lasting)})
        return
    axes = varying(plan.cells)
    rows = []
    for (cell, one), fit in zip(found, fits, strict=True):
        note = "; ".join(filter(None, ["will not fit" if fit is False else "", one.reason]))
        values = [shown(axes_of(cell)[axis]) for axis in axes]
        sizes = [format_count(one.matmul_flops), format_bytes(one.peak_bytes)]
        rows.append([cell.sweep, cell.variant.label, str(cell.shape.N), *values, *sizes, note])
    numbers = ["n", "matmul FLOPs", "peak"]
    console.table(["sweep", "variant", "n", *axes, *numbers[1:], "note"], rows, right=numbers)
    words: dict[bool | None, str] = {True: "fit", False: "will not fit"}
    ends = Counter(words.get(fit) or one.reason.partition(":")[0] for (_, one), fit in zip(found, fits, strict=True))
    counts = ", ".join(f"{count} {word}" for word, count in ends.items())
    console.paragraph(f"{_cells(len(found))}: {counts}; nothing was run")
    console.paragraph(f"the run will take {_minutes(lasting)}; {lasting.ground}")


def _minutes(lasting: Duration) -> str:
    if lasting.seconds is None:
        return f"at least {lasting.least_seconds / 60:.0f} min" if lasting.least_seconds else "an unknown time"
    return f"about {lasting.seconds / 60:.0f} min" if lasting.seconds >= 90 else f"about {lasting.seconds:.0f} s"


def _as_data(plan: Plan, cells: list[dict[str, Any]]) -> dict[str, Any]:
    settings = plan.settings
    return {
        "suite": plan.suite.name,
        "device": settings.device,
        "threads": settings.threads,
        "process": settings.process,
        "memory_limit_bytes": settings.memory_limit,
        "shard": str(plan.options.shard) if plan.options.shard else None,
        "cells": cells,
    }


def _cell(cell: Cell, predicted: Prediction, fits: bool | None) -> dict[str, Any]:
    from attnbench.suite.describe import axes_of

    return {
        "cell_id": cell.cell_id,
        "sweep": cell.sweep,
        "variant": cell.variant.label,
        "level": cell.level,
        "pass": cell.pass_,
        "measure": list(cell.measure),
        "seq_len": cell.shape.N,
        **axes_of(cell),
        "matmul_flops": predicted.matmul_flops,
        "peak_bytes": predicted.peak_bytes,
        "fits": fits,
        "reason": predicted.reason,
    }


def _cells(count: int) -> str:
    return f"{count} cell{'s' * (count != 1)}"
