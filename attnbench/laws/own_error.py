"""The error of a variant against its own formula: rounding, a broken carry, a sum in too few digits.

The distance from softmax attention says nothing of these where a variant is another operator. The formula is computed
in float64, which no GPU rounds to TF32, on the same rounded inputs and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import NO_STATE
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.inputs import draw_gates, draw_qkv
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import without_core
from attnbench.errors import Unsupported
from attnbench.laws.exact_error import generated
from attnbench.laws.laws import Case, gradients_along, words
from attnbench.suite.cell import Cell

PAIRS, PAIRS_ON_GPU = 2**23, 2**26
"""Most pairs H·N·M of one example whose formula is computed, 64 MiB of float64 each time it writes a matrix: a second
or two with the gradients, and some times as much where the formula has a number for each pair and channel."""
SECONDS = 3.0
"""Most processor time for a formula, which may be a loop over pairs; its gradients take a few times as much again."""
_SHOWN = Shape(1, 2, 256, 32)
"""Shape of the table of ``attnbench check``: four chunks of the usual size."""
_NOTHING = 1e-9
"""A gradient of less than this share of the largest one is 0 but for rounding, and has no relative error."""


@dataclass(frozen=True, slots=True)
class OwnError:
    """Relative Frobenius errors of one example against the variant's own formula in float64; None with a reason."""

    output: float | None = None
    late: float | None = None
    """The same in the last half of the tokens alone, which a carry that gets lost spoils more."""
    grad: float | None = None
    """The error of the gradients for a random direction of the output, the largest over the inputs."""
    distance: float | None = None
    """The output against exact softmax attention; None unless it was asked for, and of a mixer."""
    note: str = ""
    """The reason why one of them is missing."""


def measure_own_error(cell: Cell, *, adapt: Callable[[nn.Module], nn.Module] | None = None) -> OwnError:
    """The own error of a cell's variant on the first example of its first draw, without padding.

    ``adapt`` turns the variant into the form to measure: compiled code, say. Raises UsageError for an unknown variant,
    input or option, and Unsupported for a mixer, or a shape that the variant or the input does not allow.
    """
    variant, shape = cell.entry, replace(cell.shape, batch=1)
    if variant.kind == "mixer":
        raise Unsupported(without_core())
    if cell.state_dtype != "auto":
        return _of_steps(cell)
    if cell.pass_ == "generate":
        return OwnError(note="own error: of a whole sequence, which pass forward has")
    most = PAIRS if cell.device == "cpu" else PAIRS_ON_GPU
    pairs = shape.H * shape.N * shape.M
    if pairs > most:
        asked = f"{shape.H} heads of {shape.N} × {shape.M} pairs"
        return OwnError(note=f"own error: {asked} are more than {most}; fewer heads or tokens have one")
    case = Case(variant, cell.variant, shape.causal)
    gates = draw_gates(cell.inputs, case.traits.reads, cell.shape, cell.seed)
    inputs = [x[:1] for x in (*draw_qkv(cell.inputs, cell.shape, cell.seed), *gates)]
    return _found(_FormulaQuestion(case, shape, getattr(torch, cell.dtype), cell.device, cell.seed, adapt), inputs)


def own_error(case: Case, dtype: torch.dtype) -> OwnError:
    """The own error and the distance of a case on a small shape, on this processor; see :data:`_SHOWN`.

    Raises Unsupported if its mathematics does not allow that.
    """
    shape = replace(_SHOWN, causal=case.causal)
    return _found(_FormulaQuestion(case, shape, dtype), case.draw(shape), distance=case.operator)


