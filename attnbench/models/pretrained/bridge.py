"""The attention of a model of the transformers library, intercepted at the library's own interface.

Every modern model there ends in one call with q, k, v and a mask, looked up under a name. This module registers a name
of its own, for the call and for its mask: without the second a model would pass no mask, and padding, windows and
causality would be lost silently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.contract.problem.reference import of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError
from attnbench.models.pretrained.subject import Exact, Layer

NAME = "attnbench"
MISSING = "this model needs transformers; install it with: pip install 'attnbench[models]'"

_CHANGES = {
    "softcap": "it caps its logits (softcap), which no variant does",
    "s_aux": "it has attention sinks (s_aux), which no variant has",
    "position_bias": "it adds a learned bias of positions to its logits (position_bias), which no variant takes",
}
"""Arguments of the call that change the mathematics -> why such a model is refused."""
_CROSS = ("encoder_attn", "cross_attn", "crossattention", "encdecattention")
"""Parts of the names of modules that attend to another sequence."""


@dataclass(slots=True)
class Session:
    """One forward pass: a callback for each call, in their order."""

    at: Callable[[int, Any, Tensor, Tensor, Tensor, Exact], Tensor] | None = None
    """Called with the number of the call, the module, scaled q, repeated k and v, and the exact answer."""
    calls: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    patterns: dict[int, MaskPattern] = field(default_factory=dict)
    """Identity of a mask -> its pattern; one mask serves many layers."""


_SESSION: ContextVar[Session | None] = ContextVar("session", default=None)


@contextmanager
def session(one: Session) -> Iterator[Session]:
    """Let the calls of attention in this block pass through ``one``."""
    token = _SESSION.set(one)
    try:
        yield one
    finally:
        _SESSION.reset(token)


def library() -> Any:
    """The transformers library. Raises UsageError: it is not installed, or too old."""
    try:
        found: Any = import_module("transformers")
    except ImportError:
        raise UsageError(MISSING) from None
    if tuple(int(part) for part in found.__version__.split(".")[:2]) < (5, 10):
        raise UsageError(f"transformers {found.__version__} is too old; install 'attnbench[models]', which takes 5.10")
    return found


@cache
def register() -> None:
    """Register the name with the library, once in a process. Raises UsageError if it is missing or too old."""
    transformers = library()
    transformers.AttentionInterface.register(NAME, _attend)
    transformers.AttentionMaskInterface.register(NAME, _mask)


def put_into(model: nn.Module) -> None:
    """Make a model call this module's attention. Raises Unsupported if it does not use the library's interface."""
    register()
    model_: Any = model
    can = getattr(model_, "_can_set_attn_implementation", None)
    if can is None or not can():
        raise Unsupported(
            f"{type(model).__name__} computes its attention by itself and not through the library's interface, so that "
            "nothing can be put in its place"
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        model_.gradient_checkpointing_disable()
    model_.config.use_cache = False
    model_.set_attn_implementation(NAME)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """A mask of booleans ``(B, 1, N, M)``, even if the library would leave it to a flag."""
    sdpa_mask = import_module("transformers.masking_utils").sdpa_mask
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's callback: q ``(B, H, N, D)``, k and v ``(B, KV, M, D)``, not scaled yet; gives ``(B, N, H, D)``.

    Dropout is left out: no variant has it, and models are read and trained without.
    """
    for name, why in _CHANGES.items():
        if others.get(name) is not None:
            raise Unsupported(f"{type(module).__name__}: {why}")
    q = query if scaling is None else folded(query, float(scaling))
    k, v = (of_query_heads(x, query.shape[1]) for x in (key, value))
    mask = _of_self_attention(module, attention_mask, q, others)

    def exact() -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    one = _SESSION.get()
    if one is None:
        return exact().transpose(1, 2).contiguous(), None
    place = len(one.calls)
    facts = {
        "heads": query.shape[1],
        "kv_heads": key.shape[1],
        "length": query.shape[2],
        "keys": key.shape[2],
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "mask": mask,
        "window": others.get("sliding_window"),
    }
    one.calls.append((module, facts))
    answer = exact() if one.at is None else one.at(place, module, q, k, v, exact)
    return answer.transpose(1, 2).contiguous(), None


def folded(query: Tensor, scaling: float) -> Tensor:
    """The query for which softmax(q·k/√D) is softmax(scaling · query·k)."""
    return query * (scaling * math.sqrt(query.shape[-1]))


