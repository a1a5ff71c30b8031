"""A report: one HTML file that answers, shows and holds every row of one run or several, and needs no network.

``parts/`` has its template, style sheet and scripts. Foreign text (labels, reasons, names of suites) gets into the page
in two ways only: as JSON that the scripts write by ``textContent``, and by a template that escapes.

Called, this package is :func:`attnbench.api.report`, for the reason that :mod:`attnbench.run` gives.
"""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("attnbench.api").report(*args, **options)

    @property
    def __signature__(self) -> Signature:
        return signature(import_module("attnbench.api").report)


sys.modules[__name__].__class__ = _Callable
