"""The module under question: made from a file, called with tokens or vectors, its output found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.contract.plugins.load import load
from attnbench.contract.plugins.module_source import ModuleSource, tensors, widths
from attnbench.errors import Unsupported, UsageError, said

Call = Literal["tokens", "x"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request of a user."""

    source: str
    """``FILE.py:Class``, with what its constructor takes as options: ``FILE.py:Class:dim=64,heads=4``."""
    call: Call | None = None
    """``tokens``: whole numbers ``(B, n)``; ``x``: vectors ``(B, n, C)``. None: x, or tokens if that fails."""
    vocab: int | None = None
    """Tokens are below it; None: the rows of the smallest embedding."""
    width: int | None = None
    """C; None: the input width of the first layer."""

    @property
    def name(self) -> str:
        """The class, or the function that makes the module."""
        return ModuleSource(self.source).name


@lru_cache(maxsize=1)
def subject_of(wanted: Wanted) -> Subject:
    """The module, called as the user said or else in the first way that works; raises as :class:`Subject`."""
    if wanted.call is not None:
        return Subject(wanted)
    try:
        return Subject(replace(wanted, call="x"))
    except UsageError as refused:
        try:
            return Subject(replace(wanted, call="tokens"))
        except UsageError:
            raise refused from None


class _Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes a rounding of float64 numbers in a call: the module computes in float32 within."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64 and args[0].numel() > 1:
            self.seen |= out.is_floating_point() and out.dtype != torch.float64
        return out


_UNITS = (16, 32, 64, 128, 256, 512)


