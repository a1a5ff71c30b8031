"""A law, the case that it is held against, and a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.capabilities import Dense
from attnbench.contract.compiled import as_written, without_compiler
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.contract.reads import draw_reads
from attnbench.contract.spec import Scalar, Spec, parse_spec
from attnbench.contract.variant import Traits, Variant
from attnbench.errors import AttnbenchError, Unsupported, UsageError, said
from attnbench.measure.memory import out_of_memory

SHAPE = Shape(batch=2, heads=2, seq_len=23, head_dim=4)
"""Two examples, so that they can mix; a prime length, so that no block divides it."""

F64 = torch.float64
Given = TypeVar("Given")

_CLOSE = {"float64": 1e-9, "float32": 2e-5, "float16": 2e-2, "bfloat16": 1e-1}
"""Dtype, the most precise first -> how far apart two ways to the same numbers may be."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One number held against its bound: the law holds where ``number <= bound``."""

    number: float
    bound: float
    fault: str = ""
    """The fault in words, if it does not hold."""

    @property
    def holds(self) -> bool:
        return self.number <= self.bound  # NaN does not


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of a law in one case."""

    law: str
    case: str
    """Options and causality: ``window=3, causal``."""
    held: bool
    number: float | None = None
    bound: float | None = None
    fault: str = ""
    skipped: str = ""
    """Why the law could not be asked, or had nothing to hold the variant to; then nothing is held against it."""
    final: bool = False
    """True if nothing more can be tried: it cannot be built, or ran out of memory."""


@without_compiler
class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes the types to which a call rounds its numbers: it computes in them within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.is_floating_point() and args[0].numel() > 1:
            self.seen |= {out.dtype} if args[0].is_floating_point() and out.itemsize < args[0].itemsize else set()
        return out


class NothingClaimed(Exception):
    """Raised by a law that has nothing to hold a variant to, or cannot now; the message is the reason."""


class DoesNotWork(Exception):
    """Raised by a law where a call raises that it says works, or gives another shape; the message says what."""


@cache
def _is_converted(name: str) -> bool:
    try:
        torch.zeros(1, dtype=getattr(torch, name)).float()
    except RuntimeError:  # of float16, without /proc/cpuinfo
        return False
    return True


@dataclass(frozen=True)
class Case:
    """A variant with one setting of its options, causal or not."""

    variant: Variant
    spec: Spec
    causal: bool = False
    first: bool = True
    """True for the first of the variant's settings."""
    length: int = SHAPE.N
    """Tokens of its shape."""
    heads: int = SHAPE.H
    head_dim: int = SHAPE.D
    single: bool = False
    """Held in float32 at most: some compute in float32 whatever they are given."""

    def __str__(self) -> str:
        options, core = self.spec.label.partition(":")[2], "operator" * bool(self.traits.reads)
        return ", ".join(part for part in (core, options, "causal" * self.causal) if part) or "defaults"

    @cached_property
    def traits(self) -> Traits:
        """The variant's claims with these options."""
        return self.variant.claims(self.spec, causal=self.causal)

    @property
    def operator(self) -> bool:
        return self.variant.kind == "operator"

    @property
    def level(self) -> str:
        return "operator" if self.operator else ""

    @property
    def foreign(self) -> bool:
        """True for a module of a user's file as it is, which claims nothing."""
        return hasattr(self.variant.make, "source")

    @cached_property
    def shape(self) -> Shape:
        return replace(SHAPE, heads=self.heads, head_dim=self.head_dim, seq_len=self.length, causal=self.causal)

    @property
    def allowed(self) -> bool:
        """True if the variant claims such a case at all."""
        return bool(self.variant.traits.causal) or not self.causal

    @property
    def refused(self) -> bool:
        """True if the class refuses an option's value: a mistake of the user, which breaks no law."""
        try:
            self.module()
        except (Exception, SystemExit) as error:  # others are for the laws
            return isinstance(error, UsageError)
        return False

    def runs(self) -> bool:
        """True if it can be called on this processor; False also if it cannot be built."""
        try:
            self.module()(*self.draw())
        except (Exception, SystemExit):
            return False
        return True

    def fitted(self) -> Case:
        """Itself; a user's module that takes only some sizes has the first of these."""
        for heads, head_dim, length in (
            product((2, 4, 8), (4, 8, 16, 32, 64), (SHAPE.N, 64, 384)) if self.foreign else ()
        ):
            other = replace(self, heads=heads, head_dim=head_dim, length=length)
            with suppress(Unsupported):
                other.module()
                return other
        return self

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the variant claims and torch converts here; of a module that claims nothing, the float32 and
        float64 that it takes."""
        if not self.foreign:
            return tuple(filter(_is_converted, self.traits.dtypes))
        with as_written():
            return tuple(name for name in ("float32", "float64") if self._takes(getattr(torch, name)))

    @torch.no_grad()
    def _takes(self, dtype: torch.dtype) -> bool:
        try:
            return bool(self.module(dtype=dtype)(*self.draw(dtype=dtype)).dtype == dtype)
        except Unsupported:  # of the shape, which each law meets by itself
            return True
        except Exception:  # somebody else's code
            return False

    @torch.no_grad()
    def repeats(self) -> bool:
        """True if two calls on the same input agree, and leave torch's generator alone."""
        module, before = self.module(), torch.get_rng_state()
        with as_written():
            first, second = (module(*self.draw()) for _ in range(2))
        return torch.equal(first, second) and torch.equal(before, torch.get_rng_state())

    def works(self, call: Callable[..., Given], *given: Any, **options: Any) -> Given:
        """The result of a call that a law says works; raise DoesNotWork if it raises."""
        try:
            return call(*given, **options)
        except (Unsupported, NothingClaimed):
            raise
        except (Exception, SystemExit) as error:  # a variant under test may raise anything
            if self.foreign:
                raise
            raise DoesNotWork(_in_a_line(error)) from error

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the laws are held: the most precise that the variant takes."""
        every = [name for name in _CLOSE if name in self.dtypes and not (self.single and name == "float64")]
        dtype: torch.dtype = getattr(torch, every[0] if every else "float32")
        return dtype

    @property
    def common_dtype(self) -> torch.dtype:
        """The dtype for cost: float32 if the variant takes it."""
        return torch.float32 if "float32" in self.dtypes else self.dtype

    @property
    def close(self) -> float:
        """Largest gap between two ways to the same numbers; rounding adds up over more tokens."""
        least = max(_CLOSE[str(one).removeprefix("torch.")] for one in (self.dtype, *self.inside))
        return least * max(1.0, self.length / SHAPE.N)

    @cached_property
    def inside(self) -> set[torch.dtype]:
        """Types to which a user's module rounds within, whatever it is given."""
        rounding = Rounding()
        with rounding, as_written(), suppress(Exception), torch.no_grad():
            if self.foreign:
                self.module()(*self.draw())
        return rounding.seen

    @property
    def rounding(self) -> float:
        """Largest gap between two exact computations of the same numbers."""
        return 1e-12 if self.dtype == F64 else self.close / 10

    def module(
        self,
        shape: Shape | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        options: Mapping[str, Scalar] | None = None,
    ) -> nn.Module:
        """The variant with these options; raises Unsupported if its mathematics does not allow the shape."""
        module = build(self.spec, shape or self.shape, seed=seed, level=self.level, **(options or {}))
        return module.to(dtype or self.dtype)

    def draw(
        self, shape: Shape | None = None, *, dtype: torch.dtype | None = None, grad: bool = False, seed: int = 0
    ) -> list[Tensor]:
        """q, k, v of an operator or x of a mixer from N(0, 1), then its gates; tokens along axis -2."""
        shape = shape or self.shape
        sizes: list[tuple[int, ...]] = [(shape.B, shape.N, shape.C)]
        if self.operator:
            keys = (shape.B, min(shape.K, shape.Q), shape.M, shape.D)
            sizes = [(shape.B, shape.Q, shape.N, shape.D), keys, (shape.B, shape.K, shape.M, shape.E)]
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(size, dtype=F64, generator=generator) for size in sizes]
        dtype, gates = dtype or self.dtype, draw_reads(self.traits.reads, shape, seed)
        found = [x.to(dtype) for x in drawn] + [x.to(accumulator(dtype)) for x in gates]
        return [x.requires_grad_(grad) for x in found]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of what :meth:`draw` draws."""
        return ("q", "k", "v", *(read.name for read in self.traits.reads)) if self.operator else ("x",)

    def named(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Inputs as :meth:`draw` gives them, by name."""
        return dict(zip(self.names, inputs, strict=True))

    def times(self, inputs: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
        """The inputs with q, k and v, or x, so many times as large; gates keep to their ranges."""
        return [x * factor for x in inputs[:3]] + list(inputs[3:])

    def oracle(self, module: nn.Module) -> Callable[..., Tensor] | None:
        """The documented formula, dense: the module's own, softmax attention where it claims to be exact, or None."""
        if self.traits.exact:
            causal = self.causal
            return lambda q, k, v, key_mask=None: exact_attention(q, k, v, causal=causal, key_mask=key_mask)
        return module.dense if isinstance(module, Dense) else None

    def expected(
        self, module: nn.Module, inputs: Sequence[Tensor], shape: Shape, key_mask: Tensor | None = None
    ) -> Tensor | None:
        """The documented formula's result for inputs of any shape; None without a formula."""
        if not self.traits.exact:
            return module.dense(*inputs, key_mask=key_mask) if isinstance(module, Dense) else None
        sink = next((x for name, x in module.named_parameters() if name.endswith("sink.logit")), None)
        bias = position_bias(shape)
        how: dict[str, Any] = {"causal": Visible.of(shape), "bias": bias and bias.to(inputs[0].device), "sink": sink}
        return exact_attention(*inputs, key_mask=key_mask, **how)

    def key_masks(self, hidden: int = 8) -> list[Tensor | None]:
        """None, and if it takes padding, a mask that hides the last tokens of the first example."""
        N = self.shape.N
        return [None, *([torch.arange(N) < torch.tensor([[N - hidden], [N]])] if self.traits.key_padding else [])]

    def real(self, key_mask: Tensor) -> Tensor:
        """The mask, shaped as an output."""
        return key_mask.view(len(key_mask), *[1] * self.operator, -1, 1)


Holds = Callable[[Case], Iterable[Measured]]


@dataclass(frozen=True)
class Law:
    """Something that is true of every variant that claims it."""

    name: str
    sentence: str
    holds: Holds
    applies: Callable[[Case], bool] = field(default=lambda case: True)
    needs_time: bool = False
    """Measures time, which takes seconds and a quiet machine."""
    few_shapes: bool = False
    """Also for variants that are compiled for each shape, in seconds; they are spared laws that use many shapes."""
    claim: str = ""
    """The trait that this law proves, which is asked of it alone: whatever claims it must offer a case to see it in."""
    vital: bool = False
    """Nothing else can be tried if it is broken."""
    gates: bool = True
    """A run holds a setting to it before it measures it: it takes little time, and is true however few tokens there are
    for the options."""
    of_any: bool = False
    """Also asked of a module that claims nothing: true of whatever computes the same function of each example."""

    def claimed(self, traits: Traits) -> bool:
        """True if they claim the subject of this law."""
        return bool(self.claim and getattr(traits, self.claim))

    def concerns(self, case: Case) -> bool:
        """True if the case is held to it."""
        asked = self.of_any if case.foreign else self.few_shapes or not case.traits.compiled
        return asked and (not self.claim or self.claimed(case.traits)) and self.applies(case)

    def examine(self, case: Case) -> list[Finding]:
        """Every number that the law measures in this case; none if the mathematics does not allow the case.

        A law that is broken is asked once more, with new modules, and in float32 for a user's own, which may compute in
        it. It must be broken then as well. Anything else that is raised says nothing of the variant.
        """
        found = self._ask(case)
        if all(one.held for one in found) or any(one.final for one in found):
            return found
        second = self._ask(replace(case, single=case.single or case.foreign))
        if not all(one.held for one in second) and case.foreign and not case.repeats():
            return [Finding(self.name, str(case), True, skipped="two calls on the same input differ")]
        if case.foreign or not all(one.held for one in second):
            return second
        fault = next(one.fault for one in found if not one.held)
        return [Finding(self.name, str(case), True, skipped=f"broken once, and held when asked again: {fault}")]

    def _ask(self, case: Case) -> list[Finding]:
        found: list[Finding] = []
        try:
            with nullcontext() if case.traits.compiled and not case.foreign else as_written():
                for one in self.holds(case):
                    fault = "" if one.holds else one.fault or f"not so: {self.sentence}"
                    found.append(Finding(self.name, str(case), one.holds, one.number, one.bound, fault))
        except Unsupported:
            pass
        except NothingClaimed as reason:
            found.append(Finding(self.name, str(case), True, skipped=str(reason)))
        except (Exception, SystemExit) as error:
            final, told = out_of_memory(error) is not None, _in_a_line(error)
            if isinstance(error, DoesNotWork | SystemExit):  # who asks does not end Python
                found.append(Finding(self.name, str(case), False, fault=told, final=final or self.vital))
            else:
                found.append(Finding(self.name, str(case), True, skipped=f"asking it raises {told}", final=final))
        return found


LAWS: dict[str, Law] = {}


def law(name: str, **facts: Any) -> Callable[[Holds], Holds]:
    """Decorator: put a law with these facts of :class:`Law` into the table, in order; its docstring is the sentence."""

    def add(holds: Holds) -> Holds:
        LAWS[name] = Law(name, (holds.__doc__ or "").strip(), holds, **facts)
        return holds

    return add


def cases(variant: Variant) -> Iterator[Case]:
    """Each setting of the variant and of its core, not causal and, where it can be, causal."""
    for index, setting in enumerate(variant.settings or ("",)):
        spec = parse_spec(f"{variant.name}:{setting}".rstrip(":"))
        for causal in (False, True):
            case = Case(variant, spec, causal, first=index == 0)
            if case.allowed:
                yield case.fitted()
    if variant.core is not None:
        yield from cases(variant.core)


def _in_a_line(error: BaseException) -> str:
    if isinstance(error, DoesNotWork):
        return str(error)
    memory = out_of_memory(error)
    return f"out of memory: {memory}" if memory else said(error).partition("\n")[0].rstrip(": ")


def words(error: BaseException) -> str:
    """An error in one line: the message alone if the error is one of attnbench, the amount if memory was lacking."""
    told = str(error) if isinstance(error, AttnbenchError) else said(error)
    return (out_of_memory(error) or told).partition("\n")[0].rstrip(": ")


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference of two tensors, in units of the larger of 1 and the largest entry of b."""
    if a.shape != b.shape:
        raise DoesNotWork(f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
    a, b = a.detach(), b.detach()
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    far, size = float((a - b).abs().max()), float(b.abs().max())
    return far if size <= 1.0 else far / size  # NaN stays NaN


def gradients_along(out: Tensor, wanted: Sequence[Tensor], direction: Tensor) -> Sequence[Tensor]:
    """The gradients of out·direction for leaves, 0 without one, as a step of training takes them.

    ``torch.autograd.grad`` refuses frozen and recomputed leaves, and with a direction imports a compiler's needs: half
    a second in each new process.
    """
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in wanted]
    handle = out.register_hook(lambda _: direction)  # type: ignore[no-untyped-call]  # torch leaves it so
    before = [x.grad for x in wanted]
    try:
        for x in wanted:
            x.grad = None
        out.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]  # likewise
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
    finally:
        handle.remove()
        for x, grad in zip(wanted, before, strict=True):
            x.grad = grad


def apart(found: Tensor, expected: Tensor, bound: float, what: str) -> Measured:
    """The gap of two tensors against a bound; the fault is ``what`` and by how much: ``the output differs by 0.1``."""
    far = gap(found, expected)
    return Measured(far, bound, f"{what} by {far:.2g}")


def gradients_apart(
    named: Mapping[str, Tensor], out: Tensor, expected: Tensor, bound: float, what: str
) -> Iterator[Measured]:
    """The gaps of the gradients of two outputs, for one direction and inputs by name; faults begin with ``what``."""
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
    one, other = (gradients_along(y, list(named.values()), direction) for y in (out, expected))
    for name, a, b in zip(named, one, other, strict=True):
        yield apart(a, b, bound, f"{what} the gradient of {name} differs")


def worst_place(a: Tensor, b: Tensor) -> list[int]:
    """Index of the largest difference."""
    flat = int((a.double() - b.double()).abs().nan_to_num(torch.inf).argmax())
    return [int(i) for i in np.unravel_index(flat, a.shape)]  # torch's own imports the modules of a compiler
