"""A module of the user's own as a variant: ``--plugin FILE.py:Class`` registers it by the name of its class.

It is a mixer, x ``(B, N, C)`` to ``(B, N, C)``; a batch with padding reaches it example by example, without padding.
The options of its constructor are its options. Sizes such as ``dim``, ``heads`` or ``seq_len`` follow each cell by
default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import Parameter, Signature
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.parameter import is_lazy

from attnbench.contract.compiled import as_written
from attnbench.contract.plugins.foreign import module_name
from attnbench.contract.plugins.module_source import ModuleSource, tensors, widths
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Scalar
from attnbench.contract.traits import No
from attnbench.contract.variant import VARIANTS, Traits, register
from attnbench.errors import Unsupported, UsageError, said

_SIZES = {
    "C": ("dim", "d_model", "embed_dim", "hidden_size", "n_embd"),
    "H": ("heads", "num_heads", "n_heads", "nhead", "n_head", "num_attention_heads"),
    "D": ("head_dim", "dim_head", "d_head"),
    "N": ("seq_len", "seq_length", "max_len", "max_seq_len"),
    "causal": ("causal", "is_causal"),
}
"""Size of a :class:`~attnbench.contract.problem.shape.Shape` -> names of constructor options that mean only it: a
``block_size`` may be that of a block and a ``width`` that of a window, and setting them would time another method.
"""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types in which a module is tried, the first of which it usually takes."""
_SMALL = 64
"""Most tokens of a first try of a module, which takes as long as a few calls."""


