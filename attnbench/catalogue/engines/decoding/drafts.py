"""Several tokens in one step, as drafts are verified, the way back to those that are accepted, and narrow states.

A prompt whose first part is known already is taken in the same way, by :func:`behind`, from the state of that part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Unequal
from attnbench.contract.capabilities import Decoding, Roomy, answered
from attnbench.errors import Unsupported

NO_STATE = "it keeps tokens, as wide as dtype, and no state of real numbers; remove state_dtype"
NO_PREFIX = "its steps take one token each, and the rest of a prompt is taken at once; remove kept_prefix"
_KEPT = ("last", "recent", "k", "v", "top", "log", "log_total", "total")
"""Fields of states that hold tokens as they came, or logarithms of what the other numbers were divided by."""


def taken(module: Any, state: Any, *tokens: Tensor) -> tuple[Tensor, Any]:
    """The outputs for n >= 1 tokens ``(..., n, ·)`` and the state after them, in one step of a module with ``at_once``.

    Others take one token after the other. Either way ``state`` can be taken up again, also with other tokens.
    """
    n = _count(tokens)
    if n == 1 or getattr(module, "at_once", False):
        output, state = module.step(state, *tokens)
        return output, state
    state, outputs = _untouched(state), []
    for t in range(n):
        output, state = module.step(state, *(x[..., t : t + 1, :] for x in tokens))
        outputs.append(output)
    return torch.cat(outputs, -2), state


def known(module: nn.Module, count: int, *prompt: Tensor) -> Any:
    """The state after the first ``count`` tokens of a prompt, for :func:`behind`.

    Raises Unsupported: it has no more tokens, or the module, or a part of it, would take the rest token by token.
    """
    if count >= _count(prompt):
        raise Unsupported(f"kept_prefix: {count} tokens leave none of a prompt of {_count(prompt)}; write fewer")
    if not all(getattr(part, "at_once", False) for part in module.modules() if isinstance(part, Decoding)):
        raise Unsupported(f"kept_prefix: {NO_PREFIX}")
    assert isinstance(module, Decoding)
    return module.begin(*(x[:, :count] if x.dim() == 2 else x[..., :count, :] for x in prompt))


def behind(module: Any, state: Any, *tokens: Tensor) -> tuple[Tensor, Any]:
    """Like :func:`taken`, and later steps leave ``state`` as it is too: it serves another request."""
    return taken(module, _untouched(state), *tokens)


def rolled_back(module: Any, before: Any, after: Any, *accepted: Tensor, of: int) -> Any:
    """The state after the accepted ones, r >= 1, of ``of`` tokens that led from ``before`` to ``after``.

    Caches are cut. A state that no token can be taken out of is made again by another step from ``before``.
    """
    cut = _cut(before, after, _count(accepted), of)
    return taken(module, before, *accepted)[1] if cut is None else cut


def _count(tokens: tuple[Tensor, ...]) -> int:
    """Number of tokens of a model, ``(B, n)``, or of vectors, ``(..., n, ·)``."""
    return tokens[0].shape[1 if tokens[0].dim() == 2 else -2]


def _cut(before: Any, after: Any, count: int, of: int) -> Any:
    """The state after the first tokens, in the memory of that after all; None if some part is not cut by its length."""
    if type(before) is not type(after) or hasattr(after, "overwrites"):
        return None
    if isinstance(after, Unequal):
        cache = _cut(before.cache, after.cache, count, of)
        return None if cache is None else Unequal(cache, before.lengths + count)
    if isinstance(after, Roomy) and hasattr(after, "length"):
        length = _cut(before.length, after.length, count, of)
        return None if length is None else after._replace(length=length)  # type: ignore[attr-defined]  # a named tuple
    if isinstance(after, int):
        return before if before == after else before + count if after - before == of else None
    if not isinstance(after, tuple) or len(after) != len(before):
        return after if after is before else None
    parts = [_cut(*both, count, of) for both in zip(before, after, strict=True)]
    return None if any(part is None for part in parts) else again(after, parts)


def _untouched(state: Any, *, copied: bool = False) -> Any:
    """The state with copies of the fields that it names in ``overwrites``."""
    if isinstance(state, Tensor):
        return state.clone() if copied else state
    if not isinstance(state, tuple):
        return state
    each, spoilt = zip(_names(state), state, strict=True), getattr(state, "overwrites", ())
    return again(state, [_untouched(part, copied=copied or name in spoilt) for name, part in each])


def _names(state: tuple[Any, ...]) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(state, "_fields", ("",) * len(state))
    return names


def again(like: tuple[Any, ...], parts: list[Any]) -> Any:
    """Another tuple of the same type."""
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


class Narrow(NamedTuple):
    """Numbers of a state as they are stored between steps."""

    numbers: Tensor
    dtype: torch.dtype  # of a step's arithmetic


class NarrowState(nn.Module):
    """A module that decodes, with its recurrent state stored in ``dtype`` between steps; steps compute as before.

    Caches, tokens under a convolution and the logarithms by which sums are scaled stay as they are.

    Raises:
        Unsupported: in ``begin`` and ``prompted``, there is no such state, or a number of it is beyond ``dtype``.
    """

    at_once = True

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def begin(self, *prompt: Tensor) -> Any:
        assert isinstance(self.module, Decoding)
        return self._checked(self.module.begin(*prompt))

    def prompted(self, *prompt: Tensor) -> tuple[Tensor, Any]:
        output, state = answered(self.module, *prompt)
        return output, self._checked(state)

    def step(self, state: Any, *tokens: Tensor) -> tuple[Tensor, Any]:
        output, state = taken(self.module, _widened(state), *tokens)
        return output, self._narrowed(state)

    def _checked(self, state: Any) -> Any:
        narrowed = self._narrowed(state)
        stored = _stored(narrowed)
        if not stored:
            raise Unsupported(f"state_dtype: {NO_STATE}")
        if not all(part.numbers.isfinite().all() for part in stored):
            name = str(self.dtype)[6:]
            raise Unsupported(f"state_dtype: numbers of its state are beyond {name}; write float32 or bfloat16")
        return narrowed

    def _narrowed(self, state: Any) -> Any:
        if isinstance(state, Tensor) and state.is_floating_point():
            return Narrow(state.to(self.dtype), state.dtype)
        if not isinstance(state, tuple) or isinstance(state, Roomy):
            return state
        each = zip(_names(state), state, strict=True)
        return again(state, [part if name in _KEPT else self._narrowed(part) for name, part in each])


def _stored(state: Any) -> list[Narrow]:
    parts = [one for part in state for one in _stored(part)] if isinstance(state, tuple) else []
    return [state] if isinstance(state, Narrow) else parts


def _widened(state: Any) -> Any:
    if isinstance(state, Narrow):
        return state.numbers.to(state.dtype)
    return again(state, [_widened(part) for part in state]) if isinstance(state, tuple) else state
