"""attnbench: which attention variant is faster, by how much, in how much memory, at what error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attnbench.machine  # noqa: F401  # counts the cores, before torch comes in and may leave this thread one of them

__version__ = "0.1.0"
__all__ = [
    "Shape",
    "build",
    "compare",
    "load_suite",
    "match",
    "plot",
    "read_results",
    "register",
    "report",
    "run",
    "swap",
]

if TYPE_CHECKING:
    from attnbench.api import compare, match, plot, report, run, swap
    from attnbench.plots.load import read_results
    from attnbench.shape import Shape
    from attnbench.suite.load import load_suite
    from attnbench.variant import build, register

_HOME = {
    "Shape": "attnbench.shape",
    "build": "attnbench.variant",
    "register": "attnbench.variant",
    "load_suite": "attnbench.suite.load",
    "read_results": "attnbench.plots.load",
    "compare": "attnbench.api",
    "match": "attnbench.api",
    "plot": "attnbench.api",
    "swap": "attnbench.api",
}


def __getattr__(name: str) -> Any:
    """Load on first use: ``attnbench --help`` must not pay for torch."""
    from importlib import import_module

    if name in ("report", "run", "testing"):
        return import_module(f"attnbench.{name}")  # packages, of which the first two can be called
    if name not in _HOME:
        raise AttributeError(f"module 'attnbench' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