class Subject:
    """A module in float64, in eval mode, that maps tokens ``(B, n)`` or x ``(B, n, C)`` to ``(B, n, E)``.

    If it takes float32 only, it stays in float32. An output ``(B, E)`` for the whole sequence counts as one of one
    token: :attr:`per_token` is then false. A module that takes ``(n, B)`` is called so.

    Raises:
        UsageError: there is no such file, class or option; an option is missing; or it cannot be called so.
        Unsupported: its output is nothing that can be looked at token by token.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted, self.source = wanted, ModuleSource(wanted.source)
        if not Path(self.source.file).is_file():
            raise UsageError(f"{self.source.file}: no such file")
        load(self.source.file)
        self.dtype, self.turned = torch.float64, False
        self.module = self._made()
        self.vocab = wanted.vocab or _vocabulary(self.module)
        rows = {getattr(one, "padding_idx", None) for one in self.module.modules()}
        self.padding = sorted(row for row in rows if isinstance(row, int))
        """Tokens that stand for none: they may be hidden, or left out where positions are counted."""
        wide = [wanted.width] if wanted.width else widths(self.module)
        if wanted.call == "tokens" and self.vocab is None:
            raise UsageError(f"{wanted.source}: it has no embedding to read tokens with; use --call x, or give --vocab")
        if wanted.call == "x" and not wide:
            raise UsageError(f"{wanted.source}: nothing says how wide x is; give --width")
        self._call_somehow(wide if wanted.call == "x" else [None])
        self.steady, self.repeats = self._repeats()
        self.apart = self._apart()
        if not self.apart:
            self.turned = True
            self.turned = self.apart = self._takes(self.shortest) and self._apart()
        self.unit = next((n for n in range(1, self.shortest + 1) if self._steps_by(n)), 0)
        """All lengths that it takes are multiples of it; 0: it takes one length only."""
        self.longest = self._longest()
        if self.unit and not self._takes(self.longest - self.unit):  # only short sequences have any length
            self.unit = next((n for n in _UNITS if n < self.longest and self._takes(self.longest - n)), 0)

    def _made(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.source.make().eval().to(self.dtype)

    def fresh(self) -> Subject:
        """The same with a new module, which no call has changed; all of its parameters take gradients."""
        new = copy(self)
        new.module = new._made()
        for x in new.module.parameters():
            x.requires_grad_(x.is_floating_point())
        return new

    def length(self, n: int) -> int:
        """The longest sequence up to n tokens that it takes, or the shortest of all."""
        return max(self.shortest, min(n, self.longest) // max(1, self.unit) * self.unit)

    @torch.no_grad()
    def _repeats(self) -> tuple[bool, bool]:
        """The agreement of two calls on the same input, with the same seed and without."""
        given = self.draw(self.shortest)
        first, second = self(given), self(given)
        after, _ = self._output(self._call(given), *given.shape[:2])  # as the call before has left torch's generator
        return torch.equal(first, second), torch.equal(first, second) and torch.equal(first, after)

    @torch.no_grad()
    def _apart(self) -> bool:
        """True if examples of a batch leave each other alone; if not, the second axis may be its batch."""
        before, other = (self.draw(self.shortest, batch=2, seed=seed) for seed in (0, 1))
        after = torch.stack((other[0], before[1]))
        try:
            moved = (self(after)[1] - self(before)[1]).abs().max()
        except Exception:  # somebody else's code, which may take one example alone
            return True
        return not self.steady or not moved > 1e-5

    def _call_somehow(self, wide: Sequence[int | None]) -> None:
        refused: Exception | None = None
        for length in (8, *_lengths(self.module)):
            self.shortest = length
            for self.width in wide:
                for self.dtype in (torch.float64, torch.float32):
                    self.module = self._made()  # the remains of a call that failed must not decide
                    try:
                        with _Rounding() as rounding:  # type: ignore[no-untyped-call]  # untyped in torch
                            out, self.per_token = self._output(self.run(self.draw(self.shortest)), 1, self.shortest)
                    except (UsageError, Unsupported):
                        raise
                    except Exception as error:  # somebody else's code
                        refused = refused or error
                    else:
                        if (out.dtype == self.dtype and not rounding.seen) or self.dtype == torch.float32:
                            return
        given = f"x (1, 8, {wide[0]})" if self.wanted.call == "x" else "tokens (1, 8)"
        remedy = "; give --width, or --call tokens" if self.wanted.call == "x" else ""
        told = (
            f"called with {given} it raises {said(refused or ValueError())}; no other length up to 2,048 works{remedy}"
        )
        raise UsageError(f"{self.wanted.source}: {told}") from refused

    def _takes(self, n: int) -> bool:
        try:
            with torch.no_grad():
                self.fresh()(self.draw(n))
        except Exception:  # whatever its table says
            return False
        return True

    def _steps_by(self, n: int) -> bool:
        return self.shortest % n == 0 and self._takes(self.shortest + n)

    def _longest(self) -> int:
        """The longest sequence that it takes, up to 1024 tokens or a call of two seconds: a table of positions ends."""
        n = self.shortest
        while self.unit and n < 1024:
            began = process_time()
            if not self._takes(2 * n):
                return n
            n *= 2
            if process_time() - began > 2:
                break
        return n

    def draw(self, n: int, *, batch: int = 1, seed: int = 0) -> Tensor:
        """Tokens ``(B, n)`` or x ``(B, n, C)`` from N(0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        if self.wanted.call == "tokens":
            return self.real(torch.randint(self.vocab or 1, (batch, n), generator=generator))
        return torch.randn(batch, n, self.width or 1, generator=generator, dtype=torch.float64).to(self.dtype)

    def real(self, tokens: Tensor) -> Tensor:
        """The tokens with the next one in place of each that stands for none."""
        return sum((tokens == hidden for hidden in self.padding), tokens) % (self.vocab or 1)

    def run(self, given: Tensor, *, seed: int = 0) -> object:
        """The module's output for tokens or x; its draws follow from ``seed``."""
        torch.default_generator.manual_seed(seed)
        return self._call(given)

    def _call(self, given: Tensor) -> object:
        return self.module(given.transpose(0, 1) if self.turned else given)

    def __call__(self, given: Tensor, *, seed: int = 0) -> Tensor:
        """``(B, n, E)``, or ``(B, 1, E)`` for an output of the whole sequence."""
        return self._output(self.run(given, seed=seed), *given.shape[:2])[0]

    def from_vectors(self, given: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output, and its input vectors ``(B, n, C)``, which gradients reach: x itself, or embeddings of the
        tokens."""
        if self.wanted.call == "x":
            leaf = given.detach().requires_grad_()
            return self(leaf), [leaf]
        with _caught(self.module, given) as leaves:
            out = self(given)
        return out, leaves

    def _output(self, out: object, B: int, n: int) -> tuple[Tensor, bool]:
        made = [x for x in tensors(out) if x.is_floating_point()]
        if self.turned:
            made = [x.transpose(0, 1) if x.ndim >= 2 and x.shape[:2] == (n, B) else x for x in made]
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


def _lengths(module: nn.Module) -> list[int]:
    parts = [*module.modules(), *(vars(one).get("config") for one in module.modules())]
    sizes = {x for part in parts if part is not None for x in getattr(part, "__dict__", {}).values() if type(x) is int}
    sizes |= {2 * x for x in sizes} | {2**power for power in range(4, 12)}
    return sorted(x for x in sizes if 8 < x <= 2048)


def _vocabulary(module: nn.Module) -> int | None:
    rows = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return min(rows, default=None)


@contextmanager
def _caught(module: nn.Module, tokens: Tensor) -> Iterator[list[Tensor]]:
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
