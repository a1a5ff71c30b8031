"""Compile a function as a whole or raise an error, and book the FLOPs of compiled code.

The dispatcher does not see inside compiled code, so that such code must report its work itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from attnbench.errors import Unsupported, said

Function = TypeVar("Function", bound=Callable[..., Any])
Mode = TypeVar("Mode")

_COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.")
_NOTHING = "torch.compile with fullgraph=True found no compiled frames"
"""Start of torch's RuntimeError when its compiler is switched off."""
_USER_CODE = re.compile(r"File \"[^\"]*?([^/\"]+)\", line (\d+)")


def whole(function: Function) -> Function:
    """``torch.compile`` without graph breaks, for the sizes of the first call; a module stays a module.

    A call that cannot be compiled raises an exception (see :func:`why_not_compiled`); Unsupported without a cache.
    """
    _hold_cache()
    torch.compiler.reset()  # torch compiles a piece of code only so often; earlier compilations must not count
    return cast("Function", torch.compile(function, fullgraph=True, dynamic=False))


def _hold_cache() -> None:
    """Raise Unsupported if the compiler's cache cannot be written, since torch's own message hides this cause."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        with TemporaryFile(dir=cache_dir()):
            pass
    except OSError as error:
        remedy = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        raise Unsupported(
            f"torch.compile cannot write its cache: {error.strerror}: {error.filename}; {remedy}"
        ) from None


def why_not_compiled(error: BaseException) -> str | None:
    """The reason why torch could not compile, with the line of code; None for an error of another kind."""
    kind, _, text = said(error).partition(": ")
    if not type(error).__module__.startswith(_COMPILERS) and not text.startswith(_NOTHING):
        return None
    reason = text.removeprefix("backend='inductor' raised:").strip().partition("\n")[0] or kind
    place = _USER_CODE.findall(text.partition("from user code:")[2])
    where = f" ({place[-1][0]}:{place[-1][1]})" if place else ""
    return f"torch.compile: {reason}{where}"


def without_compiler(mode: type[Mode]) -> type[Mode]:
    """Decorator: call a dispatch mode directly, without the wrapper that keeps torch from compiling it.

    The wrapper imports torch's compiler, which takes a second and makes every search for garbage slow. A user's
    compiled code runs :func:`as_written` in such a mode.
    """
    inner = getattr(mode.__dict__["__torch_dispatch__"], "__wrapped__", None)
    if inner is not None:
        inner.__dynamo_disable = inner  # where the wrapper would keep its own, once made
    if torch.__version__ < "2.10" and issubclass(mode, TorchDispatchMode):
        # It compiles nothing, and says nothing, where such a mode is only set aside.
        mode.ignore_compile_internals = classmethod(lambda cls: True)  # type: ignore[assignment]
    if issubclass(mode, TorchDispatchMode):
        _held_back(mode)
    return mode


def _held_back(mode: Any) -> None:
    enter, leave = mode.__enter__, mode.__exit__

    def begin(self: Any) -> Any:
        self.as_written = as_written()
        self.as_written.__enter__()
        return enter(self)

    def end(self: Any, *error: Any) -> None:
        leave(self, *error)
        self.as_written.__exit__(*error)

    mode.__enter__, mode.__exit__ = begin, end


@contextmanager
def as_written() -> Iterator[None]:
    """Call a user's compiled code as it is written: the number of its calls and their shapes decide how torch compiles
    it later, and torch never compiles code that it meets in a dispatch mode."""
    had_compiler = _has_compiler()
    try:
        with _stance("force_eager"):
            yield
    finally:
        if not (had_compiler or any(_booked)) and _has_compiler():
            torch.compiler.reset()  # the first compiled code, which was not held back


def _stance(name: Literal["default", "force_eager"]) -> AbstractContextManager[object]:
    return torch.compiler.set_stance(name) if _has_compiler() else nullcontext()


def _has_compiler() -> bool:
    return sys.modules.get("torch._dynamo") is not None


def find_instructions() -> None:
    """Fill torch's cache of the processor's instructions (ten seconds), so that no first call includes this search."""
    with suppress(Exception):  # no compiler, say: the call will tell
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()


@contextmanager
def compiling() -> Iterator[None]:
    """Compile functions called inside again, even if torch's cache has the code. Raises Unsupported: nothing was
    compiled, since torch's compiler is switched off, or its cache cannot be written."""
    _hold_cache()
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    graphs = counters["stats"]["unique_graphs"]
    with TemporaryDirectory() as folder, fresh_cache(dir=folder):
        yield
    if counters["stats"]["unique_graphs"] == graphs:
        raise Unsupported("torch.compile made nothing: it is switched off, or there is nothing to compile")


