"""Reproducibility to the bit: two ways to the same numbers, and the largest difference between their results.

A difference is a fact and no fault: products of other sizes add in another order. The laws hold variants to rounding;
this says if there is any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from attnbench.contract.capabilities import Decoding, steps
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported
from attnbench.laws.laws import Case, gradients_along, words, worst_place
from attnbench.measure.cuda_events import CudaEvents
from attnbench.measure.time import TimingRules, measure_time, summarise

BATCHES = (2, 3, 8, 64)
SHAPE = Shape(batch=1, heads=2, seq_len=256, head_dim=32)
"""The shape of the questions: four chunks of the usual size."""
HIDDEN = 40
"""Tokens that padding adds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question about one variant."""

    question: str
    setting: str
    """Data type, device and causality: ``float32 on cpu, causal``."""
    equal: bool | None = None
    """None if it could not be asked."""
    ulps: float = 0.0
    """Largest difference in units in the last place of the largest number of its row, the last axis: a number near 0
    is what others left over, and its own unit says nothing."""
    where: tuple[int, ...] = ()
    """Index of this difference."""
    case: str = ""
    """The call with this difference, if the question has several: ``the last of 64``."""
    share: float = 0.0
    """Share of the numbers that differ in this case."""
    why: str = ""
    """Why it could not be asked."""
    fast_s: float | None = None
    """Median time of the call as it is, on a GPU, where the question is about its deterministic form."""
    deterministic_s: float | None = None
    """The same with torch's deterministic algorithms."""


@dataclass(frozen=True, slots=True)
class BitsSubject:
    """A case on a device and in a dtype."""

    case: Case
    dtype: torch.dtype
    device: str = "cpu"
    shape: Shape = field(default=SHAPE)

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: str = "cpu") -> BitsSubject:
        """The case with the sizes of :data:`SHAPE`; a user's module that takes only some has the case's own."""
        shape = SHAPE
        if case.foreign:
            shape = replace(case.fitted().shape, batch=1, seq_len=max(case.fitted().length, 32))
        return cls(case, dtype, device, replace(shape, causal=case.causal))

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]} on {self.device}" + ", causal" * self.case.causal

    def module(self) -> nn.Module:
        return self.case.module(self.shape, dtype=self.dtype).to(self.device)

    def draw(self, batch: int = 1, seed: int = 0) -> list[Tensor]:
        """The inputs of ``batch`` examples, tokens along axis -2."""
        return [
            x.to(self.device) for x in self.case.draw(replace(self.shape, batch=batch), dtype=self.dtype, seed=seed)
        ]


Pair = tuple[str, Tensor, Tensor]
"""Words for a call, and two tensors of one shape that mean the same numbers."""
Asked = Callable[[BitsSubject], Iterator[Pair]]
QUESTIONS: dict[str, Asked] = {}
"""Question -> its pairs, in the order shown."""


def _question(name: str) -> Callable[[Asked], Asked]:
    return lambda asked: QUESTIONS.setdefault(name, asked)


def ask(question: str, subject: BitsSubject) -> Answer:
    """The answer to one of :data:`QUESTIONS`; what the call raises is the reason why it could not be asked."""
    found = Answer(question, str(subject))
    try:
        for pair in QUESTIONS[question](subject):
            found = _worse(found, pair)
        if question == DETERMINISTIC:
            fast, deterministic = _prices(subject)
            return replace(found, fast_s=fast, deterministic_s=deterministic)
    except Unsupported as reason:
        return replace(found, equal=None, why=str(reason))
    except Exception as error:  # somebody else's code, or a kernel without a deterministic form
        return replace(found, equal=None, why=f"it raises {words(error)}")
    return found


def _worse(found: Answer, pair: Pair) -> Answer:
    case, *both = pair
    one, other = (x.detach().cpu().contiguous() for x in both)
    if one.shape != other.shape or one.dtype != other.dtype:
        raise Unsupported(f"{case}: {tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}")
    if not (one.isfinite().all() and other.isfinite().all()):
        raise Unsupported(f"{case}: NaN or infinity")
    apart = one.view(_INTEGERS[one.element_size()]) != other.view(_INTEGERS[one.element_size()])
    if not apart.any():
        return replace(found, equal=found.equal is not False)
    units = (one.double() - other.double()).abs() / _unit(one, other)
    where, most = tuple(worst_place(units, torch.zeros_like(units))), float(units.max())
    if found.equal is False and most <= found.ulps:
        return found
    share = float(apart.double().mean())
    return replace(found, equal=False, ulps=most, where=where, case=case, share=share)


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _unit(one: Tensor, other: Tensor) -> Tensor:
    """The unit in the last place of the largest number of each row."""
    largest = torch.maximum(one.abs(), other.abs()).double()
    if largest.dim():
        largest = largest.amax(-1, keepdim=True)
    _, exponent = torch.frexp(largest.clamp(min=torch.finfo(one.dtype).tiny))
    return torch.finfo(one.dtype).eps * 2.0 ** (exponent.double() - 1)


def _tokens(inputs: Sequence[Tensor], tokens: slice) -> list[Tensor]:
    return [x[..., tokens, :] for x in inputs]


