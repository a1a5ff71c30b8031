"""Matmul FLOPs, exponentials and attention kernels of one call, seen at the dispatcher or predicted without running."""

from __future__ import annotations

import collections
import gc
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.profiler import profile
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from attnbench.catalogue.engines.forms import operations
from attnbench.contract.compiled import Booked, books, without_compiler
from attnbench.measure.memory import profiled

Formula = Callable[..., int]


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _sum_and_product(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return _product(a, b)


_PRODUCTS: dict[Any, Formula] = {
    # torch's own formulas mistake a dtype given for the result (out_dtype, on a GPU) for a second shape of it.
    torch.ops.aten.bmm: _product,
    torch.ops.aten.addmm: _sum_and_product,
    torch.ops.aten.baddbmm: _sum_and_product,
    # torch knows neither of the products that are added to a tensor in place.
    torch.ops.aten.addmm_: _sum_and_product,
    torch.ops.aten.baddbmm_: _sum_and_product,
}
"""Formulas of ours in place of torch's."""
STEPS = 1000
"""Calls of torch that a prediction follows for each layer by default; counted, not timed, so that a busy machine
foresees the same as a quiet one."""
SAME_STEPS = 20_000
"""The same with operations in place of a kernel without FLOPs of its own, some 10 seconds."""
_FUSED = re.compile(r"_scaled_dot_product_(?:fused_)?(\w+?)(?:_attention)?(_for_cpu)?(?:_backward)?$")
_EXPONENTIALS = {
    *("exp", "exp2", "expm1", "logsumexp", "logaddexp", "softmax", "safe_softmax", "log_softmax"),
    *("sigmoid", "tanh", "softplus", "log_sigmoid_forward", "elu", "elu_backward", "celu", "selu", "gelu"),
    *("silu", "silu_backward"),
}
"""Operations with one exponential, or its like in cost, for each number of their first argument."""
_OF_PLACES = re.compile(r"index|gather|scatter|embedding|take")
"""Operations that touch only some places of their first argument."""
_OF_SHAPES = re.compile(r"new_|\w+_like$")
"""Operations that read the shape of a tensor and none of its numbers."""
_ONLY_IN_MATH = "_safe_softmax"
"""An operation that only the math back end of PyTorch's attention calls; the others of that back end are ordinary."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one call."""

    output: Any
    matmul_flops: int | None
    """Multiplications and additions inside matrix products, without FFT, exp and softmax. A kernel that does not tell
    has those of torch's operations; None if unknown."""
    exponentials: int | None
    """Exponentials taken, one for each pair inside a fused kernel; None if one does not tell."""
    kernel: str | None
    """The kernel of PyTorch's attention, forward or backward: ``flash_cpu``, ``efficient``, ``cudnn`` or ``math``
    (unknown in a backward pass alone); ``flex`` if compiled. A GPU form that ran: ``fla`` or ``torch``. None without a
    choice."""
    put: str = ""
    """Kernels of torch's compiler in place of other operations."""
    moved_bytes: int | None = None
    """Bytes of memory from before the call that its operations touch, and of its output's own memory, each counted
    once; None if a kernel does not tell."""
    sparse: bool = False
    """An operation took or gave a sparse tensor."""


@dataclass(frozen=True, slots=True)
class _Operation:
    composite: bool
    flops: Formula | None
    """FLOPs by its arguments and its result, ``out_val``; None if it is no product."""
    exponential: bool
    """It takes an exponential of each number of its first argument."""
    kernel: str | None
    """Its name as an attention kernel. It is attention as a whole, forward or backward, or torch's math back end."""


def _attention(name: str) -> str | None:
    fused = _FUSED.match(name)
    return fused[1] + ("_cpu" if fused[2] else "") if fused else None


@cache
def _operation(func: OpOverload[..., Any]) -> _Operation:
    from torch.utils.flop_counter import flop_registry

    schema = func._schema
    name = schema.name.removeprefix("aten::")
    makes_tensors = any("Tensor" in str(one.type) for one in schema.returns)  # what asks for a size may call itself
    return _Operation(
        makes_tensors and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd),
        _PRODUCTS.get(func.overloadpacket, flop_registry.get(func.overloadpacket)),
        name.strip("_") in _EXPONENTIALS,
        "math" if name == _ONLY_IN_MATH else _attention(name),
    )


