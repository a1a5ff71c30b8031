"""Matmul FLOPs, exponentials and attention kernels of one call, seen at the dispatcher or predicted without running."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from attnbench.compiled import books, without_compiler

without_compiler(_FlopCounterMode)


def _cpu_flash(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _cpu_flash_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


def _product(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * int(math.prod(a) * b[-1])


def _sum_and_product(_: Any, a: Any, b: Any, *__: Any, out_shape: Any = None, **___: Any) -> int:
    return _product(a, b)


_MISSING_IN_TORCH = {
    # torch's own formulas mistake a dtype given for the result (out_dtype, on a GPU) for a second shape of it.
    torch.ops.aten.bmm: _product,
    torch.ops.aten.addmm: _sum_and_product,
    torch.ops.aten.baddbmm: _sum_and_product,
    # torch knows neither of the products that are added to a tensor in place.
    torch.ops.aten.addmm_: _sum_and_product,
    torch.ops.aten.baddbmm_: _sum_and_product,
    # torch counts 0 for its own CPU kernel (pytorch issue 195460).
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_flash_backward,
}
STEPS = 1500
"""Calls of torch that a prediction follows for each layer, unless it is told another number. They are counted and not
timed, so that a busy machine foresees what a quiet one does."""
_FUSED = re.compile(r"_scaled_dot_product_(?:fused_)?(\w+?)(?:_attention)?(_for_cpu)?(?:_backward)?$")
_EXPONENTIALS = {
    *("exp", "exp2", "expm1", "logsumexp", "logaddexp", "softmax", "safe_softmax", "log_softmax"),
    *("sigmoid", "tanh", "softplus", "log_sigmoid_forward", "elu", "elu_backward", "celu", "selu", "gelu"),
    *("silu", "silu_backward"),
}
"""Operations that take one exponential, or what costs as much, for each number of their first argument."""
_ONLY_IN_MATH = "_safe_softmax"
"""An operation that only the math back end of PyTorch's attention calls; the others of that back end are ordinary."""


class _NoModules(nullcontext[None]):
    """Stands in for torch's tracker of modules, whose hooks refuse a gradient with respect to a module's input."""

    parents = frozenset({"Global"})


def _counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False, custom_mapping=_MISSING_IN_TORCH)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # the two methods and the attribute that are used
    return counter


@dataclass(frozen=True, slots=True)
class Counted:
    """What one call did."""

    output: Any
    matmul_flops: int
    """Multiplications and additions inside matrix products; FFT, exp and softmax are not counted."""
    exponentials: int
    """Numbers of which an exponential was taken, one for each pair inside a fused kernel."""
    kernel: str | None
    """What PyTorch's attention ran on, forward or backward: ``flash_cpu``, ``efficient``, ``cudnn`` or ``math`` (which
    cannot be told in a backward pass alone); ``flex`` if compiled. None where it was not called."""


@without_compiler
class _Kernels(TorchDispatchMode):
    """Counts what the counter of FLOPs does not: names of kernels, exponentials, and products that causality spares."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.exponentials = 0
        self.spared_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        match = _FUSED.match(name)
        if match:
            self.names.add(match[1] + ("_cpu" if match[2] else ""))
            self._look_inside(func, args, kwargs or {})
        elif name == _ONLY_IN_MATH:
            self.names.add("math")
        if name.strip("_") in _EXPONENTIALS:
            self.exponentials += args[0].numel()
        return func(*args, **(kwargs or {}))

    def _look_inside(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Count an exponential for each pair of a fused kernel, and the FLOPs of pairs that a causal one skips."""
        named = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **named}
        q, k, v = named["query"], named["key"], named["value"]
        (B, H, N, D), M = q.shape, k.shape[2]
        seen = _pairs_in_the_past(N, M) if named.get("is_causal") else N * M
        self.exponentials += B * H * seen
        products = 3 * D + 2 * v.shape[3] if "backward" in func._schema.name else D + v.shape[3]
        self.spared_flops += 2 * B * H * (N * M - seen) * products


def _pairs_in_the_past(N: int, M: int) -> int:
    """Pairs of a query and a key not after it, of N queries and M keys that begin at the same token."""
    square = min(N, M)
    return square * (square + 1) // 2 + (N - square) * M


def count(call: Callable[[], Any]) -> Counted:
    """Run ``call`` once and count. Slower than the bare call: never timed."""
    counter = _counter()
    with books() as booked, _Kernels() as kernels, counter:  # it takes composite operations apart, so it stands first
        output = call()
    return Counted(
        output,
        counter.get_total_flops() - kernels.spared_flops + sum(one.matmul_flops for one in booked),
        kernels.exponentials + sum(one.exponentials for one in booked),
        "+".join(sorted(kernels.names.union(one.kernel for one in booked))) or None,
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a call would do; None where it cannot be known without running, with the reason."""

    matmul_flops: int | None
    peak_bytes: int | None
    reason: str = ""
    too_long: bool = False
    """Whether the call has more steps than were to be followed."""
    steps: int = field(default=0, compare=False)
    """Calls of torch that were followed."""


class _TooLong(Exception):  # an answer, not an error
    """The call has too many steps: to follow them all takes longer than planning should."""


class _Patience(TorchFunctionMode):
    """Counts where Python calls torch, and gives up there.

    Not where C++ calls back: at the dispatcher, as einsum does, or for the device of a fake tensor, which arrives here
    as an operator. To raise there ends the process.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.steps, self.most = 0, most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.steps >= self.most and not isinstance(func, OpOverload):
            raise _TooLong
        self.steps += 1
        return func(*args, **(kwargs or {}))


@without_compiler
class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that were made under this mode, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._seen and id(storage) not in known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        self._seen.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)

        def gone() -> None:
            self._seen.discard(key)
            self.held -= size

        weakref.finalize(storage, gone)


def predict(make_call: Callable[[], Callable[[], object]], *, most: int | None = None) -> Prediction:
    """FLOPs and peak tensor bytes of a call without allocating or computing, from fake tensors.

    Args:
        make_call: builds the module and its inputs and returns the call; runs under fake tensors too.
        most: calls of torch to follow at most; None for :data:`STEPS`.

    Raises:
        AttnbenchError: what ``make_call`` raises for impossible shapes and options.
    """
    try:
        with FakeTensorMode():
            call = make_call()
            gc.collect()
            counter, live, patience = _counter(), _LiveBytes(), _Patience(STEPS if most is None else most)
            with books() as booked, live, _Kernels() as kernels, counter, patience:
                result = call()
            del result
            flops = counter.get_total_flops() - kernels.spared_flops + sum(one.matmul_flops for one in booked)
            return Prediction(flops, live.peak, steps=patience.steps)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Prediction(None, None, "unknown: depends on the data")
    except _TooLong:
        return Prediction(None, None, too_long=True)


def move_fake(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``module.to(device, dtype)`` for a module of fake tensors, whose parameters torch cannot fill in place."""
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False)):
            new = old.detach().to(device, dtype if old.is_floating_point() else None)
            setattr(part, name, nn.Parameter(new, requires_grad=old.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device, dtype if buffer.is_floating_point() else None))
    return module
