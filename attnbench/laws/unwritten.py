"""The law about memory that nothing has been written to: its former content reaches no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.contract.capabilities import Decoding, Roomy, steps
from attnbench.contract.compiled import without_compiler
from attnbench.laws.laws import Case, Measured, gradients_along, law

_UNWRITTEN = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
}
"""The operators of torch that give memory as they find it."""


@without_compiler
class Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types no part of it
    """In this context memory that torch hands out unwritten holds zeros, or if ``poisoned`` NaN or the largest number.

    It acts below autograd, so it also reaches memory that the code of a gradient asks for. Memory that an operator gets
    as ``out=`` was asked for before: it holds NaN wherever the operator leaves it unwritten.
    """

    def __init__(self, *, poisoned: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._fill = _poison if poisoned else Tensor.zero_

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = args[0].numel() if func.overloadpacket is torch.ops.aten.resize_ else 0
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNWRITTEN and isinstance(out, Tensor):
            self._fill(out.flatten()[before:] if before else out)  # of a resized one, the part that is new
        return out


def _poison(x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    else:
        x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


@law("unwritten memory", of_any=True)
def unwritten_memory(case: Case) -> Iterator[Measured]:
    """NaN in memory that nothing was written to, a state's room included, changes no result."""
    # The room is the space of a state for tokens to come, as far as its parts are Roomy.
    for mask in case.key_masks():
        for what, call in _calls(case, mask).items():
            # Numbers left there by chance may be NaN as well, and then nothing would differ.
            with Unwritten(poisoned=False):
                expected = call()
            with Unwritten(poisoned=True):
                found = call()
            wrong = sum(_differing(one, other, case.close) for one, other in zip(found, expected, strict=True))
            padded = ", padded," * (mask is not None)
            yield Measured(wrong, 0, f"{what}{padded} reads memory that nothing was written to: {wrong} numbers differ")
    if case.causal and case.traits.decode:
        module, inputs, wrong = case.module(), case.draw(), 0
        for prompt in (0, case.shape.N // 2):
            with Unwritten(poisoned=False):
                expected = _decoded(module, inputs, prompt)
            found = _decoded(module, inputs, prompt, poisoned=True)
            wrong += sum(_differing(one, other, case.close) for one, other in zip(found, expected, strict=True))
        yield Measured(wrong, 0, f"decoding reads room of its state that it did not write to: {wrong} numbers differ")


def _calls(case: Case, mask: Tensor | None) -> dict[str, Callable[[], list[Tensor]]]:
    shape = case.shape
    untrained, trained = case.module(), case.module()  # a first call without gradients may leave tensors without any
    real = torch.ones(shape.B, shape.N, dtype=torch.bool) if mask is None else mask
    kept = case.real(real)

    def forward() -> list[Tensor]:
        with torch.inference_mode():
            return [torch.where(kept, untrained(*case.draw(), key_mask=mask), 0.0)]

    def training() -> list[Tensor]:
        inputs = case.draw(grad=True)
        wanted = [*inputs, *trained.parameters()]
        out = torch.where(kept, trained(*inputs, key_mask=mask), 0.0)
        grads = gradients_along(out, wanted, 2 * out.detach())
        return [out.detach(), *grads]

    calls = {"a call without gradients": forward, "a training step": training}
    if case.causal and case.traits.decode and mask is None:
        calls["decoding"] = lambda: _decoded(untrained, case.draw(), shape.N // 2)
    return calls


@torch.no_grad()
def _decoded(module: nn.Module, inputs: list[Tensor], prompt: int, *, poisoned: bool = False) -> list[Tensor]:
    """The outputs of the tokens after a prompt, with NaN in the room of the state before each if ``poisoned``."""
    state = cast(Decoding, module).begin(*(x[..., :prompt, :] for x in inputs))
    return list(steps(module, state, inputs, prompt, before=_poison_rooms if poisoned else None))


def _poison_rooms(state: object, *_: Tensor) -> None:
    if isinstance(state, Roomy):
        for room in state.unused():
            _poison(room)
    if isinstance(state, tuple | list):
        for part in state:
            _poison_rooms(part)


def _differing(found: Tensor, expected: Tensor, close: float) -> int:
    one, other = found.detach().double(), expected.detach().double()
    if not one.numel():
        return 0
    far = close * other.abs().nan_to_num().max().clamp(min=1.0)
    same = ((one - other).abs() <= far) | (one == other) | (one.isnan() & other.isnan())
    return int((~same).sum())
