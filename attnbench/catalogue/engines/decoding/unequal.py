"""One decoding state of sequences of unequal length, made of the state of each alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.drafts import again
from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding, Unequal
from attnbench.catalogue.engines.decoding.pages import Paged
from attnbench.contract.capabilities import Roomy
from attnbench.errors import Unsupported

ONE_LENGTH = "padding: in passes stepwise and generate all sequences have one length; remove it, or write pass: decode"


def joined(module: nn.Module, states: Sequence[Any]) -> Any:
    """The state of a batch from the states of its sequences alone, which have lengths of their own; they are copied.

    Tensors are joined along the batch. A cache becomes an
    :class:`~attnbench.catalogue.engines.decoding.kv_cache.Unequal`,
    if the step takes one. A part of another type than a number, a tensor or a tuple is a constant of the module.

    Raises:
        Unsupported: the parts of these states differ by more than their numbers, or the step takes one length.
    """
    if not isinstance(states[0], Cache | Paged):
        return _joined(states)
    parts: list[Any] = list(module.modules())
    cached = [part for part in parts if isinstance(part, CachedDecoding)]
    if not cached or not all(part.unequal for part in cached):
        raise Unsupported("padding: its step reads a cache in which all sequences have one length; remove padding")
    hides = any(str(part.visible.mask) != "none" for part in parts if getattr(part, "visible", None) is not None)
    biased = any(getattr(part, "position_bias", None) is not None for part in parts)
    for axis, asked in (("bias", biased), ("mask", hides)):
        if asked:
            raise Unsupported(
                f"padding: a decoding step takes no {axis} with unequal lengths; remove {axis} or padding"
            )
    longest = max(one.length for one in states)
    lengths = torch.tensor([one.length for one in states], device=states[0].k.device)
    return Unequal((_pooled if isinstance(states[0], Paged) else _stacked)(states)._replace(length=longest), lengths)


def _stacked(caches: Sequence[Cache]) -> Cache:
    first, room = caches[0], max(one.k.shape[2] for one in caches)
    k, v = (x.new_zeros(len(caches), x.shape[1], room, x.shape[3]) for x in first[:2])
    for row, one in enumerate(caches):
        k[row, :, : one.length], v[row, :, : one.length] = one.keys[0], one.values[0]
    return Cache(k, v, room)


def _pooled(caches: Sequence[Paged]) -> Paged:
    page, room = caches[0].k.shape[2], max(one.table.shape[1] for one in caches)
    nothing = [x.new_empty(len(caches), x.shape[1], 0, x.shape[3]) for x in caches[0][:2]]
    paged = Paged.of(nothing[0], nothing[1], room * page, page)
    for row, one in enumerate(caches):
        there = one.table[0, : -(-one.length // page)]
        here = paged.table[row, : len(there)]
        paged.k[here], paged.v[here] = one.k[there], one.v[there]
    return paged


def _joined(states: Sequence[Any]) -> Any:
    first = states[0]
    if isinstance(first, Roomy):
        raise Unsupported("padding: its step reads a cache in which all sequences have one length; remove padding")
    if isinstance(first, Tensor):
        if any(one.shape != first.shape for one in states):
            raise Unsupported("padding: its state has another size after other tokens; remove padding")
        return torch.cat(list(states))
    if isinstance(first, tuple):
        return again(first, [_joined(parts) for parts in zip(*states, strict=True)])
    if isinstance(first, int | float) and any(one != first for one in states):
        raise Unsupported("padding: its state counts the tokens of all sequences alike; remove padding")
    return first