def register_module(text: str) -> None:
    """Register the class of ``FILE.py:Class:option=value``, whose file is loaded; a second call does nothing. Raises
    UsageError: the file has no such class, or its name is that of another variant."""
    source = ModuleSource(text)
    known = VARIANTS.get(source.name) if source.name in VARIANTS else None
    if known is not None and getattr(known.make, "source", None) == source:
        return
    asked = source.parameters()
    causal = any(name in asked for name in _SIZES["causal"])

    class Own(nn.Module):
        def __init__(self, shape: Shape, **options: Scalar | None) -> None:
            super().__init__()
            sizes = {name: getattr(shape, size) for size, names in _SIZES.items() for name in names if name in asked}
            given = sizes | {name: x for name, x in options.items() if x is not None}
            try:
                self.inner = source.make(given).eval()
            except UsageError as problem:
                raise Unsupported(str(problem)) from problem
            self.tokens_first = False
            self.place: int | None = None
            self.kept = any(x.is_floating_point() and x.dtype != torch.float32 for x in self.inner.parameters())
            with unset_fake_temporarily(), as_written():  # whether its shapes depend on data is for others to find
                self._try(source.make(given).eval(), shape)  # another one: a first call may leave something behind
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # it compiles a piece of code only so often, and other cells must not count
            if any(is_lazy(x) for x in self.inner.parameters()):
                self(torch.zeros(1, shape.N, shape.C))  # has parameters from then on

        @torch.no_grad()
        def _try(self, other: nn.Module, shape: Shape) -> None:
            """Learn which axis of x is its batch, one in which neither of two examples changes the other, and which of
            the returned tensors is the output, at a length that is not the width. Raises Unsupported."""
            draws, wide, refused = torch.Generator().manual_seed(0), widths(other), Exception()
            for self.dtype, n in product(_DTYPES, dict.fromkeys((min(shape.N, _SMALL), shape.N))):
                x, y = (torch.randn(2, n, shape.C, generator=draws).to(self.dtype) for _ in range(2))
                try:
                    (other if self.kept else other.to(self.dtype))(x[:1])
                except Exception as error:  # somebody else's code
                    refused = error if self.dtype == torch.float32 else refused
                    continue
                with suppress(Exception):  # likewise
                    self.tokens_first = not _apart(other, x, y) and _apart(lambda x: _turned(other, x), x, y)
                for m in (n,) if n != shape.C else (n // 2, n - 1):  # where weights (m, m) have another shape
                    with suppress(Exception):  # likewise
                        out = self._returned(other, x[:1, :m])
                        self.place = next(i for i, one in enumerate(out) if one.shape == (1, m, shape.C))
                return
            if wide and shape.C not in wide:
                have = f"{shape.H} heads of {shape.D} have {shape.C}"
                raise Unsupported(f"x of width {wide[0]}: {have}; choose --heads and --head-dim") from refused
            raise Unsupported(f"called with x {(1, shape.N, shape.C)} it raises {said(refused)}") from refused

        def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            if key_mask is None:
                return self._whole(x)
            out = torch.zeros_like(x)
            for i, real in enumerate(key_mask):  # without its padding, an example is alone: no other is as long
                try:
                    out[i, real] = self._whole(x[i : i + 1, real])[0]
                except Exception as error:  # somebody else's code
                    what = f"padding: called with the {int(real.sum())} tokens of an example alone it raises"
                    raise Unsupported(f"{what} {said(error)}; let it take any length") from error
            return out

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
            as_made = (lambda x: fn(x).to(x.dtype)) if self.kept else fn
            return super()._apply(as_made, recurse)  # type: ignore[no-untyped-call]  # torch leaves it so

        def _whole(self, x: Tensor) -> Tensor:
            try:
                out = self._returned(self.inner, x)
            except Exception as error:  # somebody else's code
                if self.dtype in (torch.float32, x.dtype):
                    raise
                takes, given = (str(one).removeprefix("torch.") for one in (self.dtype, x.dtype))
                raise Unsupported(f"in {given} it raises {said(error)}; it takes {takes}: --dtype {takes}") from error
            fitting = [i for i, one in enumerate(out) if one.shape == x.shape]
            if not fitting:
                raise Unsupported(f"it gives no output of the shape of x, {tuple(x.shape)}")
            if len(fitting) > 1 and self.place is None and x.shape[1] == x.shape[2]:
                several = f"it gives {len(fitting)} outputs of the shape of x, {tuple(x.shape)}, such as weights"
                raise Unsupported(f"{several}; return the output alone, or choose a length that is not the width")
            return out[self.place if self.place in fitting else fitting[0]]

        def _returned(self, module: nn.Module, x: Tensor) -> list[Tensor]:
            return _turned(module, x) if self.tokens_first else list(tensors(module(x)))

    facts: dict[str, Any] = {"__module__": module_name(Path(source.file)), "__qualname__": source.name}
    facts |= {"__doc__": f"{source.name} of {source.file}, as it is.", "source": source}
    shape = Parameter("shape", Parameter.POSITIONAL_OR_KEYWORD)
    facts["__signature__"] = Signature([shape, *_options(source)])
    own = type(source.name, (Own,), facts)
    register(
        source.name,
        kind="mixer",
        family="mixing",
        source=source.file,
        formula="not known",
        cost="not known",
        traits=Traits(
            target="other",
            causal=causal or No("its constructor has no option causal"),
            cross=No("it is called with one sequence alone"),
            stochastic=True,
            rows_sum_to_one=False,
            permutable=None,
            longer=No("it may have been made for one length"),
        ),
    )(own)


def _turned(module: nn.Module, x: Tensor) -> list[Tensor]:
    return [one.transpose(0, 1) for one in tensors(module(x.transpose(0, 1))) if one.ndim > 1]


def _apart(call: Callable[[Tensor], object], x: Tensor, y: Tensor) -> bool:
    """True if neither of two examples changes the other; if only a later one does, a causal module may mix them."""
    before, others = next(tensors(call(x))), (torch.stack((x[0], y[1])), torch.stack((y[0], x[1])))
    return all(
        torch.allclose(next(tensors(call(other)))[i], before[i], rtol=1e-4, atol=1e-5) for i, other in enumerate(others)
    )


def _options(source: ModuleSource) -> Iterator[Parameter]:
    """Options of the constructor beyond the text and causality; None for a size or a required value."""
    sizes = {name for names in _SIZES.values() for name in names}
    for name, one in source.parameters().items():
        fixed = name in source.options or name in _SIZES["causal"] or name.startswith("_") or hasattr(BaseModel, name)
        if fixed or one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            continue
        kind: Any
        if name in sizes:
            default, kind = None, Annotated[int | None, Field(description="none: as the cell has it")]
        elif one.default is one.empty:
            default, kind = None, Annotated[Scalar | None, Field(description="must be given")]
        elif type(one.default) in (bool, int, float, str):
            default, kind = one.default, type(one.default)
        else:
            continue
        yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
