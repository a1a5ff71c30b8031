"""Estimate the needs of a suite from tensors without numbers: nothing is allocated or computed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Literal

import torch

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_sizes
from attnbench.contract.task import Examples, Form
from attnbench.errors import AttnbenchError
from attnbench.harness.inside.call import Trained, first_examples, prepare
from attnbench.harness.inside.execute import status_of
from attnbench.harness.outside.trainers import at_once
from attnbench.harness.plan import Plan
from attnbench.measure.flops import STEPS, Prediction, move_fake, predict
from attnbench.measure.machine import devices, machine_id
from attnbench.models.encoder import Block, in_turn
from attnbench.results.manifest import BESIDE
from attnbench.results.runs import find_runs
from attnbench.suite.cell import UNTOUCHED, Cell, ModelSize
from attnbench.text import one_line


def estimate(cells: Sequence[Cell], threads: int) -> Iterator[tuple[Cell, Prediction]]:
    """One estimate per cell, in order, for ``threads`` threads, on which the sizes of tiles depend.

    Cells of the same sizes are followed once, at each length. A call of too many steps is unknown, and so are longer
    ones of the same thing, and the rest after :data:`ALL_STEPS` in all.
    """
    torch.set_num_threads(threads)
    found: dict[Cell, Prediction] = {}
    too_long, left = dict[Cell, int](), ALL_STEPS
    for cell in cells:
        alike = replace(cell, suite="", sweep="", seed=0, training=None)
        family = replace(alike, shape=replace(alike.shape, seq_len=1))
        if alike not in found:
            known = too_long.get(family, math.inf) <= cell.shape.N
            if known or left <= 0:
                found[alike] = Prediction(None, None, _TOO_LONG if known else _OVER, too_long=known)
            else:
                found[alike] = _follow(alike)
                left -= found[alike].steps
        if found[alike].too_long:
            too_long[family] = min(cell.shape.N, too_long.get(family, cell.shape.N))
        yield cell, _of_all_steps(cell, found[alike])


ALL_STEPS = 100_000
"""Calls of torch that are followed for one plan, in some tens of seconds."""
_OVER = "unknown: the plan is too long to follow it all; choose cells by -k"
_TOO_LONG = "unknown: too many steps to be followed"


@dataclass(frozen=True, slots=True)
class Duration:
    """The time that a run will take."""

    seconds: float | None
    """Seconds by earlier runs of the suite on this machine; None without any."""
    least_seconds: float
    """Seconds of the samples alone."""
    ground: str
    """The source of the number, or the reason why there is none."""


def duration(plan: Plan) -> Duration:
    """The time of a run if first visits and trainings last as long as in earlier runs, and later visits no longer."""
    sides = 2 if plan.options.beside else 1
    once = {cell.whole_training: cell for cell in plan.cells}.values()
    visits = {cell: plan.rules.rounds if "time" in cell.measure else 1 for cell in once}
    least = 0.0 if plan.rules.quick else sides * plan.rules.min_time * sum("time" in one.measure for one in plan.cells)
    if plan.settings.device not in devices():
        return Duration(None, least, f"how long is unknown: this machine has no {plan.settings.device}")
    here, known = machine_id(plan.settings.device), dict[str, float]()
    for folder in find_runs(plan.options.out / plan.suite.name):
        with suppress(AttnbenchError, OSError, ValueError):
            rows = [row for row in folder.records().values() if row.machine_id == here]
            turns = 2 if BESIDE in folder.environment else 1  # between two of its rows stands one of the other side
            # Several trainings run at once, and their rows come as they end.
            known |= {row.cell_id: row.train_s / at_once(plan.settings) for row in rows if row.train_s is not None}
            for row, after in pairwise(rows):
                took = (
                    datetime.fromisoformat(after.started_at) - datetime.fromisoformat(row.started_at)
                ).total_seconds() / turns
                if 0 <= took <= plan.options.cell_timeout and row.steps is None:
                    known[row.cell_id] = took
    if not known:
        return Duration(None, least, f"how long is unknown: no earlier run of {plan.suite.name} on this machine")
    usual = sum(known.values()) / len(known)
    seconds = sides * sum(count * known.get(cell.cell_id, usual) for cell, count in visits.items())
    return Duration(max(seconds, least), least, f"as earlier runs of {plan.suite.name} on this machine did")


def _of_all_steps(cell: Cell, one: Prediction) -> Prediction:
    if cell.training is None or one.peak_bytes is None:
        return one
    steps = cell.training.pretrain_steps + cell.training.steps
    flops = None if one.matmul_flops is None else steps * one.matmul_flops
    return replace(one, matmul_flops=flops, reason="; ".join(filter(None, [f"of {steps} steps", one.reason])))


def _follow(cell: Cell) -> Prediction:
    gc.freeze()  # to look through all imports, and through earlier cells, would take longer than to follow one
    try:
        on_gpu = cell.device.startswith("cuda")
        cell = replace(cell, device="cpu", compile=False, launch="auto" if on_gpu else cell.launch)
        layers, more, trained = 1, 0, None
        if cell.level == "pretrained":
            from attnbench.models.pretrained.pretrained_cell import described  # only trained models need it

            model = described(cell)
            layers, trained = model.layers, model.swapped
        elif cell.level == "model":
            size = cell.model or ModelSize()
            layers = size.layers
            if layers > _FEWEST and _has_equal_layers(cell, layers):
                more, cell = layers - _FEWEST, replace(cell, model=replace(size, layers=_FEWEST))
        seen = {"time", "memory", "score"} & {*cell.measure}
        examples = _examples(cell) if cell.task else first_examples

        def make(device: str) -> Callable[[], object]:
            here = replace(cell, device=device)
            return prepare(here, move_fake, draw_sizes, examples, trained).run if seen else _refuse(here, trained)

        def foresee(device: Literal["cpu", "meta"]) -> Prediction:
            with torch.enable_grad():  # a call that is broken off may leave gradients switched off
                most = STEPS * (layers - more)
                return predict(partial(make, device), most=most, layer=Block, more=more if seen else 0, device=device)

        try:
            one = foresee("meta")
        except Exception:  # it asks for a number, or for its device
            one = foresee("cpu")
        if not seen:
            return Prediction(None, None, f"{cell.measure[0]} only")
        if one.too_long:
            return replace(one, reason=_TOO_LONG)
        if cell.variant.name == UNTOUCHED and cell.shape.causal and one.peak_bytes is not None:
            about = "about: the model's own attention may skip pairs that causality hides"
            return replace(one, reason="; ".join(filter(None, [about, one.reason])))
        return one
    except Exception as error:
        return Prediction(None, None, one_line("{}: {}".format(*status_of(error))))


_FEWEST = 2
"""Layers of which the second tells of all further ones."""


def _has_equal_layers(cell: Cell, layers: int) -> bool:
    plain = cell.architecture == "encoder" and cell.shape.query_stride == 1
    return plain and cell.pass_ in ("forward", "training") and len(set(in_turn(cell.variant, layers))) == 1


def _refuse(cell: Cell, trained: Trained | None) -> Callable[[], None]:
    """Build the variant and draw its input as for an error or a loss: either refuses an impossible cell."""
    if trained is not None:
        trained(cell)
    else:
        reads = cell.entry.claims(cell.variant, causal=cell.shape.causal).reads
        draw_sizes(cell.inputs, cell.whole_shape, cell.seed, reads)
        build(cell.variant, cell.whole_shape, seed=cell.seed, level=cell.level)
    return lambda: None


def _examples(cell: Cell) -> Callable[[Cell], tuple[Form, Examples]]:
    """Makes fake examples of a cell's task, as long as the first ones, which are drawn here as real tensors."""
    form, real = first_examples(cell)
    sizes = {name: list(getattr(real, name).shape) for name in ("tokens", "labels")}
    return lambda _: (form, Examples(**{name: torch.zeros(one, dtype=torch.int64) for name, one in sizes.items()}))
