"""What a suite will need, from fake tensors: nothing is allocated and nothing computed."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from attnbench.cell import UNTOUCHED, Cell, ModelSize
from attnbench.measure.flops import STEPS, Prediction, move_fake, predict
from attnbench.qkv import draw_sizes
from attnbench.record import one_line
from attnbench.run.call import Trained, first_examples, prepare
from attnbench.run.outcome import status_of
from attnbench.task import Examples, Form
from attnbench.variant import build

_SHORTER = (16, 64, 256, 1024, 4096)
"""What is too long is followed at one, two and three times the length over one of these, the first that is short
enough."""
_SHORTEST = 8
_AT_ANY_PRICE = 10
"""How many times as many steps are followed where shorter lengths tell nothing."""
_POINTS = 3


def estimate(cells: Sequence[Cell], threads: int) -> Iterator[tuple[Cell, Prediction]]:
    """One estimate per cell, in order, for ``threads`` threads, on which the sizes of tiles depend.

    Cells of the same sizes are followed once. A call of too many steps to be followed is extrapolated from shorter
    lengths of the same thing. The estimate says so.
    """
    torch.set_num_threads(threads)
    found: dict[Cell, Prediction] = {}
    followed: dict[Cell, dict[int, Prediction]] = {}
    for cell in cells:
        alike = _sizes_alone(cell)
        if alike not in found:
            known = followed.setdefault(replace(alike, shape=replace(alike.shape, seq_len=1)), {})
            found[alike] = _foresee(alike, known)
        yield cell, _of_all_steps(cell, found[alike])


def _sizes_alone(cell: Cell) -> Cell:
    """The cell without what changes no size: its names, its seed, and how it is trained."""
    return replace(cell, suite="", sweep="", seed=0, training=None)


def _of_all_steps(cell: Cell, one: Prediction) -> Prediction:
    """The prediction of a step as that of the cell, which may be a whole training."""
    if cell.training is None or one.peak_bytes is None:
        return one
    steps = cell.training.pretrain_steps + cell.training.steps
    flops = None if one.matmul_flops is None else steps * one.matmul_flops
    return replace(one, matmul_flops=flops, reason="; ".join(filter(None, [f"of {steps} steps", one.reason])))


def _foresee(cell: Cell, known: dict[int, Prediction]) -> Prediction:
    """The prediction of a cell.

    Args:
        known: those of the same cell at other lengths, to which those that are made here are added.
    """
    n = cell.shape.N
    if any(one.too_long for length, one in known.items() if length < n):
        return _extrapolate(n, known)
    one = known[n] = _follow(cell, n, STEPS)
    if not one.too_long:
        return one
    if not _is_regular(known):
        _follow_shorter(cell, known)
    if not _is_regular(known):
        known[n] = _follow(cell, n, _AT_ANY_PRICE * STEPS)
    return _extrapolate(n, known) if known[n].too_long else known[n]


def _follow_shorter(cell: Cell, known: dict[int, Prediction]) -> None:
    """Add three lengths that are short enough, if there are any: an n-th of the cell's, and two and three times it."""
    n = cell.shape.N
    if cell.shape.kv_len is not None or cell.shape.q_start:
        return
    for part in _SHORTER:
        one, rest = divmod(n, part)
        if rest or one < _SHORTEST:
            return
        found = {}
        for times in range(_POINTS, 0, -1):
            found[times * one] = _follow(cell, times * one, STEPS)
            if found[times * one].peak_bytes is None:
                break
        else:
            known |= found
            return
        if not found[_POINTS * one].too_long:
            return


