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
    """All that should stay as it is, by module or class."""
    return dict(_homes())


def differing(now: Mapping[str, Home], before: Mapping[str, Home]) -> list[str]:
    """Names of what was replaced or removed, or now hides a built-in or inherited function."""
    return [
        f"{name}.{value}"
        for name, home in before.items()
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
    own = [(name, module) for name, module in list(sys.modules.items()) if name.startswith("attnbench.") and module]
    named = [value for _, module in own for value in list(vars(module).values()) if isinstance(value, ModuleType)]
    classes = {*_CLASSES, *(value for value in list(vars(torch.nn).values()) if isinstance(value, type))}
    for module in dict.fromkeys([*_MODULES, *named]):
        if not module.__name__.startswith("attnbench."):
            yield module.__name__, Home(_functions(module))
    for name, module in own:
        yield name, Home(_functions(module) | _constants(module))
        classes |= {part for part in list(vars(module).values()) if isinstance(part, type) and part.__module__ == name}
    for part in classes:
        yield f"{part.__module__}.{part.__qualname__}", Home(_functions(part), is_class=True)
    yield "sys.modules", Home({module.__name__: sys.modules.get(module.__name__) for module in _MODULES})


def _functions(home: Any) -> dict[str, object]:
    """Functions of a module or class, those written in Python with their code, which can be exchanged."""
    return {
        name: (value, value.__code__, value.__defaults__) if type(value) is FunctionType else value
        for name, value in dict(vars(home)).items()
        if callable(value) or isinstance(value, _WRAPPERS)
    }


_WRAPPERS = (property, classmethod, staticmethod)


def _constants(module: Any) -> dict[str, object]:
    return {
        name: value
        for name, value in dict(vars(module)).items()
        if name.isupper() and isinstance(value, (bool, int, float, str, tuple, frozenset))
    }


def _parts(value: object) -> object:
    """What decides whether two values are the same."""
    return [id(part) for part in value] if isinstance(value, tuple) else id(value)


def _is_from_compiler(now: object) -> bool:
    """Whether it comes from torch.compile, which replaces some of torch's functions when it is first used."""
    code = now[1] if isinstance(now, tuple) and len(now) == 3 else None
    return isinstance(code, CodeType) and code.co_filename.startswith(_COMPILER)
