"""The module under question: made from a file, called with tokens or vectors, its output found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnbench.errors import Unsupported, UsageError, said
from attnbench.module_source import ModuleSource, tensors, widths
from attnbench.plugins import load

Call = Literal["tokens", "x"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asked for."""

    source: str
    """``FILE.py:Class``, with what its constructor takes as options: ``FILE.py:Class:dim=64,heads=4``."""
    call: Call | None = None
    """``tokens``: whole numbers ``(B, n)``; ``x``: vectors ``(B, n, C)``. None: x, or tokens if that fails."""
    vocab: int | None = None
    """Tokens are below it; None: the rows of the smallest embedding."""
    width: int | None = None
    """C; None: what the first layer takes."""

    @property
    def name(self) -> str:
        """The class, or the function that makes the module."""
        return ModuleSource(self.source).name


def subject_of(wanted: Wanted) -> Subject:
    """The module, called as the user said or else in the first way that works; what it raises is :class:`Subject`'s."""
    if wanted.call is not None:
        return Subject(wanted)
    try:
        return Subject(replace(wanted, call="x"))
    except UsageError as refused:
        try:
            return Subject(replace(wanted, call="tokens"))
        except UsageError:
            raise refused from None


class Subject:
    """A module in float64, in eval mode, that maps tokens ``(B, n)`` or x ``(B, n, C)`` to ``(B, n, E)``.

    Where it takes float32 only, it stays in float32. An output ``(B, E)`` for the whole sequence counts as one of one
    token: :attr:`per_token` is then false.

    Raises:
        UsageError: there is no such file, class or option; an option is missing; or it cannot be called so.
        Unsupported: its output is nothing that can be looked at token by token.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        source = ModuleSource(wanted.source)
        if not Path(source.file).is_file():
            raise UsageError(f"{source.file}: no such file")
        load(source.file)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.module = source.make().eval()
        self.vocab = wanted.vocab or _vocabulary(self.module)
        wide = [wanted.width] if wanted.width else widths(self.module)
        if wanted.call == "tokens" and self.vocab is None:
            raise UsageError(f"{wanted.source}: it has no embedding to read tokens with; use --call x, or give --vocab")
        if wanted.call == "x" and not wide:
            raise UsageError(f"{wanted.source}: nothing says how wide x is; give --width")
        self.width, self.dtype = self._first_that_works(wide if wanted.call == "x" else [None])
        self.repeats = self._repeats()
        self._hold_examples_apart()
        self.longest = self._longest()

    @torch.no_grad()
    def _repeats(self) -> bool:
        """Whether two calls on the same input agree without the same seed.

        Raises UsageError where they differ with it: then no answer would be about what was exchanged.
        """
        given = self.draw(8)
        first, second = (self._output(self.run(given), 1, 8)[0] for _ in range(2))
        if not torch.equal(first, second):
            source = self.wanted.source
            raise UsageError(f"{source}: two calls on the same input differ, by random numbers that are not torch's")
        after, _ = self._output(self.module(given), 1, 8)  # as the call before has left torch's generator
        return torch.equal(first, after)

    @torch.no_grad()
    def _hold_examples_apart(self) -> None:
        """Raise UsageError where one example changes another: the second axis may be its batch, as in nn.LSTM."""
        before, other = self.draw(8, batch=2), self.draw(8, batch=2, seed=1)
        after = torch.stack((other[0], before[1]))
        try:
            moved = (self(after)[1] - self(before)[1]).abs().max()
        except Exception:  # somebody else's code, which may take one example alone
            return
        if moved > 1e-5:
            raise UsageError(f"{self.wanted.source}: one example changes another; if it takes (n, batch), wrap it")

    def _first_that_works(self, widths: Sequence[int | None]) -> tuple[int | None, torch.dtype]:
        """A width and a dtype in which it can be called; the output then has that dtype."""
        refused: Exception = ValueError("nothing to call it with")
        for self.width in widths:
            for self.dtype in (torch.float64, torch.float32):
                self.module.to(self.dtype)
                try:
                    out, self.per_token = self._output(self.run(self.draw(8)), 1, 8)
                except (UsageError, Unsupported):
                    raise
                except Exception as error:  # somebody else's code
                    refused = error if isinstance(refused, ValueError) else refused
                else:
                    if out.dtype == self.dtype or self.dtype == torch.float32:
                        return self.width, self.dtype
        given = f"x (1, 8, {widths[0]})" if self.wanted.call == "x" else "tokens (1, 8)"
        remedy = "; give --width, or --call tokens" if self.wanted.call == "x" else ""
        raise UsageError(f"{self.wanted.source}: called with {given} it raises {said(refused)}{remedy}") from refused

    def _longest(self) -> int:
        """The longest sequence that it takes, up to 1024: a table of positions may end."""
        n = 8
        while n < 1024:
            try:
                with torch.no_grad():
                    self(self.draw(2 * n))
            except Exception:  # whatever its table says
                return n
            n *= 2
        return n

    def draw(self, n: int, *, batch: int = 1, seed: int = 0) -> Tensor:
        """Tokens ``(B, n)`` or x ``(B, n, C)`` from N(0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        if self.wanted.call == "tokens":
            return torch.randint(self.vocab or 1, (batch, n), generator=generator)
        return torch.randn(batch, n, self.width or 1, generator=generator, dtype=torch.float64).to(self.dtype)

    def run(self, given: Tensor, *, seed: int = 0) -> object:
        """What the module makes of tokens or x; what it draws follows from ``seed``."""
        torch.default_generator.manual_seed(seed)
        return self.module(given)

    def __call__(self, given: Tensor, *, seed: int = 0) -> Tensor:
        """``(B, n, E)``, or ``(B, 1, E)`` where the output is about the whole sequence."""
        return self._output(self.run(given, seed=seed), *given.shape[:2])[0]

    def from_vectors(self, given: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output, and the vectors ``(B, n, C)`` that it was made from, which gradients reach.

        Those are x itself, or what its embeddings make of the tokens.
        """
        if self.wanted.call == "x":
            leaf = given.detach().requires_grad_()
            return self(leaf), [leaf]
        with _caught(self.module, given) as leaves:
            out = self(given)
        return out, leaves

    def _output(self, out: object, B: int, n: int) -> tuple[Tensor, bool]:
        made = [x for x in tensors(out) if x.is_floating_point()]
        for x in made:
            if x.ndim >= 3 and x.shape[:2] == (B, n):
                return x.flatten(2), True
        for x in made:
            if x.ndim == 2 and x.shape == (B, n) and n > 1:
                return x[..., None], True
        for x in made:
            if x.ndim == 2 and x.shape[0] == B:
                return x[:, None], False
        shapes = ", ".join(str(tuple(x.shape)) for x in made) or "no tensor"
        raise Unsupported(
            f"{self.wanted.source}: of {B} × {n} {self.wanted.call} it makes {shapes}; "
            "expected (batch, tokens, width), or (batch, width) for the whole sequence"
        )


def _vocabulary(module: nn.Module) -> int | None:
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return min(rows, default=None)


@contextmanager
def _caught(module: nn.Module, tokens: Tensor) -> Iterator[list[Tensor]]:
    """Inside, what embeddings make of ``tokens`` has no history, is collected, and wants gradients."""
    leaves: list[Tensor] = []

    def hook(_: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        if not given or not isinstance(given[0], Tensor) or given[0].numel() != tokens.numel():
            return out
        if not torch.equal(given[0].flatten(), tokens.flatten()):
            return out  # of positions
        leaf = out.detach().requires_grad_()
        leaves.append(leaf)
        return leaf

    handles = [part.register_forward_hook(hook) for part in module.modules() if isinstance(part, nn.Embedding)]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()
