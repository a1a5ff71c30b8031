"""What a suite will need, from fake tensors: nothing is allocated and nothing computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from attnbench.cell import Cell
from attnbench.measure.flops import Prediction, move_fake, predict
from attnbench.qkv import draw_sizes
from attnbench.record import one_line
from attnbench.run.call import first_examples, prepare
from attnbench.run.outcome import status_of
from attnbench.task import Examples
from attnbench.variant import build


def estimate(cells: Sequence[Cell], threads: int) -> Iterator[tuple[Cell, Prediction]]:
    """One estimate per cell, in order, for ``threads`` threads, on which the sizes of tiles depend.

    A call of too many steps to be followed is extrapolated, as a power of n, from the two longest lengths of the same
    thing that could be followed. The estimate says so.
    """
    torch.set_num_threads(threads)
    followed: dict[Cell, dict[int, Prediction]] = {}
    for cell in cells:
        known = followed.setdefault(replace(cell, shape=replace(cell.shape, seq_len=1)), {})
        n = cell.shape.N
        if not any(one.too_long for length, one in known.items() if length < n):
            known[n] = _follow(cell)
        if n not in known or known[n].too_long:
            yield cell, _extrapolate(n, known)
        else:
            yield cell, known[n]


def _follow(cell: Cell) -> Prediction:
    steps = cell.training.pretrain_steps + cell.training.steps if cell.training else 1
    if cell.level == "pretrained":
        return Prediction(None, None, "not foreseen: that would take the weights")
    try:
        if not {"time", "memory", "score"} & {*cell.measure}:
            predict(lambda: _refuse(cell))
            return Prediction(None, None, "error only")
        # Fake tensors carry any device; the CPU is the one that every machine has.
        cell = replace(cell, device="cpu", compile=False)
        seen = first_examples(cell) if cell.task else None  # drawn out here, where tensors are real
        fake = (lambda _: (seen[0], _fake(seen[1]))) if seen else first_examples
        one = predict(lambda: prepare(cell, move=move_fake, draw=draw_sizes, examples=fake).run)
        if "score" not in cell.measure:
            return one
        flops = None if one.matmul_flops is None else steps * one.matmul_flops
        return replace(one, matmul_flops=flops, reason=one.reason or f"of {steps} steps")
    except Exception as error:
        return Prediction(None, None, one_line("{}: {}".format(*status_of(error))))


def _refuse(cell: Cell) -> Callable[[], None]:
    """Build the variant and draw its input as for an error: either refuses what it does not allow."""
    draw_sizes(cell.inputs, cell.whole_shape, cell.seed)
    build(cell.variant, cell.whole_shape, seed=cell.seed)
    return lambda: None


def _fake(real: Examples) -> Examples:
    """Examples of the same sizes; called where all new tensors are fake."""
    return Examples(*(torch.zeros(one.shape, dtype=one.dtype) for one in (real.tokens, real.labels)))


def _extrapolate(n: int, known: dict[int, Prediction]) -> Prediction:
    """A power of n through the last two points that are known; unknown where there are fewer."""
    points = sorted((length, one) for length, one in known.items() if one.peak_bytes is not None)[-2:]
    if len(points) < 2:
        return Prediction(None, None, "unknown: too many steps to be followed")
    (n0, first), (n1, last) = points
    values = []
    for low, high in ((first.matmul_flops, last.matmul_flops), (first.peak_bytes, last.peak_bytes)):
        assert low is not None
        assert high is not None
        power = math.log(high / low) / math.log(n1 / n0) if low and high else 0.0
        values.append(round(high * (n / n1) ** power))
    return Prediction(values[0], values[1], f"extrapolated from n = {n0}, {n1}")
