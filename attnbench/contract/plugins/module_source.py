"""A module of somebody else's file, ``FILE.py:Class:dim=64``: its place, constructor, inputs and outputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract.plugins.foreign import module_name
from attnbench.contract.spec import POSITIONAL, parse_spec
from attnbench.errors import UsageError, did_you_mean, said

_HOLDERS = ("logits", "last_hidden_state", "hidden_states", "output")
_MADE = (Tensor, Mapping, tuple, list)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_HIDES = ("attn_mask", "src_mask", "key_padding_mask", "src_key_padding_mask", "padding_mask")
"""Those of PyTorch are True where something is hidden, most others where it is not."""
_MASKS = ("mask", "attention_mask", "key_mask", *_HIDES)
"""Arguments of ``forward`` that hide tokens, which get a mask that hides none."""
_SAME = ("k", "v", "key", "value", "keys", "values")
"""Arguments of ``forward`` that get x as well: it attends to itself."""

Mask = Callable[[Tensor], Tensor] | None
"""A mask for x, or none."""


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A class of a file, or a function that makes a module, with its options. Raises UsageError: the text names no
    class, or gives options without names."""

    text: str
    """``FILE.py:Class``, with options as a variant has them: ``FILE.py:Class:dim=64,heads=4``."""
    _mask: list[Mask] = field(default_factory=list, init=False, repr=False, compare=False)
    """The mask that its first module was found to take."""

    def __post_init__(self) -> None:
        if POSITIONAL in self.options:
            raise UsageError(f"{self.text}: write its options by name, {self.name}:dim=64, say")

    @property
    def file(self) -> str:
        return self._parts[0]

    @property
    def name(self) -> str:
        return parse_spec(self._parts[1]).name

    @property
    def options(self) -> dict[str, Any]:
        return dict(parse_spec(self._parts[1]).options)

    @property
    def _parts(self) -> tuple[str, str]:
        file, found, rest = self.text.partition(".py:")
        if not found or not rest:
            raise UsageError(f"{self.text}: name a class of the file: {self.text.partition(':')[0]}:Model")
        return f"{file}.py", rest

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Its parameters; anything if it is written in C. The file must be loaded, or UsageError is raised."""
        try:
            return inspect.signature(self._callable()).parameters
        except (TypeError, ValueError):
            return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}

    def make(self, given: Mapping[str, Any] | None = None) -> nn.Module:
        """The module, to be called with x or tokens alone; torch's generator draws its weights. The file must be
        loaded.

        Options in the text override those in ``given``. Raises UsageError: no such class, an unknown or a missing
        option, making it raises, it is no module, or its ``forward`` needs more than x and masks.
        """
        call, options = self._callable(), {**(given or {}), **self.options}
        self._hold_to_signature(options)
        try:
            module = call(**options)
        except Exception as error:
            raise UsageError(f"{self.text}: making it raises {said(error)}") from error
        if not isinstance(module, nn.Module):
            raise UsageError(f"{self.text}: it makes a {type(module).__name__}, not a torch.nn.Module")
        needs = self._needs(module)
        return _Completed(module, needs, self._mask) if needs else module

    def _callable(self) -> Any:
        inside = vars(sys.modules[module_name(Path(self.file))])
        call = inside.get(self.name)
        if not callable(call):
            classes = [name for name, one in inside.items() if isinstance(one, type) and issubclass(one, nn.Module)]
            hint = did_you_mean(self.name, classes) or (f"; it has {', '.join(classes)}" if classes else "")
            raise UsageError(f"{self.file}: no class {self.name!r}{hint}")
        return call

    def _hold_to_signature(self, options: Mapping[str, Any]) -> None:
        parameters = self.parameters()
        anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for option in options:
            if option not in parameters and not anything:
                raise UsageError(f"{self.text}: {self.name} takes no {option!r}{did_you_mean(option, parameters)}")
        missing = [
            name
            for name, one in parameters.items()
            if one.default is one.empty and one.kind in _NAMED and name not in options
        ]
        if {*missing} & {"x", "q", "query", *_SAME}:
            given = ", ".join("x" for _ in missing)
            raise UsageError(
                f"{self.text}: it is called with tensors and makes no module; name a class in {self.file} that calls "
                f"it: class Own(torch.nn.Module): def forward(self, x): return {self.name}({given})"
            )
        if missing:
            example = ",".join(f"{name}=64" for name in missing)
            raise UsageError(
                f"{self.text}: {self.name} needs {', '.join(missing)}; write {self.text}:{example}, "
                f"or name a function in {self.file} that makes it"
            )

    def _needs(self, module: nn.Module) -> list[str]:
        parameters = list(inspect.signature(module.forward).parameters.values())
        kinds = (*_NAMED, inspect.Parameter.POSITIONAL_ONLY)
        needs = [one.name for one in parameters[1:] if one.default is one.empty and one.kind in kinds]
        if more := [name for name in needs if name not in (*_MASKS, *_SAME)]:
            raise UsageError(
                f"{self.text}: it is called with tokens or x alone, and its forward also needs {', '.join(more)}; "
                f"name a class in {self.file} that gives it that: class Own({self.name}): "
                f"def forward(self, x): return super().forward(x, {', '.join(f'{one}=...' for one in more)})"
            )
        return needs


class _Completed(nn.Module):
    """Calls ``forward`` with its other arguments: x as keys and values, and masks that hide nothing."""

    def __init__(self, inner: nn.Module, names: Sequence[str], mask: list[Mask]) -> None:
        super().__init__()
        self.inner, self._names, self._mask = inner, names, mask

    def forward(self, x: Tensor) -> object:
        kinds = product((torch.bool, torch.int64), (_of_tokens, _of_pairs), (True, False))
        masks = (None, *(partial(of, shown=shown, dtype=dtype) for dtype, of, shown in kinds))
        if self._mask or not set(self._names) & set(_MASKS):
            way = self._mask[0] if self._mask else None
        elif (worth := [self._worth(one, x) for one in masks])[0] >= 0:  # None hides nothing for sure
            way = self._found(None)
        else:  # hiding everything, as some masks do by True, leaves queries and keys without effect
            way = self._found(masks[worth.index(max(worth))]) if max(worth) >= 0 else masks[1]
        return self.inner(x, **self._given(way, x))

    def _found(self, way: Mask) -> Mask:
        self._mask.append(way)
        return way

    @torch.enable_grad()
    def _worth(self, way: Mask, x: Tensor) -> int:
        """The numbers of its parameters that have an effect; -1 if it raises."""
        try:
            other = deepcopy(self.inner).requires_grad_(True)
            out = next(one for one in tensors(other(x.clone(), **self._given(way, x))) if one.is_floating_point())
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
            torch.autograd.backward(out, weights)
        except Exception:  # somebody else's code, which says by it that this is no mask
            return -1
        grads = [one.grad for one in other.parameters() if one.grad is not None]
        return sum(int((grad.isfinite() & (grad != 0)).sum()) for grad in grads)

    def _given(self, way: Mask, x: Tensor) -> dict[str, Tensor | None]:
        return {name: x if name in _SAME else way and (way(x) ^ (name in _HIDES)) for name in self._names}


def _of_tokens(x: Tensor, shown: bool, dtype: torch.dtype) -> Tensor:
    return x.new_full(x.shape[:2], shown, dtype=dtype)


def _of_pairs(x: Tensor, shown: bool, dtype: torch.dtype) -> Tensor:
    return x.new_full((x.shape[1], x.shape[1]), shown, dtype=dtype)


def tensors(out: object) -> Iterator[Tensor]:
    """The tensors in an output, the likeliest first."""
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, Mapping):
        for value in out.values():
            yield from tensors(value)
    elif isinstance(out, tuple | list):
        for value in out:
            yield from tensors(value)
    else:
        own = {name: one for name, one in getattr(out, "__dict__", {}).items() if isinstance(one, _MADE)}
        yield from tensors(sorted(own.items(), key=lambda one: one[0] not in _HOLDERS))


def widths(module: nn.Module) -> list[int]:
    """Input widths of its layers, in their order."""
    found = []
    for part in module.modules():
        sizes = [getattr(part, name, None) for name in ("embed_dim", "d_model", "input_size", "in_features")]
        sizes += [part.normalized_shape[-1]] if isinstance(part, nn.LayerNorm) else []
        found += [size for size in sizes if isinstance(size, int) and size]
    return list(dict.fromkeys(found))