@without_compiler
class _FlopCounter(TorchDispatchMode):
    def __init__(self) -> None:
        import torch.utils.flop_counter  # noqa: F401  # it imports Triton, which a start need not wait for

        super().__init__()
        self.matmul_flops = self.exponentials = 0
        self.kernels = collections.Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        operation = _operation(func)
        if operation.composite:
            with self:
                return func.decompose(*args, **named)
        output = func(*args, **named)
        if operation.kernel:
            self.kernels[operation.kernel] += 1
        if operation.kernel not in (None, "math"):
            self._look_inside(func, args, named)
        elif operation.flops:
            self.matmul_flops += operation.flops(*args, **named, out_val=output)
        if operation.exponential:
            self.exponentials += args[0].numel()
        return output

    def _look_inside(self, func: Any, args: Any, named: dict[str, Any]) -> None:
        """Count an exponential and two products for each pair that a fused kernel reads; five products backward.

        Torch's formulas know neither its kernel for the CPU (pytorch issue 195460) nor the pairs that causality spares.
        """
        named = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **named}
        q, k, v = named["query"], named["key"], named["value"]
        (B, H, N, D), M = q.shape, k.shape[2]
        pairs = B * H * (_pairs_in_the_past(N, M) if named.get("is_causal") else N * M)
        widths = 3 * D + 2 * v.shape[3] if "backward" in func._schema.name else D + v.shape[3]
        self.exponentials += pairs
        self.matmul_flops += 2 * pairs * widths


@without_compiler
class _Touched(TorchDispatchMode):
    """Follows the operations that touch tensors from before; views of these touch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self._made = False, set[int]()
        self._parts = set[tuple[int, int, int, int]]()
        """Storage from before, first and last byte, and number of bytes, of whatever was touched."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(_tensors((args, kwargs)))
        before = [x.untyped_storage().data_ptr() for x in given]
        output = func(*args, **(kwargs or {}))
        results = list(_tensors(output))
        self.sparse |= any(isinstance(x, Tensor) and x.layout is not torch.strided for x in tree_iter((args, output)))
        new = {x.untyped_storage().data_ptr() for x in results}.difference(before)
        self._made |= new
        name = func._schema.name.removeprefix("aten::")
        if (new or func._schema.is_mutable or not results) and not _OF_SHAPES.match(name):
            most = max((x.numel() for x in (*given[1:], *(results if new else ()))), default=0)
            for i, (x, storage) in enumerate(zip(given, before, strict=True)):
                if storage not in self._made and x.numel():
                    self._touch(x, storage, most if i == 0 and _OF_PLACES.match(name) else x.numel())
        return output

    def _touch(self, x: Tensor, storage: int, most: int) -> None:
        numbers = prod(size for size, step in zip(x.shape, x.stride(), strict=True) if step)
        start = x.data_ptr()
        end = start + x.itemsize * (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)))
        self._parts.add((storage, start, end, min(x.itemsize * min(numbers, most), end - start)))

    def moved(self, output: object) -> int:
        written = {(s := x.untyped_storage()).data_ptr(): min(x.nbytes, s.nbytes()) for x in _tensors(output)}
        total = sum(size for storage, size in written.items() if storage in self._made)
        for _, parts in groupby(sorted(self._parts), itemgetter(0)):
            _, starts, ends, sizes = zip(*parts, strict=True)
            total += min(max(ends) - min(starts), sum(sizes))
        return total


def _tensors(tree: object) -> Iterator[Tensor]:
    return (one for one in tree_iter(tree) if isinstance(one, Tensor) and one.layout is torch.strided)


def _pairs_in_the_past(N: int, M: int) -> int:
    square = min(N, M)
    return square * (square + 1) // 2 + (N - square) * M