@_question("the same call twice")
@torch.no_grad()
def _twice(subject: BitsSubject) -> Iterator[Pair]:
    module, inputs = subject.module(), subject.draw(2)
    yield "the output", module(*inputs), module(*inputs)


@torch.no_grad()
def _in_batches(subject: BitsSubject, *, last: bool) -> Iterator[Pair]:
    module, own, others = subject.module(), subject.draw(), subject.draw(BATCHES[-1] - 1, seed=1)
    alone = module(*own)
    for size in BATCHES:
        parts = ((x[: size - 1], y) if last else (y, x[: size - 1]) for x, y in zip(others, own, strict=True))
        together = module(*map(torch.cat, parts))
        place = size - 1 if last else 0
        yield f"the {'last' if last else 'first'} of {size}", together[place : place + 1], alone


QUESTIONS["first in a batch"] = partial(_in_batches, last=False)
QUESTIONS["last in a batch"] = partial(_in_batches, last=True)


@_question("its first half alone")
@torch.no_grad()
def _first_half(subject: BitsSubject) -> Iterator[Pair]:
    if not subject.case.causal:
        raise Unsupported("not causal: its first tokens see the others")
    module, inputs, half = subject.module(), subject.draw(), slice(0, subject.shape.N // 2)
    yield "the first half", module(*_tokens(inputs, half)), module(*inputs)[..., half, :]


@torch.no_grad()
def _decoded(subject: BitsSubject, *, prompted: bool) -> Iterator[Pair]:
    if not (subject.case.causal and subject.case.traits.decode):
        raise Unsupported(f"decode: {subject.case.traits.decode or 'it claims no steps'}")
    module, inputs, prompt = subject.module(), subject.draw(), subject.shape.N // 2 * prompted
    state = cast(Decoding, module).begin(*_tokens(inputs, slice(0, prompt)))
    outputs = torch.cat(list(steps(module, state, inputs, prompt)), -2)
    yield "the steps", outputs, module(*inputs)[..., prompt:, :]


QUESTIONS["half as a prompt, the rest token by token"] = partial(_decoded, prompted=True)
QUESTIONS["token by token"] = partial(_decoded, prompted=False)


@_question("padded")
@torch.no_grad()
def _padded(subject: BitsSubject) -> Iterator[Pair]:
    if not subject.case.traits.key_padding:
        raise Unsupported(f"key padding: {subject.case.traits.key_padding}")
    module, inputs = subject.module(), subject.draw()
    whole = torch.ones(1, subject.shape.N, dtype=torch.bool, device=subject.device)
    yield "with a mask that hides nothing", module(*inputs, key_mask=whole), module(*inputs)
    real = slice(0, subject.shape.N - min(HIDDEN, subject.shape.N // 2))
    some = whole.clone()
    some[:, real.stop :] = False
    found = module(*inputs, key_mask=some)[..., real, :]
    yield f"with {subject.shape.N - real.stop} padded tokens behind", found, module(*_tokens(inputs, real))


def _training(subject: BitsSubject) -> Callable[[], list[tuple[str, Tensor]]]:
    """A forward and backward pass: the output and the gradients of inputs and parameters, with their names."""
    module, leaves = subject.module(), [x.requires_grad_() for x in subject.draw(2)]
    wanted = subject.case.named(leaves) | dict(module.named_parameters())
    directions = torch.Generator().manual_seed(2)
    with torch.no_grad():
        shape = module(*(x.detach() for x in leaves)).shape
    direction = torch.randn(shape, generator=directions).to(leaves[0])

    def call() -> list[tuple[str, Tensor]]:
        with torch.enable_grad():
            out = module(*leaves)
            found = gradients_along(out, list(wanted.values()), direction)
        return [("the output", out), *((f"the gradient of {name}", x) for name, x in zip(wanted, found, strict=True))]

    return call


def _pairs(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> Iterator[Pair]:
    yield from ((name, x, y) for (name, x), (_, y) in zip(one, other, strict=True))


@_question("gradients twice")
def _gradients_twice(subject: BitsSubject) -> Iterator[Pair]:
    call = _training(subject)
    yield from _pairs(call(), call())


@_question("one thread or two")
def _threads(subject: BitsSubject) -> Iterator[Pair]:
    if subject.device != "cpu":
        raise Unsupported("threads are the CPU's")
    call, before, found = _training(subject), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(call())
    finally:
        torch.set_num_threads(before)
    yield from _pairs(*found)


DETERMINISTIC = "deterministic form"


@_question(DETERMINISTIC)
def _deterministically(subject: BitsSubject) -> Iterator[Pair]:
    if not subject.device.startswith("cuda"):
        raise Unsupported("asked on CUDA alone, where torch has such forms")
    call = _training(subject)
    fast = call()
    with _deterministic():
        slow = call()
    yield from _pairs(fast, slow)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Torch's deterministic algorithms; what has none raises. cuBLAS asks for a workspace of a fixed size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _prices(subject: BitsSubject) -> tuple[float, float]:
    """Median seconds of a forward and backward pass, as it is and in the deterministic form."""
    call, watch, rules = _training(subject), CudaEvents(subject.device), TimingRules.lasting(0.2, 3)

    def timed() -> float:
        return summarise([measure_time(call, rules, stopwatch=watch).samples]).median

    fast = timed()
    with _deterministic():
        return fast, timed()