def _of_steps(cell: Cell) -> OwnError:
    """The error of what decoding adds with the cell's ``state_dtype``, against the whole sequence in float64."""
    case = Case(cell.entry, cell.variant, causal=True)
    reason = cell.entry.unsupported_reason(cell.shape, decode=True, spec=cell.variant)
    if reason or case.traits.meets != "state":
        raise Unsupported(reason or f"state_dtype: {NO_STATE}")
    shape = replace(cell.whole_shape, batch=1)
    prompt = {"stepwise": 0, "decode": shape.N - (cell.new_tokens or 1)}.get(cell.pass_, cell.shape.N)
    asked = _FormulaQuestion(case, shape, getattr(torch, cell.dtype), cell.device, cell.seed)
    gates = draw_gates(cell.inputs, case.traits.reads, cell.whole_shape, cell.seed)
    given = asked.given([x[:1] for x in (*draw_qkv(cell.inputs, cell.whole_shape, cell.seed), *gates)])
    there = "cpu" if cell.device == "mps" else cell.device
    with torch.inference_mode():
        found = generated(cell, asked.module(), given, prompt).to(there)
        exact = asked.module().to(there).double()(*(x.to(there).double() for x in given))[:, :, prompt:]
    return _compared(found, exact)


def _compared(output: Tensor, exact: Tensor) -> OwnError:
    if not output.isfinite().all():
        return OwnError(note="own error: the output holds NaN or infinity")
    if not exact.any():
        return OwnError(note="own error: the formula's output is 0")
    late = slice(exact.shape[-2] // 2, None)
    of_late = relative_error(output[..., late, :], exact[..., late, :]) if exact[..., late, :].any() else None
    return OwnError(relative_error(output, exact), of_late)


class _SlowFormula(Exception):  # an answer, not an error
    """The formula takes longer than a column is worth."""


class _Deadline(TorchFunctionMode):
    """Looks at the clock where Python calls torch, and not where C++ calls back: to raise there ends the process."""

    def __init__(self) -> None:
        super().__init__()
        self.end = process_time() + SECONDS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if process_time() > self.end and not isinstance(func, OpOverload):
            raise _SlowFormula
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _FormulaQuestion:
    case: Case
    shape: Shape
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    adapt: Callable[[nn.Module], nn.Module] | None = None

    def module(self) -> nn.Module:
        return build(self.case.spec, self.shape, seed=self.seed, level=self.case.level).to(self.device, self.dtype)

    def given(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as the variant gets them: gates in the dtype of its sums."""
        dtypes = [self.dtype] * 3 + [accumulator(self.dtype)] * len(inputs)
        return [x.to(self.device, dtype) for x, dtype in zip(inputs, dtypes, strict=False)]


def _found(asked: _FormulaQuestion, inputs: Sequence[Tensor], *, distance: bool = False) -> OwnError:
    there = "cpu" if asked.device == "mps" else asked.device  # MPS has no float64
    given = asked.given(inputs)
    wide = [x.to(there).double().requires_grad_() for x in given]
    module, exactly = asked.module(), asked.module().to(there).double()
    if asked.adapt is not None:
        module = asked.adapt(module)
    with torch.inference_mode():
        output = module(*given).to(there)
    generator = torch.Generator().manual_seed(asked.seed)
    direction = torch.randn(output.shape, generator=generator).to(asked.dtype)
    try:
        with torch.enable_grad(), _Deadline():
            exact = asked.case.expected(exactly, wide, asked.shape)
            if exact is None:
                return OwnError(note="own error: it states no formula of its own")
        with torch.enable_grad():
            wanted = gradients_along(exact, wide, direction.to(there, torch.float64))
    except _SlowFormula:
        return OwnError(note=f"own error: its formula takes more than {SECONDS:g} s; fewer tokens have one")
    except Exception as error:  # more memory than there is, say
        return OwnError(note=f"own error: its formula raises {words(error)}")
    found = _compared(output, exact)
    if found.output is None:
        return found
    if distance:
        with torch.no_grad():
            far = relative_error(output, exact_attention(*wide[:3], causal=asked.case.causal))
        found = replace(found, distance=far)
    try:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in given]
            grads = gradients_along(module(*leaves), leaves, direction.to(asked.device))
    except Exception as error:  # a kernel without a backward pass, say
        return replace(found, note=f"own error: no gradients: {words(error)}")
    if not all(x.isfinite().all() for x in grads):
        return replace(found, note="own error: the gradients hold NaN or infinity")
    return replace(found, grad=_worst([x.to(there) for x in grads], wanted))


def _worst(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float | None:
    least = _NOTHING * max(float(x.norm()) for x in wanted)
    each = [relative_error(a, b) for a, b in zip(found, wanted, strict=True) if float(b.norm()) > least]
    return max(each, default=None)
