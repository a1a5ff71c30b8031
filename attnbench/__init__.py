"""attnbench: which attention variant is faster, by how much, in how much memory, at what error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attnbench.contract.plugins.aliases  # module paths of before, for plug-ins
import attnbench.measure.machine  # noqa: F401  # counts the cores, before torch comes in and may leave this thread one
from attnbench.version import __version__ as __version__

__all__ = [
    "Core",
    "Knob",
    "No",
    "Rounds",
    "Shape",
    "Traits",
    "Unsupported",
    "best",
    "board",
    "build",
    "cite",
    "compare",
    "history",
    "load_suite",
    "match",
    "plot",
    "read_results",
    "register",
    "report",
    "run",
    "submit",
    "swap",
]

if TYPE_CHECKING:
    from attnbench.answers.board.entries import submit
    from attnbench.answers.board.site import board
    from attnbench.api.functions import best, cite, compare, history, match, plot, report, run, swap
    from attnbench.catalogue.build import build
    from attnbench.contract.problem.shape import Shape
    from attnbench.contract.traits import Knob, No, Rounds, Traits
    from attnbench.contract.variant import Core, register
    from attnbench.errors import Unsupported
    from attnbench.results.read import read_results
    from attnbench.suite.load import load_suite

_HOME = {  # of all others attnbench.api.functions
    **dict.fromkeys(("Knob", "No", "Rounds", "Traits"), "contract.traits"),
    "Shape": "contract.problem.shape",
    "Unsupported": "errors",
    "board": "answers.board.site",
    "submit": "answers.board.entries",
    "build": "catalogue.build",
    **dict.fromkeys(("Core", "register"), "contract.variant"),
    "load_suite": "suite.load",
    "read_results": "results.read",
}


def __getattr__(name: str) -> Any:
    """Load on first use: ``attnbench --help`` must not pay for torch."""
    from importlib import import_module

    if name in ("laws", "testing"):
        return import_module("attnbench.laws")  # ``testing`` is its name in the previews
    if name not in __all__:
        raise AttributeError(f"module 'attnbench' has no attribute {name!r}")
    value = getattr(import_module(f"attnbench.{_HOME.get(name, 'api.functions')}"), name)
    globals()[name] = value
    return value
