"""A module of the user's own as a variant: ``--plugin FILE.py:Class`` puts it into the table by the name of its class.

It is a mixer, x ``(B, N, C)`` to ``(B, N, C)``. The options of its constructor are its options. Those that mean a size
of the problem, such as ``dim``, ``heads`` or ``seq_len``, follow each cell where they are not given.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from attnbench.errors import Unsupported, UsageError, said
from attnbench.foreign import module_name
from attnbench.module_source import ModuleSource, tensors, widths
from attnbench.shape import Shape
from attnbench.spec import Scalar
from attnbench.traits import No
from attnbench.variant import VARIANTS, Traits, register

_SIZES = {
    "C": ("dim", "d_model", "embed_dim", "hidden_size", "n_embd"),
    "H": ("heads", "num_heads", "n_heads", "nhead", "n_head", "num_attention_heads"),
    "D": ("head_dim", "dim_head", "d_head"),
    "N": ("seq_len", "seq_length", "max_len", "max_seq_len"),
    "causal": ("causal", "is_causal"),
}
"""Size of a :class:`~attnbench.shape.Shape` -> names under which constructors ask for it, and for nothing else: a
``block_size`` may be that of a block, a ``width`` that of a window, and to set them would time another method."""
_ALONE = "it is called with x alone"
_SMALL = 64
"""Most tokens with which a module is tried where it is made, which takes as long as a call."""


def register_module(text: str) -> None:
    """Register the class of ``FILE.py:Class:option=value``, whose file is loaded; a second call does nothing.

    Raises:
        UsageError: the file has no such class, or its name is that of another variant.
    """
    source = ModuleSource(text)
    known = VARIANTS.get(source.name) if source.name in VARIANTS.names() else None
    if known is not None and getattr(known.make, "source", None) == source:
        return
    asked = source.parameters()
    causal = any(name in asked for name in _SIZES["causal"])

    class Own(nn.Module):
        def __init__(self, shape: Shape, **options: Scalar | None) -> None:
            super().__init__()
            sizes = {name: getattr(shape, size) for size, names in _SIZES.items() for name in names if name in asked}
            try:
                self.inner = source.make(sizes | {name: x for name, x in options.items() if x is not None}).eval()
            except UsageError as problem:
                raise Unsupported(str(problem)) from problem
            wide = widths(self.inner)
            if wide and shape.C not in wide:
                raise Unsupported(
                    f"x of width {wide[0]}: {shape.H} heads of {shape.D} have {shape.C}; choose --heads and --head-dim"
                )
            if shape.N <= _SMALL:
                self._try(torch.zeros(1, shape.N, shape.C))

        @torch.no_grad()
        def _try(self, x: Tensor) -> None:
            """Raise Unsupported where it does not take a small shape, as of the laws: 4 heads of a width of 2."""
            if isinstance(x, FakeTensor):  # to look at it, and whether its shapes depend on data, is the caller's
                return
            try:
                self.inner(x)
            except Exception as error:  # somebody else's code
                raise Unsupported(f"called with x {tuple(x.shape)} it raises {said(error)}") from error

        def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            if key_mask is not None:
                raise Unsupported(f"key padding: {_ALONE}")
            found = next((one for one in tensors(self.inner(x)) if one.shape == x.shape), None)
            if found is None:
                raise Unsupported(f"it gives no output of the shape of x, {tuple(x.shape)}")
            return found

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
            cross=No(_ALONE),
            key_padding=No(_ALONE),
            stochastic=True,
            rows_sum_to_one=False,
            permutable=None,
            longer=No("it may have been made for one length"),
        ),
    )(own)


def _options(source: ModuleSource) -> Iterator[Parameter]:
    """What the constructor may be given beside what the text gives and what says whether it is causal.

    None stands for the size of the cell, or for a value that the constructor insists on.
    """
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
