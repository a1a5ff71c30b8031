"""Module paths of the previews, for plug-ins that still import them; each warns, and goes after version 0.1."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

_PACKAGE = Path(__file__).parents[2]
_MOVED = {
    **{name: f"contract.{name}" for name in ("registry", "spec", "task", "traits", "variant")},
    **{name: f"contract.problem.{name}" for name in ("mask", "reference", "shape", "sink", "visible")},
    **{name: f"catalogue.{name}" for name in ("attention", "engines", "inputs", "tasks")},
    "cell": "suite.cell",
    "qkv": "contract.inputs",
    "testing": "laws",
}


class Aliases(MetaPathFinder, Loader):
    """Finds modules by the paths that they had."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        moved = package == "attnbench" and rest.partition(".")[0] in _MOVED
        return ModuleSpec(fullname, self, is_package=True) if moved else None

    def exec_module(self, module: ModuleType) -> None:
        first, *rest = module.__name__.split(".")[1:]
        families = (_PACKAGE / "catalogue/attention").glob(f"*/{rest[0]}*") if first == "attention" and rest else ()
        family = [file.parent.name for file in families if file.name in (rest[0], f"{rest[0]}.py")][:1]
        from attnbench.contract.variant import HOME, VARIANTS  # they bring pydantic, which a start need not wait for

        home = import_module(".".join(["attnbench", _MOVED[first], *family, *rest]))
        warnings.warn(f"{module.__name__} is {home.__name__} now, and goes after version 0.1", DeprecationWarning, 2)
        public: object = sys.modules["attnbench"]  # build was in variant
        if home.__name__ == HOME:  # which had all classes
            public = SimpleNamespace(**{one.make.__name__: one.make for one in VARIANTS})
        vars(module)["__getattr__"] = lambda name: getattr(home if hasattr(home, name) else public, name)


sys.meta_path.insert(0, Aliases())
