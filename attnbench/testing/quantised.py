"""The law about what rounds its inputs to a few bits: how its error may depend on blocks and on what keys share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from attnbench.reference import exact_attention, relative_error
from attnbench.shape import Shape
from attnbench.testing.laws import Case, Measured, law

SIZES = (256, 64, 16, 4)
"""What shares a scale, step by step."""

FALL = 0.95
"""The most that may be left of the error where a quarter as many share a scale, on inputs for which that matters."""

SAME = 0.1
"""How far an output may move when all keys do, in units of the error: of many numbers one may be rounded otherwise."""

WORSE = 0.2
"""The error without an offset in units of that with it, at most, where what keys share is rounded with them."""


@law(
    "rounding in blocks",
    applies=lambda case: case.operator and not case.causal and case.traits.rounds is not None,
    claim=lambda traits: traits.rounds is not None,
)
def rounding_in_blocks(case: Case) -> Iterator[Measured]:
    """Smaller blocks round less. What keys share moves an output unless it is taken off first."""
    rounds, shape = case.traits.rounds, Shape(1, 2, 512, 256)
    assert rounds is not None
    q, k, v = case.draw(shape)
    exact = exact_attention(q, k, v)
    if rounds.blocks:
        lengths = _lengths(shape.N).to(q)
        uneven = q * lengths, k * lengths, v * _lengths(shape.D).to(q).mT
        expected = exact_attention(*uneven)
        every = dict.fromkeys([rounds.kept] if rounds.kept else [], 0)
        errors = [
            relative_error(case.module(shape, options=dict.fromkeys(rounds.blocks, size) | every)(*uneven), expected)
            for size in SIZES
        ]
        for size, (before, after) in zip(SIZES[1:], pairwise(errors), strict=True):
            left = after / before
            yield Measured(left, FALL, f"with {size} to a scale the error is {left:.3f} of that with 4 times as many")
    if not rounds.smooth:
        return
    moved = k + 60 * case.draw(shape, seed=1)[1][:, :, :1]
    on = case.module(shape, options={} if rounds.smooth == "always" else {rounds.smooth: True})
    still = on(q, k, v)
    far = relative_error(on(q, moved, v), still) / max(relative_error(still, exact), case.close)
    yield Measured(far, SAME, f"what all keys share moves the output by {far:.2g} times the error of rounding")
    if rounds.smooth != "always":
        off = case.module(shape, options={rounds.smooth: False})
        share = relative_error(off(q, k, v), exact) / relative_error(off(q, moved, v), exact)
        yield Measured(
            share, WORSE, f"{rounds.smooth}=false, and what all keys share is taken off: {share:.2g} of the error"
        )


def _lengths(n: int) -> Tensor:
    """Factors ``(n, 1)`` of tokens or channels: products of one for each run of 256, 64, 16, 4 and 1 of them."""
    generator, total = torch.Generator().manual_seed(2), torch.zeros(n, dtype=torch.float64)
    for run in (*SIZES, 1):
        total += torch.randn(n // run, dtype=torch.float64, generator=generator).repeat_interleave(run)
    return (0.5 * total).exp()[:, None]
