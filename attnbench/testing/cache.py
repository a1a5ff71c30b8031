"""The law about what decoding keeps of each token, which rows state before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from attnbench.capabilities import Decoding
from attnbench.errors import UsageError
from attnbench.measure.memory import state_bytes
from attnbench.testing.laws import Case, Measured, NothingClaimed, law

SHORT = 120
"""Tokens of the shortest text, which many sizes of blocks divide; the others are twice and four times as long."""


@law("cache", applies=lambda case: case.causal and bool(case.traits.decode), gates=False)
def cache(case: Case) -> Iterator[Measured]:
    """Decoding keeps as many bytes of each token as are stated, and no more."""
    if case.traits.emulated:
        raise NothingClaimed(f"what it keeps is not what it stands for: {case.traits.emulated}")
    try:
        held = [_held(case, SHORT * times) for times in (1, 2, 4)]
    except UsageError as limit:  # a setting may be for a few tokens only
        raise NothingClaimed(str(limit)) from None
    # What is there for any length, and what each doubling adds, as a state for each power of two, is nobody's share.
    of_token = (held[2] - 2 * held[1] + held[0]) / SHORT
    shape = replace(case.shape, batch=1, seq_len=4 * SHORT)
    stated = case.variant.cached_bytes(case.spec, shape, case.dtype.itemsize)
    what = f"a state holds {of_token:.4g} bytes more for each token; {stated or 'none'} are stated"
    yield Measured(max(0.0, of_token - (stated or 0)), 0, what)
    if hasattr(case.variant.make, "cached_bytes"):  # its own, and no bound for all; a part of a byte is rounded up
        yield Measured(max(0.0, (stated or 0) - of_token), 1, what)


def _held(case: Case, n: int) -> int:
    """Bytes that a module which is made for n tokens keeps of as many."""
    shape = replace(case.shape, batch=1, seq_len=n)
    with torch.no_grad():
        return state_bytes(cast(Decoding, case.module(shape)).begin(*case.draw(shape)))
