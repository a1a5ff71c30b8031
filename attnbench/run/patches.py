"""Functions and constants on which measuring and the variants rely, and which of them have been replaced."""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import json
import math
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional

_MODULES: tuple[Any, ...] = (
    *(builtins, contextlib, functools, itertools, json, json.decoder, json.encoder, math, random, signal, statistics),
    *(sys, threading, time, torch, torch.autograd, torch.linalg, torch.nn, torch.nn.functional, torch.special),
)
"""Modules that are watched besides all of attnbench and the modules that it names."""
_CLASSES = (json.JSONDecoder, json.JSONEncoder, torch.Tensor, torch.autograd.Function)
"""Classes that are watched besides those of attnbench and torch.nn. The latter inherit from no others that are used."""
_COMPILED = ("__compiled_fn", "__resume_at")
"""Begin of the names under which torch.compile puts its own functions into a module, and takes them out again."""
_COMPILER = tuple(
    str(Path(torch.__file__).parent / name) for name in ("_compile.py", "_dynamo", "_functorch", "_inductor")
)


class Home(NamedTuple):
    """A module or class."""

    values: Mapping[str, object]
    """What should stay as it is, by name."""
    is_class: bool = False


def fixed_values() -> dict[str, Home]:
    """All that should stay as it is, by module or class. What was found before and is unchanged is the same object."""
    return dict(_homes())


def differing(now: Mapping[str, Home], before: Mapping[str, Home]) -> list[str]:
    """Names of what was replaced or removed, or now hides a built-in or inherited function."""
    return [
        f"{name}.{value}"
        for name, home in before.items()
        if now.get(name) is not home
        for value in _changed(now.get(name, _NOTHING), home)
        if not value.startswith(_COMPILED) and not _is_from_compiler(now.get(name, _NOTHING).values.get(value))
    ]


_NOTHING = Home({})


def _changed(now: Home, before: Home) -> Iterator[str]:
    for name, value in before.values.items():
        if now.values.get(name) is not value and _parts(now.values.get(name)) != _parts(value):
            yield name
    for name in now.values.keys() - before.values.keys():
        if before.is_class or hasattr(builtins, name):
            yield name


def _homes() -> Iterator[tuple[str, Home]]:
    own = [
        (name, _seen(module)) for name, module in list(sys.modules.items()) if name.startswith("attnbench.") and module
    ]
    classes = {*_CLASSES, *_seen(torch.nn).classes}
    for module in dict.fromkeys([*_MODULES, *(named for _, seen in own for named in seen.modules)]):
        if not module.__name__.startswith("attnbench."):
            yield module.__name__, _seen(module).home
    for name, seen in own:
        yield name, seen.home
        classes.update(part for part in seen.classes if part.__module__ == name)
    for part in classes:
        yield f"{part.__module__}.{part.__qualname__}", _seen(part).home
    yield "sys.modules", Home({module.__name__: sys.modules.get(module.__name__) for module in _MODULES})


class _Seen(NamedTuple):
    """What there was in a module or class when it was last looked through. To see that nothing has changed since then
    takes a fraction of that time.
    """

    place: Any
    """The module or class; as long as it is kept, no other has its number."""
    names: list[str]
    values: list[int]
    """Which objects these were; those that count, all others not being kept for this, are kept in ``home``."""
    types: list[type]
    """With an object of the same type in the place of one that is gone, all that is found here stays as it is."""
    functions: list[FunctionType]
    codes: list[int]
    """Which code and which defaults these have."""
    home: Home
    modules: list[ModuleType]
    classes: list[type]


_found: dict[int, _Seen] = {}


def _seen(place: Any) -> _Seen:
    """What is in a module or class now."""
    inside = dict(vars(place))
    names, values, types = list(inside), list(map(id, inside.values())), list(map(type, inside.values()))
    seen = _found.get(id(place))
    if seen is not None:
        found = seen.names, seen.values, seen.types, seen.codes
        if (names, values, types, _codes(seen.functions)) == found:
            return seen
    functions = [value for value in inside.values() if type(value) is FunctionType]
    is_class = isinstance(place, type)
    own = not is_class and getattr(place, "__name__", "").startswith("attnbench.")
    home = Home(_functions(inside) | (_constants(inside) if own else {}), is_class)
    modules = [value for value in inside.values() if isinstance(value, ModuleType)]
    classes = [value for value in inside.values() if isinstance(value, type)]
    seen = _Seen(place, names, values, types, functions, _codes(functions), home, modules, classes)
    _found[id(place)] = seen
    return seen


def _codes(functions: list[FunctionType]) -> list[int]:
    return [*map(id, map(_CODE, functions)), *map(id, map(_DEFAULTS, functions))]


_CODE, _DEFAULTS = attrgetter("__code__"), attrgetter("__defaults__")


def _functions(inside: Mapping[str, Any]) -> dict[str, object]:
    """Functions of a module or class, those written in Python with their code, which can be exchanged."""
    return {
        name: (value, value.__code__, value.__defaults__) if type(value) is FunctionType else value
        for name, value in inside.items()
        if callable(value) or isinstance(value, _WRAPPERS)
    }


_WRAPPERS = (property, classmethod, staticmethod)


def _constants(inside: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in inside.items()
        if name.isupper() and isinstance(value, (bool, int, float, str, tuple, frozenset))
    }


def _parts(value: object) -> object:
    """What decides whether two values are the same."""
    return [id(part) for part in value] if isinstance(value, tuple) else id(value)


def _is_from_compiler(now: object) -> bool:
    """Whether it comes from torch.compile, which replaces some of torch's functions when it is first used."""
    code = now[1] if isinstance(now, tuple) and len(now) == 3 else None
    return isinstance(code, CodeType) and code.co_filename.startswith(_COMPILER)
