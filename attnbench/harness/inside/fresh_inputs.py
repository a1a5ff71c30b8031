"""After timing, check the variant on new inputs: the timed code must compute the variant's own output.

A variant could return an earlier result, or compute only off the clock: its numbers then differ from those of a newly
built one in an untimed call. It could cache known inputs: it then takes longer on unknown ones. Or it could compute
something else: it then differs from its formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnbench.errors import BrokenContract
from attnbench.harness.inside.call import Call
from attnbench.harness.inside.turns import SEEN, UNSEEN
from attnbench.measure.stopwatch import Stopwatch
from attnbench.measure.time import OutputKeeper, garbage_collection_off
from attnbench.suite.cell import Cell

_LOOKED_AT = 1024
"""Numbers kept of each result: so few that looking at them leaves caches and memory as they were."""
_ATTEMPTS = 10
_GROUP = UNSEEN // _ATTEMPTS
"""Calls in one attempt if a single one is too short to be timed."""
_SHORT = 1e-3  # seconds
_SLOWER = 1.5
"""More than this many times as long as on seen inputs is too long: less may be due to their place in memory."""
_PAGES = 50e-6  # seconds
"""Time that new pages of memory may add to a call on unseen inputs: some processes get a few, 10 µs each, each time."""
_FEWEST, _CLEARLY, _LONG = 3, 10.0, 1.0
"""After this many attempts, calls that take this many times as long plus this many seconds are surely slower: no core
is away for so long."""

_NOT_EACH = "it gives other numbers while it is timed: it does not compute in each call"
_UNDECIDED = "too busy to tell whether it keeps results; measure it again on a quiet machine"

Look = Tensor
"""Some numbers of a call's output, in float64 on the CPU."""


def tensors(output: Any) -> list[Tensor]:
    """The tensors of a call's output; raise BrokenContract for anything else, which might compute only when looked
    at."""
    parts = [part for part in output if part is not None] if isinstance(output, tuple | list) else [output]
    for part in parts:
        if type(part) is not Tensor:
            raise BrokenContract(f"it breaks the contract: it returns a {type(part).__name__}, not a torch.Tensor")
    return parts


def look(output: Any) -> Look:
    """Take numbers from the same places of each tensor in every look."""
    numbers = []
    for one in tensors(output):
        places = _places(one.shape, one.device, flat=one.is_contiguous())
        numbers.append((one.detach().view(-1) if one.is_contiguous() else one.detach())[places].double().cpu())
    return torch.cat(numbers)


@lru_cache(maxsize=64)
def _places(shape: torch.Size, device: torch.device, *, flat: bool) -> tuple[Tensor, ...]:
    count = shape.numel()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(max(1, count), (_LOOKED_AT if count else 0,), generator=generator)
    # torch's unravel_index imports the modules of a compiler, which takes a fifth of a second in each process.
    parts = (places,) if flat else map(torch.from_numpy, np.unravel_index(places.numpy(), shape))
    return tuple(one.to(device) for one in parts)


def hold_to_earlier(call: Call, timed: Look, number: int, earlier: Sequence[Look], cell: Cell) -> str | None:
    """Hold a look for one of the inputs in turn to the earlier one; if they differ, act as :func:`hold_to`."""
    return None if agree(timed, earlier[number], cell) else hold_to(timed, call.on(number), cell)


def hold_to(timed: Look, otherwise: Callable[[], Any], cell: Cell) -> str | None:
    """Hold a timed call's output to an untimed one's, to half the digits of the cell's dtype.

    Returns a warning if untimed calls differ among themselves, and raises BrokenContract if the two differ.
    """
    wanted = look(otherwise())
    if agree(timed, wanted, cell):
        return None
    if not agree(wanted, look(otherwise()), cell):
        return "its numbers change from call to call, so that those of timed calls could not be checked"
    raise BrokenContract(_NOT_EACH)


def agree(one: Look, other: Look, cell: Cell) -> bool:
    """True if two looks saw the same numbers, to half the digits of the cell's dtype."""
    norm, eps = torch.linalg.vector_norm, torch.finfo(getattr(torch, cell.dtype)).eps
    return one.shape == other.shape and bool(norm(one - other) <= eps**0.5 * norm(other))


def hold_to_unseen(
    cell: Cell, call: Call, watch: Stopwatch, seconds: float, earlier: Sequence[Look]
) -> tuple[int, Look, str | None]:
    """Time a call on inputs that it has not seen, and look at it and at the next one.

    Most calls are as quick at once. For the others, seen and unseen inputs are timed in a random order, several times.
    If a call computes each time, either is as likely to be the slower one, however busy the machine is.

    Args:
        seconds: of a call on the inputs in turn.
        earlier: looks at those.

    Returns:
        The number of the inputs, the look, and a warning if unseen inputs took longer each time, but within reach of a
            busy machine.

    Raises:
        BrokenContract: it takes longer each time, repeats another input's output, or computes in some calls only.
    """
    group = _GROUP if seconds < _SHORT else 1
    coin = Random(cell.seed)
    seen, unseen = [seconds], list[float]()
    with garbage_collection_off():
        for attempt in range(_ATTEMPTS):
            numbers = range(SEEN + attempt * _GROUP, SEEN + attempt * _GROUP + group)
            for known in coin.sample([True, False], 2) if attempt else [False]:
                if known:
                    seen.append(watch.time(call.run, group)[0] / group)
                else:
                    kept = OutputKeeper([call.on(number) for number in numbers])
                    unseen.append(watch.time(kept, group)[0] / group)
                    found = look(kept.output)
                    del kept  # there may be no memory for one more
            known_result = not call.may_repeat and any(torch.equal(found, one) for one in earlier)
            if known_result and not torch.equal(*earlier):
                raise BrokenContract("it returns an earlier result for inputs that it has not seen before")
            computes = min(unseen) <= _SLOWER * min(seen) + _PAGES
            if computes:
                break
            if attempt == 0:  # no longer counts: had it been quicker, this would be over
                seen, unseen = [], []
            elif attempt >= _FEWEST and min(unseen) > _CLEARLY * max(seen) + _LONG:
                break
        # In turn: what computes in every second call only gives, for one of the three, the result of the other inputs.
        after = [(number, look(call.on(number)())) for number in ((0, 1, 0) if group > 1 else (0,))]
    for number, again in after:
        hold_to_earlier(call, again, number, earlier, cell)
    if len(seen) > 1 and min(unseen) > _SLOWER * sorted(seen)[-2] + _PAGES:
        slower = min(unseen) / min(seen)
        raise BrokenContract(f"it keeps results: inputs that it has not seen take {slower:.1f} times as long as others")
    return numbers[-1], found, None if computes else _UNDECIDED
