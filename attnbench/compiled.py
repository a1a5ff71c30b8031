"""What ``torch.compile`` makes: all of a function or an error, and what it does within a count of FLOPs.

The dispatcher does not see compiled code, so that it says itself what it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from attnbench.errors import Unsupported, said

Function = TypeVar("Function", bound=Callable[..., Any])

_COMPILERS = ("torch._dynamo.", "torch._inductor.", "torch._functorch.")
_NOTHING = "torch.compile with fullgraph=True found no compiled frames"
"""What torch's RuntimeError begins with where its compiler is switched off."""
_USER_CODE = re.compile(r"File \"[^\"]*?([^/\"]+)\", line (\d+)")


def whole(function: Function) -> Function:
    """``torch.compile`` without graph breaks, for the sizes of its first call; a module stays one.

    Calling it raises an exception of which :func:`why_not_compiled` knows the reason, where not all of it can be
    compiled: no part ever runs uncompiled.
    """
    torch.compiler.reset()  # what was compiled before must not use up how often torch compiles a piece of code
    return cast("Function", torch.compile(function, fullgraph=True, dynamic=False))


def why_not_compiled(error: BaseException) -> str | None:
    """What kept torch from compiling, with the line of code that it names; None for an error of another kind."""
    kind, _, text = said(error).partition(": ")
    if not type(error).__module__.startswith(_COMPILERS) and not text.startswith(_NOTHING):
        return None
    place = _USER_CODE.findall(text.partition("from user code:")[2])
    where = f" ({place[-1][0]}:{place[-1][1]})" if place else ""
    return f"torch.compile: {text.partition(chr(10))[0].strip() or kind}{where}"


@contextmanager
def compiling() -> Iterator[None]:
    """Compile what is called inside, though an earlier process may have kept the same code.

    Raises:
        Unsupported: nothing was compiled, though nothing failed: torch's compiler is switched off, say.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    graphs = counters["stats"]["unique_graphs"]
    with TemporaryDirectory() as folder, fresh_cache(dir=folder):
        yield
    if counters["stats"]["unique_graphs"] == graphs:
        raise Unsupported("torch.compile made nothing: it is switched off, or there is nothing to compile")


@dataclass(frozen=True, slots=True)
class Booked:
    """What ran out of the dispatcher's sight."""

    kernel: str
    matmul_flops: int
    exponentials: int


_booked: list[list[Booked]] = []
"""Of each count or prediction in progress."""


def out_of_sight(
    call: Callable[[], Tensor],
    *,
    like: Tensor,
    kernel: str,
    matmul_flops: int,
    backward_flops: int = 0,
    exponentials: int = 0,
) -> Tensor:
    """Run compiled code, which under a dispatch mode would not be compiled, and book what it does.

    Args:
        call: runs it.
        like: a tensor with the shape and type of what it returns; where this is a fake one, nothing runs.
        kernel: its name in the results.
        matmul_flops: what it multiplies and adds in matrix products, all of which it does out of sight.
        backward_flops: the same of its backward pass, booked each time that one runs.
        exponentials: what it takes exponentials of, forward and once more backward.
    """
    _book(Booked(kernel, matmul_flops, exponentials))
    if isinstance(like, FakeTensor):
        return torch.empty_like(like)
    if not _booked:
        output = call()
    else:
        with _disable_current_modes():
            output = call()
    if backward_flops and output.requires_grad:
        back = Booked(kernel, backward_flops, exponentials)
        output.register_hook(lambda _: _book(back))  # type: ignore[no-untyped-call]  # torch leaves it so
    return output


def _book(what: Booked) -> None:
    for entries in _booked:
        entries.append(what)


@contextmanager
def books() -> Iterator[list[Booked]]:
    """Collect what :func:`out_of_sight` books in the meantime."""
    entries: list[Booked] = []
    _booked.append(entries)
    try:
        yield entries
    finally:
        _booked.pop()
