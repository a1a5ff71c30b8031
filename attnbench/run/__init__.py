"""Measuring suites and pairs. Called, this package is :func:`attnbench.api.run`: ``attnbench.run("quick")``.

The package and the function cannot both be the attribute ``run`` of :mod:`attnbench`: the winner would depend on the
order of imports.
"""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Measure every cell of a suite; see :func:`attnbench.api.run`."""
        return import_module("attnbench.api").run(*args, **options)

    @property
    def __signature__(self) -> Signature:
        return signature(import_module("attnbench.api").run)


sys.modules[__name__].__class__ = _Callable