def count(call: Callable[[], Any], compiled: Callable[[], Any] | None = None) -> Counted:
    """Run ``call`` once and count. Slower than the bare call: never timed.

    ``compiled`` is its compiled form. No dispatch mode sees into that: products and exponentials are those of ``call``,
    and kernels are the profiler's.
    """
    ran = None if compiled is None else _kernels(compiled)
    plain = nullcontext() if compiled is None else operations()
    with books() as booked, _Touched() as touched, _FlopCounter() as counter, plain:
        output = call()
    told = counter.kernels
    # The compiler makes ordinary loops of the math back end, so that nothing else would tell of it.
    kernels = told if ran is None else ran or {"math"} & told.keys()
    silent = any(one.matmul_flops is None for one in booked)
    return Counted(
        output,
        _sum(counter.matmul_flops, map(_flops, booked)),
        None if silent else counter.exponentials + sum(one.exponentials for one in booked),
        "+".join(sorted({*kernels, *(one.kernel for one in booked)})) or None,
        "+".join(sorted(ran - told)) if ran else "",
        None if booked else touched.moved(output),
        touched.sparse,
    )


def _flops(one: Booked) -> int | None:
    if one.matmul_flops is not None or one.same is None:
        return one.matmul_flops
    with suppress(Exception):  # of what does the same: then they are not known
        return predict(one.same, most=SAME_STEPS).matmul_flops
    return None


def _sum(seen: int, booked: Iterable[int | None]) -> int | None:
    total = seen
    for one in booked:
        if one is None:
            return None
        total += one
    return total


def _kernels(call: Callable[[], Any]) -> collections.Counter[str]:
    names = (_attention(event.name().removeprefix("aten::")) for event in profiled(call, profile(use_kineto=True)))
    return collections.Counter(name for name in names if name)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted counts of a call; None, with the reason, if they need a real run."""

    matmul_flops: int | None
    peak_bytes: int | None
    reason: str = ""
    too_long: bool = False
    steps: int = field(default=0, compare=False)


class _ManySteps(Exception):  # an answer, not an error
    """The call has too many steps to follow in planning."""


class _StepLimit(TorchFunctionMode):
    """Counts where Python calls torch, and gives up there.

    Not where C++ calls back: at the dispatcher, as einsum does, or for the device of a fake tensor, which arrives here
    as an operator. To raise there ends the process.
    """

    def __init__(self, most: float = math.inf) -> None:
        super().__init__()
        self.steps, self.most = 0, most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            if self.steps >= self.most:
                raise _ManySteps
            self.steps += 1
        if func is scaled_dot_product_attention and (args[0] if args else kwargs["query"]).is_meta:
            return _attention_on_cpu(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **more: Any,
) -> Tensor:
    """PyTorch's attention of meta tensors, by the kernel that it chooses on a CPU."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    with _disable_current_modes():
        q, k, v = map(_one_row_on_cpu, (query, key, value))
        mask = None if attn_mask is None else _one_row_on_cpu(attn_mask)
        choice = torch._fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, **more)
    if choice == SDPBackend.MATH.value:
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **more)
    if choice != SDPBackend.FLASH_ATTENTION.value:
        raise NotImplementedError
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=more.get("scale"))[0]
    return out


def _one_row_on_cpu(x: Tensor) -> Tensor:
    row = torch.empty(x.shape[-1], dtype=x.dtype, device="cpu")
    return row.expand(x.shape).requires_grad_(x.requires_grad)


