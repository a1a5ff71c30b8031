"""A plug-in: the matrix products and exponentials of a variant, and nothing else.

`attnbench compare local 'bare:of=local' --plugin tests/benchmarks/bare.py` says how much of a variant's time is left
beside them, and `attnbench run`'s floor how far torch's own kernels stay below the full rates of the machine with
matrices of these sizes. A tighter limit than the floor for whoever writes with the same products.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from attnbench import register
from attnbench.catalogue.engines import products
from attnbench.catalogue.engines.products import is_onednn
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits
from attnbench.errors import Unsupported

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_EXPONENTIALS = {"exp", "exp2", "softmax", "elu_backward"}
# Repeated in place, an exponential ends at infinity, which takes the library three times as long as a number.
_OUT_OF_PLACE = {
    torch.ops.aten.exp_.default: torch.ops.aten.exp.out,
    torch.ops.aten.exp2_.default: torch.ops.aten.exp2.out,
}


def _with_its_library(call: Callable[[], object]) -> Callable[[], object]:
    """The call by the library that multiplies now: the process's own choice, or the default for this product alone."""
    library = nullcontext() if is_onednn() else products._DefaultLibrary()

    def run() -> None:
        with library:
            call()

    return run


class _Recorder(TorchDispatchMode):
    """Products and exponentials, to be done again on memory that is always the same, and so always in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self._memory: dict[tuple[torch.dtype, bool], Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if "scaled_dot_product" in func._schema.name:
            raise Unsupported("its products are inside a fused kernel")
        if func._schema.name.removeprefix("aten::").strip("_") in _PRODUCTS | _EXPONENTIALS:
            names = [a.name for a in func._schema.arguments]
            written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
            if named.get("out") is not None and args[0].data_ptr() == named["out"].data_ptr():
                written.add(names[0])  # in place
            own = [self._own(arg, name in written) for name, arg in zip(names, args, strict=False)]
            also = {name: self._own(arg, name in written) for name, arg in named.items()}
            call = _OUT_OF_PLACE.get(func, func)
            if call is not func:
                own, also = [self._own(args[0], False)], {"out": self._own(args[0], True)}
            self.calls.append(_with_its_library(lambda: call(*own, **also)))
            return func(*args, **named)
        with self:  # an operation that consists of others, as inference mode hands them on
            parts = func.decompose(*args, **named)
        return func(*args, **named) if parts is NotImplemented else parts

    def _own(self, given: Any, written: bool) -> Any:
        """The same shape and strides in this object's memory: zeros, or what is written to."""
        return tree_map_only(Tensor, lambda x: self._view(x, written), given)

    def _view(self, x: Tensor, written: bool) -> Tensor:
        size = 1 + sum((length - 1) * step for length, step in zip(x.shape, x.stride(), strict=True))
        memory = self._memory.get((x.dtype, written))
        if memory is None or memory.numel() < size:
            # Calls recorded before keep the smaller one.
            memory = self._memory[x.dtype, written] = torch.zeros(size, dtype=x.dtype)
        return memory.as_strided(x.shape, x.stride())


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, there: Any, back: Any, streams: bool) -> Tensor:
        ctx.back, ctx.grad, ctx.inputs = back, out, (q, k, v) if streams else ()
        for x in ctx.inputs:
            x.sum()
        for call in there:
            call()
        return torch.zeros_like(out) if streams else out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for x in (*ctx.inputs, grad) if ctx.inputs else ():
            x.sum()
        for call in ctx.back:
            call()
        grads = [torch.zeros_like(x) for x in ctx.inputs] or [ctx.grad] * 3
        return *grads, None, None, None, None


@register(
    "bare",
    family="reference",
    source="this project",
    formula="0",
    cost="products and exponentials of another variant",
    traits=Traits(
        target="other",
        causal=True,
        key_padding=No("it takes no mask"),
        cross=No("it does what self-attention does"),
        v_dim=No("it does what values as wide as keys take"),
        rows_sum_to_one=False,
        permutable=None,
    ),
)
class Bare(nn.Module):
    """The products and exponentials of the variant ``of``, in its order and shapes, on memory that is in the cache.

    With ``streams`` they come after the inputs have been read once, and before the results, which are 0, are written:
    what calls of a library that do one thing each can hardly avoid. Self-attention forward, or forward and backward.

    Raises:
        Unsupported: the variant does not allow the shape, or calls a fused kernel, whose products cannot be told apart.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        of: Annotated[str, Field(description="local[window=64]")] = "local",
        streams: Annotated[bool, Field(description="read inputs and write results once")] = False,
    ) -> None:
        super().__init__()
        self.streams = streams
        spec = parse_spec(of.replace("[", ":", 1).rstrip("]"))
        entry = VARIANTS.get(spec.name)
        if reason := entry.unsupported_reason(shape):
            raise Unsupported(f"{entry.name}: {reason}")
        self.inner = entry.make(shape, **entry.check(dict(spec.options)))
        self.recorded: dict[object, tuple[Tensor, list[Callable[[], object]], list[Callable[[], object]]]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        with_gradients = torch.is_grad_enabled() and q.requires_grad
        # What is written to in inference mode can be written to in no other.
        form = with_gradients, torch.is_inference_mode_enabled(), q.dtype, q.shape
        if form not in self.recorded:
            self.recorded[form] = self._record(q, k, v, with_gradients)
        out, there, back = self.recorded[form]
        return _Replay.apply(q, k, v, out, there, back, self.streams)  # type: ignore[no-any-return, no-untyped-call]

    def _record(self, q: Tensor, k: Tensor, v: Tensor, with_gradients: bool) -> Any:
        inputs = [x.detach().requires_grad_(with_gradients) for x in (q, k, v)]
        with _Recorder() as forward:
            out = self.inner(*inputs)
        with _Recorder() as backward:
            if with_gradients:
                out.backward(torch.ones_like(out))
        return torch.zeros_like(out), forward.calls, backward.calls
