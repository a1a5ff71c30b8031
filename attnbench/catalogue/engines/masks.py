"""The effect of a key mask, ``(B, M)`` bool and True for real keys, on logits and outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from attnbench.catalogue.engines.precision import hidden
from attnbench.errors import Unsupported


def emptied(key_mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Tensors ``(B, M, ·)`` or ``(B, H, M, ·)`` with zeros at their padded tokens; unchanged if there is no mask.

    A weight of 0 hides neither NaN nor infinity, since 0·NaN is NaN. Zeros do, and the logit of an emptied key is 0.
    """
    if key_mask is None:
        return inputs
    padded = ~key_mask[..., None]
    return tuple(x.masked_fill(padded if x.ndim == padded.ndim else padded[:, None], 0.0) for x in inputs)


def token_mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Mean over the real tokens of x ``(B, H, n, D)``, ``(B, H, 1, D)``; 0 if none is real."""
    if real is None:
        return x.mean(2, keepdim=True)
    (x,) = emptied(real, x)
    return x.sum(2, keepdim=True) / real.sum(1).clamp(min=1).to(x.dtype)[:, None, None, None]


def with_source(key_mask: Tensor | None, x: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor]:
    """x ``(B, N, C)`` and the tokens of keys: ``source`` ``(B, M, C)``, or x itself; emptied like them."""
    if source is None:
        (x,) = emptied(key_mask, x)
        return x, x
    (source,) = emptied(key_mask, source)
    return x, source


def added_to_logits(key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """``(B, M)``: 0 for real keys, :func:`hidden` for padded ones, which must be emptied; faster than filling logits.

    An example without a real key keeps all of its keys, so that softmax does not turn it into NaN; its outputs must be
    set to 0.
    """
    padded = ~key_mask & key_mask.any(1, keepdim=True)
    return torch.zeros_like(key_mask, dtype=dtype).masked_fill_(padded, hidden(dtype))


def seeing(key_mask: Tensor, causal: bool) -> Tensor:
    """The queries that see a real key, ``(B, 1, N, 1)`` bool; ``(B, 1, 1, 1)`` if all see the same keys."""
    seen = key_mask.cumsum(1) > 0 if causal else key_mask.any(1, keepdim=True)
    return seen[:, None, :, None]


def visible_pairs(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor:
    """The pairs that see each other, ``(B, 1, N, M)`` bool, of q ``(B, ..., N, ·)`` and k ``(B, ..., M, ·)``.

    For dense forms, which share no code with the forms they check.
    """
    pairs = torch.ones(q.shape[0], 1, q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    if causal:
        pairs = pairs.tril()
    return pairs if key_mask is None else pairs & key_mask[:, None, None]


def at_most(longest: int, tokens: int, what: str) -> None:
    """Refuse more tokens than there are learned positions; ``what`` has these, as in ``the kernel was``."""
    if tokens > longest:
        raise Unsupported(f"{tokens} tokens, but {what} made for at most {longest}")