@dataclass(frozen=True, slots=True)
class Booked:
    """Work that the dispatcher did not see."""

    kernel: str
    matmul_flops: int | None
    """None if the code does not state it."""
    exponentials: int
    same: Callable[[], Callable[[], object]] | None = None
    """Makes, of tensors of its own, an equivalent call in operations that can be counted."""


_booked: list[list[Booked]] = []
_same: list[Callable[[bool], Callable[[], object]]] = []
"""Equivalent code of the code that runs now, forward or, if True, backward; see :class:`Booked`."""


def out_of_sight(
    call: Callable[[], Tensor],
    *,
    like: Tensor,
    kernel: str,
    matmul_flops: int | None,
    backward_flops: int = 0,
    exponentials: int = 0,
) -> Tensor:
    """Run compiled code outside dispatch modes, under which it would not be compiled, and book its work.

    Args:
        call: runs the code.
        like: a tensor with the shape and type of the output; if it is :func:`foreseen`, nothing runs.
        kernel: the code's name in the results.
        matmul_flops: FLOPs of its matrix products; None if they are not known.
        backward_flops: the same for its backward pass, booked each time it runs.
        exponentials: of the forward pass; the backward pass takes as many again.
    """
    same = _same[-1] if _same and matmul_flops is None else None
    book(Booked(kernel, matmul_flops, exponentials, same and partial(same, False)))
    if foreseen(like):
        return torch.empty_like(like)
    if not _booked:
        output = call()
    else:
        with _disable_current_modes(), _stance("default"):
            output = call()
    if (backward_flops or matmul_flops is None) and output.requires_grad:
        flops = None if matmul_flops is None else backward_flops
        back = Booked(kernel, flops, exponentials, same and partial(same, True))
        output.register_hook(lambda _: book(back))  # type: ignore[no-untyped-call]  # torch leaves it so
    return output


def foreseen(x: Tensor) -> bool:
    """True for a tensor without numbers, of which a prediction is made."""
    return isinstance(x, FakeTensor) or (x.is_meta and bool(_booked))


def on_cpu(device: torch.device) -> bool:
    """True also for ``meta`` in a prediction, which is one for a CPU."""
    return device.type == "cpu" or (device.type == "meta" and bool(_booked))


def book(what: Booked) -> None:
    """Add work to each count or prediction in progress."""
    for entries in _booked:
        entries.append(what)


@contextmanager
def books() -> Iterator[list[Booked]]:
    """Collect what :func:`out_of_sight` books inside this context."""
    entries: list[Booked] = []
    _booked.append(entries)
    try:
        yield entries
    finally:
        _booked.pop()


@contextmanager
def does_the_same(same: Callable[[bool], Callable[[], object]]) -> Iterator[None]:
    """Count code that does not state its FLOPs by equivalent code; see :class:`Booked`."""
    _same.append(same)
    try:
        yield
    finally:
        _same.pop()


@contextmanager
def apart() -> Iterator[None]:
    """Keep calls inside, such as a trial, out of every count and prediction."""
    held, _booked[:] = _booked[:], []
    try:
        with _disable_current_modes(), _stance("default"):
            yield
    finally:
        _booked[:] = held
