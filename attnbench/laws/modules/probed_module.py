"""The module under question: made from a file, called with tokens or vectors, its output found."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attnbench.contract.compiled import as_written
from attnbench.contract.plugins.discovery import load
from attnbench.contract.plugins.module_source import ModuleSource, tensors, widths
from attnbench.errors import Unsupported, UsageError, said
from attnbench.laws.laws import Rounding

Call = Literal["tokens", "x"]


@dataclass(frozen=True, slots=True)
class Probe:
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
def subject_of(wanted: Probe) -> ProbedModule:
    """The module, called as the user said or else in the first way that works; raises as :class:`ProbedModule`."""
    if wanted.call is not None:
        return ProbedModule(wanted)
    try:
        return ProbedModule(replace(wanted, call="x"))
    except UsageError as refused:
        try:
            return ProbedModule(replace(wanted, call="tokens"))
        except UsageError as other:
            if str(other) == str(refused):
                raise
            again = str(other).removeprefix(f"{wanted.source}: ")
            raise UsageError(f"{refused}. As tokens: {again}") from None


_LIKELY = (8, 48, 50, 60, 65, 100, 120, 180, 196, 197, 240, 257, 360, 400, 480, 720, 784, 840, 960, 1260, 1680, 1920)
"""Lengths that are multiples of many numbers, or that pictures have."""
_UNITS = (16, 32, 64, 128, 256, 512)
_WAYS = (
    *((torch.float64, False), (torch.float32, False), (torch.float32, True)),
    *((torch.bfloat16, False), (torch.float16, False)),
)
"""Types of x, and if the weights then keep those that the constructor gives them; the last ones for one length only."""
_SECONDS = 5.0
"""CPU time for lengths that nothing hints at."""
_TYPE = re.compile("scalar type|dtype|indices|Long")
"""Words of torch about an input of the wrong type."""


class ProbedModule:
    """A module in float64, in eval mode, that maps tokens ``(B, n)`` or x ``(B, n, C)`` to ``(B, n, E)``.

    If it takes another type only, it stays in that. An output ``(B, E)`` for the whole sequence counts as one of one
    token: :attr:`per_token` is then false. A module that takes ``(n, B)`` is called so.

    Raises:
        UsageError: there is no such file, class or option; an option is missing; or it cannot be called so.
        Unsupported: its output is nothing that can be looked at token by token.
    """

    def __init__(self, wanted: Probe) -> None:
        self.wanted, self.source = wanted, ModuleSource(wanted.source)
        if not Path(self.source.file).is_file():
            raise UsageError(f"{self.source.file}: no such file")
        load(self.source.file)
        self.dtype, self.turned, self.shortest = torch.float64, False, 8
        self.kept = self.stateful = self.training = False
        """True if a call changes what the next one gives: each call then has a new module."""
        self.module = self._made()
        self.vocab = wanted.vocab or _vocabulary(self.module.modules())
        self.padding: list[int] = []
        """Tokens that stand for none: they may be hidden, or left out where positions are counted."""
        wide = [wanted.width] if wanted.width else widths(self.module)
        if wanted.call == "tokens" and self.vocab is None:
            raise UsageError(
                f"{wanted.source}: it has no embedding to read tokens with; use --call x, or --call tokens --vocab 100"
            )
        if wanted.call == "x" and not wide:
            raise UsageError(f"{wanted.source}: nothing says how wide x is; give --width")
        self._call_somehow(wide if wanted.call == "x" else [None])
        steps = (n for n in range(1, self.shortest + 1) if self.shortest % n == 0)
        self.unit = next((n for n in steps if self._takes(self.shortest + n)), 0)
        """All lengths that it takes are multiples of it; 0: it takes one length only."""
        if self.unit and self.shortest > (fewer := -(-8 // self.unit) * self.unit) and self._takes(fewer):
            self.shortest = fewer
        self.longest = self._longest()
        if self.unit and not self._takes(self.longest - self.unit):  # only short sequences have any length
            self.unit = next((n for n in _UNITS if n < self.longest and self._takes(self.longest - n)), 0)

    def _made(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = self.source.make().train(self.training)
            self.noisy = _without_zeros(module)
            return module if self.kept else module.to(self.dtype)

    def fresh(self, *, training: bool | None = None) -> ProbedModule:
        """The same with a new module, which no call has changed; all of its parameters take gradients."""
        new = copy(self)
        new.training = self.training if training is None else training
        new.module = new._made()
        if any(map(is_lazy, new.module.parameters())):
            new.run(new.draw(new.shortest))
        for x in new.module.parameters():
            x.requires_grad_(x.is_floating_point())
        return new

    def length(self, n: int) -> int:
        """The longest sequence up to n tokens that it takes, or the shortest of all."""
        return max(self.shortest, min(n, self.longest) // max(1, self.unit) * self.unit)

    @property
    def least(self) -> float:
        """The least share of an output's largest number that is more than rounding."""
        return 1e-12 if self.dtype == torch.float64 else 1e-5

    def moved(self, one: Tensor, other: Tensor) -> Tensor:
        """The change of each token's output ``(B, n)``, as a share of the largest number of ``other``."""
        return (one - other).abs().amax(2).double() / other.abs().max().double().clamp(min=1e-300)

    def agree(self, *calls: Callable[[], Tensor]) -> bool:
        """True if two calls give the same, or numbers that are not finite; false if one raises."""
        try:
            first, second = (call() for call in calls)
            return not (self.moved(first, second) > self.least).any()
        except Unsupported:  # it is not finite, as each question then says
            return True
        except Exception:  # somebody else's code
            return False

    @torch.no_grad()
    def _repeats(self) -> tuple[bool, bool]:
        """The agreement of two calls on the same input, with the same seed and without."""
        given, other, self.stateful = self.draw(self.shortest), self.draw(self.shortest, seed=1), False
        steady = self.agree(lambda: self(given), lambda: (self(other), self(given))[1])
        self.stateful = not steady and self.agree(lambda: self.fresh()(given), lambda: self.fresh()(given))
        return steady or self.stateful, steady and self.agree(lambda: self(given), lambda: self(given, seed=None))

    @torch.no_grad()
    def _apart(self) -> bool:
        """True if examples of a batch leave each other alone; if not, the second axis may be its batch."""
        one, other = (self.draw(self.shortest, batch=2, seed=seed) for seed in (0, 1))
        mixed = torch.stack((one[0], other[1])), torch.stack((other[0], one[1]))
        try:
            before = self(one)
            moved = torch.stack([self.moved(self(given), before)[own] for own, given in enumerate(mixed)])
        except Exception:  # somebody else's code, which may take one example alone
            return True
        return not self.steady or not bool((moved > max(1e-9, self.least)).any())

    def _call_somehow(self, wide: Sequence[int | None]) -> None:
        problems: list[Exception] = []
        mixed: dict[bool, dict[str, Any]] = {}
        for n in self._lengths(problems):
            if len(mixed) == 2:
                break
            self.shortest = n
            for self.turned in (False, True):
                if self.turned in mixed:
                    continue
                if problem := self._works(wide):
                    problems.append(problem)
                    continue
                self.steady, self.repeats = self._repeats()
                self.apart = self._apart()
                if self.apart:
                    return
                mixed[self.turned] = vars(self).copy()
            if all(isinstance(one, Unsupported) for one in problems[-2:]) and not mixed:
                raise problems[-1]
        if mixed:
            vars(self).update(next(iter(mixed.values())))
            return
        given = f"x (1, 8, {wide[0]})" if self.wanted.call == "x" else "tokens (1, 8)"
        told = f"called with {given} it raises {said(problems[0])}; no other length that was tried works"
        other = "--width" if self.wanted.call == "x" else "--vocab"
        own = f"a class in {Path(self.source.file).name} whose forward({self.wanted.call}) calls it as it wants"
        raise UsageError(f"{self.wanted.source}: {told}; give {other}, or name {own}") from problems[0]

    def _lengths(self, problems: list[Exception]) -> Iterator[int]:
        """Lengths to try, the likely ones first; ``problems`` are the refusals up to now, in both layouts."""
        parts = [*self.module.modules(), *(vars(one).get("config") for one in self.module.modules())]
        sizes = {x for part in parts for x in getattr(part, "__dict__", {}).values() if type(x) is int}
        sizes |= {2 * x for x in sizes} | {2**power for power in range(4, 12)}
        for n in sorted({*_LIKELY, *(x for x in sizes if 8 < x <= 2048)}):
            yield n
            if len(problems) > 2 and all(_TYPE.search(said(one)) for one in problems):
                return  # it is not the length that it refuses
        words = [said(one) for one in problems]
        yield from sorted(
            {int(x) for one in words for x in re.findall(r"\d+", one) if len(x) < 5 and 8 < int(x) <= 2048}
        )
        began = process_time()
        for n in range(9, 2049):
            if len(set(words[::2])) < 2 or process_time() - began > _SECONDS:  # the same for all: not the length
                return
            yield n

    def _works(self, wide: Sequence[int | None]) -> Exception | None:
        """Call a new module with ``shortest`` tokens, and set what is found by that; the reason if nothing works."""
        refused: Exception | None = None
        ways = _WAYS if self.shortest == 8 else _WAYS[:2]
        for self.width in wide:
            for self.dtype, self.kept in ways:
                self.module = self._made()  # the remains of a call that failed must not decide
                given = self.draw(self.shortest, batch=1 + self.turned)  # one token is a length that many take
                try:
                    with Rounding() as rounding, _caught(self.module, given) as read:
                        out, self.per_token = self._output(self.run(given), *given.shape[:2])
                    self.run(given[:1])  # two examples may have as many numbers as one of another length
                except UsageError:
                    raise
                except Exception as error:  # somebody else's code
                    refused = refused or error
                    continue
                if self.dtype != torch.float64 or (out.dtype == self.dtype and not rounding.seen):
                    if tables := [part for part, _ in read]:
                        self.vocab = self.wanted.vocab or _vocabulary(tables)
                        self.padding = sorted({x for part in tables if isinstance(x := part.padding_idx, int)})
                    return None
        return refused or ValueError("its output has another type than its input")

    def _takes(self, n: int) -> bool:
        try:
            with torch.no_grad():
                self.fresh().output(self.draw(n))
        except Exception:  # whatever its table says
            return False
        return True

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
        for _ in self.padding:
            tokens = sum((tokens == hidden for hidden in self.padding), tokens) % (self.vocab or 1)
        return tokens

    def run(self, given: Tensor, *, seed: int | None = 0) -> object:
        """The module's output for tokens or x; its draws follow from ``seed``, or from those before it if None."""
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        with as_written():
            return self.module(given.transpose(0, 1) if self.turned else given)

    def output(self, given: Tensor) -> Tensor:
        """``(B, n, E)``, or ``(B, 1, E)`` for an output of the whole sequence, as the module left it."""
        return self._output(self.run(given), *given.shape[:2])[0]

    def __call__(self, given: Tensor, *, seed: int | None = 0) -> Tensor:
        """The :meth:`output` as numbers of its own, in place of a table that the next call overwrites; ``given`` stays
        as it is. Raises Unsupported if any number is NaN or infinite."""
        one = self.fresh() if self.stateful else self
        return finite(self._output(one.run(given.clone(), seed=seed), *given.shape[:2])[0].clone())

    def from_vectors(self, given: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The output, and its input vectors ``(B, n, C)``, which gradients reach: x itself, or embeddings of the
        tokens."""
        if self.wanted.call == "x":
            leaf = given.detach().requires_grad_()
            return finite(self.output(leaf.clone())), [leaf]
        with _caught(self.module, given) as read:
            out = finite(self.output(given))
        return out, [leaf for _, leaf in read]

    def _output(self, out: object, B: int, n: int) -> tuple[Tensor, bool]:
        made = [x for x in tensors(out) if x.is_floating_point()]
        if self.turned:
            made = [x.transpose(0, 1) if x.ndim >= 2 and x.shape[:2] == (n, B) else x for x in made]
        made.sort(key=lambda x: x.shape != (B, n, self.width))  # beside weights (B, n, n), say
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


def finite(out: Tensor) -> Tensor:
    """The numbers; raises Unsupported if any is NaN or infinite."""
    if wrong := int((~out.isfinite()).sum()):
        raise Unsupported(f"{wrong:,} of the {out.numel():,} numbers of its output are NaN or infinite")
    return out


@torch.no_grad()
def _without_zeros(module: nn.Module) -> list[str]:
    """Put small noise in place of parameters that are all zero, which hide what they multiply; return their names. A
    bias adds, and hides nothing."""
    own = [(name, x) for name, x in module.named_parameters() if x.requires_grad and not is_lazy(x) and x.numel()]
    zero = [(name, x) for name, x in own if not x.any() and "bias" not in name.rpartition(".")[2]]
    for _, x in zero:
        noise = torch.randn_like(x)
        x.add_((noise + noise.sgn()) / (10 * math.sqrt(math.prod(x.shape[1:]))))  # no single gain is near zero
    return [name for name, _ in zero]


def _vocabulary(parts: Iterable[nn.Module]) -> int | None:
    tables = (part for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return min((table.num_embeddings for table in tables if table.num_embeddings > 1), default=None)


@contextmanager
def _caught(module: nn.Module, tokens: Tensor) -> Iterator[list[tuple[nn.Embedding, Tensor]]]:
    """The tables of embeddings that read the tokens, each with what it makes of them, which gradients reach."""
    read: list[tuple[nn.Embedding, Tensor]] = []

    def hook(part: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        if not given or not isinstance(given[0], Tensor) or given[0].numel() != tokens.numel():
            return out
        if not torch.equal(given[0].flatten(), tokens.flatten()):
            return out  # of positions
        leaf = out.detach().requires_grad_()
        read.append((cast(nn.Embedding, part), leaf))
        return leaf.clone()  # which it may change in place

    handles = [part.register_forward_hook(hook) for part in module.modules() if isinstance(part, nn.Embedding)]
    try:
        yield read
    finally:
        for handle in handles:
            handle.remove()
