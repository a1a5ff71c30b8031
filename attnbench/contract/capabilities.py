"""Types of the optional abilities of a variant's module, besides ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # torch takes seconds to import
    from torch import Tensor


@runtime_checkable
class Dense(Protocol):
    """It has its documented formula next to the fast path: all pairs at once, in plain torch."""

    def dense(self, *inputs: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """The output of ``forward`` for the same inputs."""


@runtime_checkable
class Decoding(Protocol):
    """It can process one token after another."""

    def begin(self, *inputs: Tensor) -> Any:
        """The state after n >= 0 tokens: q ``(B, H, n, D)``, k, v ``(B, K, n, ·)``, or x ``(B, n, C)`` of a mixer."""

    def step(self, state: Any, *inputs: Tensor) -> tuple[Tensor, Any]:
        """The output for the next token, with inputs of n = 1, and the state after it."""


@runtime_checkable
class Roomy(Protocol):
    """A part of a decoding state, a tuple, with room in its tensors for later tokens."""

    def unused(self) -> tuple[Tensor, ...]:
        """Views of the places that hold nothing: no step may read them before it writes them."""


@runtime_checkable
class Selection(Protocol):
    """The pairs of query and key that count."""

    def pairs(self, queries: slice) -> Tensor:
        """The visible keys that each of n queries attends to, ``(B, H, n, M)`` bool."""


@runtime_checkable
class Selecting(Protocol):
    """It chooses which pairs count, and then takes one softmax for each query over those: ``forward`` does both."""

    def select(self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None) -> Any:
        """The choice, a :class:`Selection`, from q ``(B, H, N, D)`` and k ``(B, K, M, D)``."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: Any) -> Tensor:
        """The output of ``forward``, ``(B, H, N, E)``, for a choice that :meth:`select` made."""


def chooser(module: Any) -> Selecting | None:
    """The module, if it chooses which pairs count (its attribute ``selects`` decides, if it has one)."""
    return module if isinstance(module, Selecting) and getattr(module, "selects", True) else None


@runtime_checkable
class Patterned(Protocol):
    """The pairs that count are fixed by their places: there is nothing to choose."""

    def pairs_by_place(self, keys: int, device: Any) -> Selection | None:
        """The pairs among ``keys`` keys; None if the output is no softmax of q·k/√D over some of them."""


@runtime_checkable
class RandomKernel(Protocol):
    """It estimates a kernel of queries and keys by random features.

    A module that knows the mean of its estimate also has ``kernel_mean(q, k)``; without it the mean is exp(q·k/√D). One
    that knows the variance has ``kernel_variance(q, k)``, which gives it relative to the squared mean, or None.
    """

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """The estimate ``(B, H, N, M)`` from the features that were drawn."""


@runtime_checkable
class KernelMean(Protocol):
    """It knows what its random kernel is on average."""

    def kernel_mean(self, q: Tensor, k: Tensor) -> Tensor:
        """``(B, H, N, M)``."""


@runtime_checkable
class Prompted(Protocol):
    """It answers a prompt and keeps its state in one go, where ``forward`` and ``begin`` share work."""

    def prompted(self, *inputs: Tensor) -> tuple[Tensor, Any]:
        """The outputs for a prompt of n >= 1 tokens, of the last one at least, and the state after it."""


@runtime_checkable
class Budgeted(Protocol):
    """After a prompt its steps read a part of the prompt's keys only."""

    def tokens_kept(self, prompt: int) -> int:
        """Number of ``prompt`` tokens that a step reads."""

    def keys_read(self, q: Tensor, k: Tensor, v: Tensor, prompt: int) -> Tensor:
        """The keys ``(B, K, N - prompt, N)`` bool that the queries after a prompt of ``prompt`` tokens read.

        Args:
            q: ``(B, H, N, D)``, of the prompt and of what follows it; k: ``(B, K, N, D)``; v: ``(B, K, N, E)``.
        """


def answered(module: Any, *prompt: Tensor) -> tuple[Tensor, Any]:
    """The outputs for a prompt of n >= 1 tokens, of the last one at least, and the state after it."""
    if isinstance(module, Prompted):
        return module.prompted(*prompt)
    return module(*prompt), module.begin(*prompt)


def steps(
    module: Any, state: Any, inputs: Sequence[Tensor], first: int, *, before: Callable[..., object] | None = None
) -> Iterator[Tensor]:
    """The outputs of single steps for the tokens of ``inputs`` from number ``first`` on, behind a state.

    ``before`` is called ahead of each step with the state and the token.
    """
    for t in range(first, inputs[0].shape[-2]):
        token = [x[..., t : t + 1, :] for x in inputs]
        if before is not None:
            before(state, *token)
        output, state = module.step(state, *token)
        yield output
