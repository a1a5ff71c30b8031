"""A cache of results of one cell for the next, which is not blamed for their memory.

Each cell gets copies of their tensors, since a variant may write into its inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, cast

from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")


class Recent(Generic[P, T]):
    """Keeps the last few results of a function, and counts their bytes.

    It gives copies; but modules are given as they are, for the caller to copy.
    """

    _all: list[Recent[Any, Any]] = []  # noqa: RUF012  # one list for all of them is intended

    def __init__(self, make: Callable[P, T], size: int) -> None:
        self._make, self._size = make, size
        self._results: OrderedDict[Hashable, T] = OrderedDict()
        Recent._all.append(self)

    def __call__(self, *args: P.args, **options: P.kwargs) -> T:
        key = (args, tuple(options.items()))
        if key not in self._results:
            if len(self._results) == self._size:  # first, since there may be memory for only one
                self._results.popitem(last=False)
            self._results[key] = self._make(*args, **options)
        self._results.move_to_end(key)
        return cast("T", _lent(self._results[key]))

    def forget(self) -> None:
        """Keep nothing."""
        self._results.clear()

    @staticmethod
    def held(device: str) -> int:
        """Bytes of all results that are kept on a type of device: ``cpu``, ``cuda``."""
        tensors = (tensor for one in Recent._all for result in one._results.values() for tensor in _tensors(result))
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device)


def _lent(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_lent, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{field.name: _lent(getattr(value, field.name)) for field in fields(value) if field.init}
        )
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | nn.Module):
        for one in (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else value:
            yield from _tensors(one)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