@without_compiler
class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that a call makes.

    Torch is asked once what an operation makes of meta tensors of some sizes: it computes that in Python.
    """

    _made: ClassVar[dict[object, Callable[[], Any]]] = {}

    def __init__(self, *, meta: bool) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._meta = meta
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, [*(kwargs or {}).items()]
        with torch._C.DisableTorchFunction():  # what is asked here is no step of the call
            sizes = (func, _sizes(given)) if self._meta else None
        known = self._made.get(sizes)
        result = known() if known else func(*args, **(kwargs or {}))
        made = {key: storage for key, storage in _storages(result) if key not in self._seen}
        new = made.keys() if known or not made else made.keys() - {key for key, _ in _storages(given)}
        for key in new:
            self._add(made[key])
        single = len(new) == 1 and isinstance(result, Tensor) and result.is_meta
        if sizes and not known and single and not func._schema.is_mutable:
            empty = torch.ops.aten.empty_strided.default  # not a function of Python's, which would be a step
            again = partial(empty, result.shape, result.stride(), dtype=result.dtype, device=result.device)
            if result.untyped_storage().nbytes() == again().untyped_storage().nbytes():
                self._made[sizes] = again
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


class _Cuts:
    """Cuts a call of a model where its two layers begin and end, forward and backward."""

    def __init__(self, layer: type[nn.Module], live: _LiveBytes, flops: Callable[[], int | None]) -> None:
        self._layer, self._live, self.flops = layer, live, flops
        self._spans: list[tuple[int, int, int | None]] = [(live.held, live.held, 0)]
        """Bytes held at the end, most bytes held, and FLOPs up to the end of each part."""

    def cut(self, *_: object) -> None:
        self._spans.append((self._live.held, self._live.peak, self.flops()))
        self._live.peak = self._live.held

    def before(self, module: nn.Module, _: object) -> None:
        if isinstance(module, self._layer) and len(self._spans) == 1:
            self.cut()

    def after(self, module: nn.Module, _: object, output: Tensor) -> None:
        if isinstance(module, self._layer):
            self.cut()
            if output.requires_grad:
                output.register_hook(self.cut)

    def with_more(self, more: int) -> tuple[int, int | None]:
        """Peak bytes and FLOPs of the call with ``more`` layers like the second one."""
        self.cut()
        held = peak = 0
        flops = self._spans[-1][2]
        again = {4: (3,), 6: (3, 5)}[len(self._spans) - 1]  # the second layer's parts, forward alone or both ways
        for place, ((start, _, before), (end, most, after)) in enumerate(pairwise(self._spans), start=1):
            grows = more * (end - start) * (place in again)
            peak = max(peak, most + held + max(0, grows))
            held += grows
            if place in again:
                flops = None if flops is None or before is None or after is None else flops + more * (after - before)
        return peak, flops


def _sizes(one: Any) -> Any:
    if isinstance(one, Tensor):
        return one.shape, one.stride(), one.dtype, one.is_meta
    return tuple(map(_sizes, one)) if isinstance(one, list | tuple) else (type(one), one)


def _storages(tree: object) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for one in tree_iter(tree):
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            yield id(storage), storage


def predict(
    make_call: Callable[[], Callable[[], object]],
    *,
    most: int | None = None,
    layer: type[nn.Module] = nn.Module,
    more: int = 0,
    device: Literal["cpu", "meta"] = "cpu",
) -> Prediction:
    """FLOPs and peak tensor bytes of a call, from tensors without numbers, without allocating or computing.

    Args:
        make_call: builds the module and its inputs and returns the call; runs under such tensors too.
        most: calls of torch to follow at most; None for :data:`STEPS`.
        layer: class of the two layers of the model that is called, if there are ``more`` like the second one in the
            model that is foreseen.
        device: ``cpu`` for fake tensors, ``meta`` for meta tensors, which take a fifth of the time; they raise whatever
            torch or a call raises without the numbers of a tensor or its device.

    Raises AttnbenchError for impossible shapes and options.
    """
    try:
        without_numbers: Any = FakeTensorMode() if device == "cpu" else torch.device(device)
        with without_numbers:
            with _StepLimit(), books():
                call = make_call()
            gc.collect()
            live, patience = _LiveBytes(meta=device == "meta"), _StepLimit(STEPS if most is None else most)
            with books() as booked, live, _FlopCounter() as counter, ExitStack() as watched, patience:
                cuts = _Cuts(layer, live, lambda: _sum(counter.matmul_flops, (one.matmul_flops for one in booked)))
                if more:
                    watched.enter_context(register_module_forward_pre_hook(cuts.before))
                    watched.enter_context(register_module_forward_hook(cuts.after))
                result = call()
            peak, flops = cuts.with_more(more) if more else (live.peak, cuts.flops())
            del result
            fused = "+".join(sorted(counter.kernels.keys() - {"math"}))
            return Prediction(flops, peak, f"without what {fused} holds inside" * bool(fused), steps=patience.steps)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Prediction(None, None, "unknown: depends on the data")
    except _ManySteps:
        return Prediction(None, None, too_long=True, steps=patience.steps)


def move_fake(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """``module.to(device, dtype)`` for fake tensors, whose parameters torch cannot fill in place."""
    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False)):
            new = old.detach().to(device, dtype if old.is_floating_point() else None)
            setattr(part, name, nn.Parameter(new, requires_grad=old.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device, dtype if buffer.is_floating_point() else None))
    return module
