"""The law about variants that choose pairs of queries and keys, and attend to those alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from attnbench.capabilities import Selecting, chooser
from attnbench.reference import masked_attention, of_query_heads
from attnbench.testing.laws import Case, Measured, gap, law
from attnbench.visible import Visible


def _chooses(case: Case) -> bool:
    return issubclass(case.variant.make, Selecting) if isinstance(case.variant.make, type) else False


@law("choice", applies=lambda case: case.operator and _chooses(case))
def choice(case: Case) -> Iterator[Measured]:
    """It attends to what it chose, its error is the mass left out, and ties take no more keys."""
    shape = case.shape
    module, (q, k, v) = case.module(), case.draw()
    choosing = chooser(module)
    if choosing is None:
        return  # with these options it does not
    selection = choosing.select(q, k)
    chosen = selection.pairs(slice(0, shape.N))
    visible = Visible.of(shape).pairs(slice(0, shape.N), slice(0, shape.M), shape.M, q.device)
    hidden = int((chosen & ~visible).sum())
    yield Measured(hidden, 0, f"it chooses {hidden} pairs that are hidden")
    out = module(q, k, v)
    # Ties may fall either way, so that only the choice that was used can be held against the output.
    own, values = of_query_heads(k, shape.H), of_query_heads(v, shape.H)
    far = gap(out, masked_attention(q, own, values, chosen))
    yield Measured(far, case.close, f"its output is {far:.2g} off that of the pairs that it says it chose")
    # o - ô = (1 - m)(ō - ô): the mass m of what is kept, ô its average, ō the average of the rest.
    weights = (q @ own.mT * shape.D**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    mass = (weights * chosen).sum(-1, keepdim=True)
    rest = (weights * ~chosen) @ values  # (1 - m)·ō
    far = gap((weights @ values) - out, rest - (1 - mass) * out)
    yield Measured(far, case.close, f"its error is {far:.2g} off that of the mass that its choice leaves out")
    yield from _attention_to_a_choice(case, module, choosing)
    oracle = case.oracle(module)
    if oracle is not None and case.traits.shares == "by itself":
        equal, every = k[:, :, :1].expand_as(k), torch.eye(shape.M, dtype=v.dtype).expand(*v.shape[:2], -1, -1)
        taken = int(choosing.select(q, equal).pairs(slice(0, shape.N)).sum(-1).max())
        most = int((oracle(q, equal, every) > 0).sum(-1).max())
        yield Measured(max(0, taken - most), 0, f"of keys that are all equal it takes {taken}; its formula {most}")
    if case.causal and not case.traits.reads_ahead:
        for t, factor in ((3, 3), (11, 3), (11, -30), (16, -30)):
            others = [torch.where(torch.arange(shape.M)[:, None] > t, factor * x, x) for x in (q, k)]
            moved = int((choosing.select(*others).pairs(slice(0, t + 1)) ^ chosen[:, :, : t + 1]).sum())
            what = f"tokens after {t} times {factor} change {moved} of the pairs chosen for queries up to {t}"
            yield Measured(moved, 0, what)


def _attention_to_a_choice(case: Case, module: nn.Module, choosing: Selecting) -> Iterator[Measured]:
    """Choosing first and attending then is the whole, and NaN at padded tokens reaches nothing."""
    q, k, v = case.draw()
    far = gap(choosing.attend(q, k, v, choosing.select(q, k)), module(q, k, v))
    yield Measured(far, case.close, f"attention to what it chose before is {far:.2g} off its output")
    if not case.traits.key_padding:
        return
    real = torch.ones(2, case.shape.N, dtype=torch.bool)
    real[0, :2] = real[0, -3:] = False  # the first as well: where nothing was chosen, an engine may read those
    q, k, v = (x.masked_fill(~real[:, None, :, None], math.nan) for x in (q, k, v))
    found = choosing.attend(q, k, v, choosing.select(q, k, key_mask=real)), module(q, k, v, key_mask=real)
    far = gap(*(x.transpose(1, 2)[real] for x in found))
    yield Measured(far, case.close, f"with NaN at padded tokens, attention to what it chose is {far:.2g} off the whole")