def _of_self_attention(module: Any, mask: Tensor | None, q: Tensor, others: dict[str, Any]) -> Tensor | None:
    """The mask; if the model passes none, that of its flag ``is_causal``."""
    if mask is not None:
        return mask
    flag = others.get("is_causal")
    causal = getattr(module, "is_causal", False) if flag is None else flag
    if not causal or q.shape[2] == 1:
        return None
    n = q.shape[2]
    return torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[None, None]


def calls_of(
    model: nn.Module, run: Callable[[], object], *, causal: bool | None = None
) -> tuple[tuple[str, ...], tuple[Layer, ...]]:
    """The names of the modules that attend in one forward pass, and their layers, both in the order of the calls.

    Args:
        model: after :func:`put_into`.
        run: one forward pass over windows without padding.
        causal: causality of a model of fake tensors, whose masks show nothing.

    Raises:
        Unsupported: a call has something that no variant has, a mask that is no simple pattern, or there is no call.
    """
    names = {id(module): name for name, module in model.named_modules()}
    with session(Session()) as seen, torch.no_grad():
        run()
    if not seen.calls:
        raise Unsupported(f"{type(model).__name__}: no attention was reached through the library's interface")
    look = partial(_seen, seen) if causal is None else partial(_said, causal)
    attends = tuple(names.get(id(module), type(module).__name__) for module, _ in seen.calls)
    return attends, tuple(_layer(name, facts, look) for name, (_, facts) in zip(attends, seen.calls, strict=True))


def _seen(of: Session, facts: dict[str, Any]) -> MaskPattern:
    mask = facts["mask"]
    if mask is None:
        return MaskPattern(causal=False)
    if id(mask) not in of.patterns:
        of.patterns[id(mask)] = pattern_of(mask)
    return of.patterns[id(mask)]


def _said(causal: bool, facts: dict[str, Any]) -> MaskPattern:
    window = facts["window"]
    return MaskPattern(causal, window if window is not None and window < facts["length"] else None)


def _layer(name: str, facts: dict[str, Any], pattern_of_call: Callable[[dict[str, Any]], MaskPattern]) -> Layer:
    cross = facts["keys"] != facts["length"] or any(part in name.lower() for part in _CROSS)
    pattern = MaskPattern(causal=False) if cross else pattern_of_call(facts)
    if facts["head_dim"] != facts["value_dim"]:
        raise Unsupported(
            f"{name}: its values are {facts['value_dim']} wide and its queries {facts['head_dim']}; no variant takes it"
        )
    shape = Shape(1, facts["heads"], facts["length"], facts["head_dim"], causal=pattern.causal)
    if cross:
        return Layer(shape, "cross", "it attends to another sequence")
    window = pattern.window is not None
    kept = f"it sees a {pattern.kind} tokens, which a variant would not" if window else ""
    return Layer(shape, pattern.kind, kept, facts["heads"] // facts["kv_heads"])


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """A mask in words."""

    causal: bool
    window: int | None = None
    """Tokens that the last query sees, itself included; without causality as many on each side as make half of it."""

    @property
    def kind(self) -> str:
        if self.window is not None:
            return f"window of {self.window}"
        return "causal" if self.causal else "full"

    def rebuilt(self, n: int, device: torch.device) -> Tensor:
        """The mask ``(n, n)``, True where a key may be seen."""
        distance = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)
        seen = distance >= 0 if self.causal else torch.ones(n, n, dtype=torch.bool, device=device)
        if self.window is not None:
            seen = seen & (distance.abs() < self.window)
        return seen


def pattern_of(mask: Tensor) -> MaskPattern:
    """The pattern of a mask of windows without padding, bool ``(B, 1, N, N)``, True where a key may be seen.

    Raises Unsupported if it differs between sequences, or is neither full, causal nor a window.
    """
    seen = mask[0, 0]
    n = seen.shape[-1]
    if mask.dtype is not torch.bool or seen.shape != (n, n) or not bool((mask == seen).all()):
        raise Unsupported("its mask is neither full, causal nor a window, the same for all sequences")
    causal = not bool(seen.triu(1).any())
    last = int(seen[-1].sum())
    pattern = MaskPattern(causal, None if last == n else last)
    if not torch.equal(pattern.rebuilt(n, seen.device), seen):
        raise Unsupported("its mask is neither full, causal nor a window: padding or packed sequences are not read")
    return pattern