def _follow(cell: Cell, n: int, most: int) -> Prediction:
    """The prediction of a cell, or of the same cell at another length.

    Args:
        most: calls of torch that are followed for each layer.
    """
    gc.freeze()  # to look through what was imported, and through earlier cells, would take longer than to follow one
    try:
        # Fake tensors carry any device; the CPU is the one that every machine has.
        cell = replace(cell, device="cpu", compile=False)
        layers, trained = 1, None
        if cell.level == "pretrained":
            from attnbench.pretrained.unread import described  # only trained models need it

            model = described(cell)
            layers, trained = model.layers, model.swapped
        elif cell.level == "model":
            layers = (cell.model or ModelSize()).layers
        if not {"time", "memory", "score"} & {*cell.measure}:
            predict(lambda: _refuse(cell, trained))
            return Prediction(None, None, f"{cell.measure[0]} only")
        examples = _examples(cell, n) if cell.task else first_examples
        other = replace(cell, shape=replace(cell.shape, seq_len=n)) if n != cell.shape.N else cell
        make = lambda: prepare(other, move_fake, draw_sizes, examples, trained).run  # noqa: E731
        one = predict(make, most=most * layers)
        if cell.variant.name == UNTOUCHED and cell.shape.causal and one.peak_bytes is not None:
            return replace(one, reason="about: the model's own attention may skip pairs that causality hides")
        return one
    except Exception as error:
        return Prediction(None, None, one_line("{}: {}".format(*status_of(error))))


def _refuse(cell: Cell, trained: Trained | None) -> Callable[[], None]:
    """Build the variant and draw its input as for an error or a loss: either refuses what it does not allow."""
    if trained is not None:
        trained(cell)
    else:
        draw_sizes(cell.inputs, cell.whole_shape, cell.seed)
        build(cell.variant, cell.whole_shape, seed=cell.seed)
    return lambda: None


def _examples(cell: Cell, n: int) -> Callable[[Cell], tuple[Form, Examples]]:
    """Makes fake examples of a cell's task, as long as the first ones are, or cut to ``n`` tokens.

    The first ones are drawn here, where tensors are real.
    """
    form, real = first_examples(cell)
    along = {"tokens": -1 if len(form.vocab) == 1 else -2, "labels": -1 if form.per_token else None}

    def fake(_: Cell) -> tuple[Form, Examples]:
        sizes = {name: list(getattr(real, name).shape) for name in along}
        for name, dim in along.items():
            if dim is not None and sizes[name][dim] == cell.shape.N:
                sizes[name][dim] = n
        return form, Examples(**{name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()})

    return fake


def _points(known: dict[int, Prediction]) -> list[tuple[int, Prediction]]:
    """The longest lengths at which something could be followed, in order."""
    return sorted((length, one) for length, one in known.items() if one.peak_bytes is not None)[-_POINTS:]


def _is_regular(known: dict[int, Prediction]) -> bool:
    """Whether the calls of torch grow by the same number with each token: then each token does the same."""
    points = _points(known)
    return len(points) == _POINTS and _on_a_line([(length, one.steps) for length, one in points])


def _on_a_line(points: Sequence[tuple[int, int]]) -> bool:
    (a, x), (b, y), (c, z) = points
    return (y - x) * (c - b) == (z - y) * (b - a)


def _extrapolate(n: int, known: dict[int, Prediction]) -> Prediction:
    """FLOPs as a polynomial in n of degree 2 where each token does the same, else as a power of n; so are bytes, unless
    they lie on a line. Unknown where fewer than two lengths could be followed.
    """
    points = _points(known)
    if len(points) < 2:
        return Prediction(None, None, "unknown: too many steps to be followed")
    flops = [(length, one.matmul_flops or 0) for length, one in points]
    held = [(length, one.peak_bytes or 0) for length, one in points]
    regular = _is_regular(known)
    lengths = ", ".join(str(length) for length, _ in (points if regular else points[-2:]))
    return Prediction(
        _polynomial(flops, n) if regular else _power(flops, n),
        _polynomial(held, n) if regular and _on_a_line(held) else _power(held, n),
        f"extrapolated from n = {lengths}",
    )


def _polynomial(points: Sequence[tuple[int, int]], n: int) -> int:
    """The value at n of the polynomial through all points."""
    whole = Fraction(0)
    for place, value in points:
        others = [other for other, _ in points if other != place]
        whole += value * math.prod(Fraction(n - other, place - other) for other in others)
    return max(0, round(whole))


def _power(points: Sequence[tuple[int, int]], n: int) -> int:
    """The value at n of a power of n through the last two points."""
    (n0, low), (n1, high) = points[-2:]
    power = math.log(high / low) / math.log(n1 / n0) if low and high else 0.0
    value: float = high * (n / n1) ** power
    return round(value)
