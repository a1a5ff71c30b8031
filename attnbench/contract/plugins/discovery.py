"""Variants from elsewhere: entry points ``attnbench.variants``, files and modules named on the command line.

The imported code is recorded as part of a run's identity (:func:`provenance`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import EntryPoints, PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path

from attnbench.contract.plugins.foreign import home_of, module_name, told
from attnbench.errors import UsageError

GROUP, HUB = "attnbench.variants", "hub:"

_INSTALLED = ("site-packages", "dist-packages")
_OF_PYTHON = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[2])
_packages: dict[str, str] = {}
_modules: dict[str, Path] = {}
"""Files that plug-ins imported and no version identifies: neither installed, nor Python's, nor ours."""
_before: set[str] = set()


def provenance(sources: Sequence[str]) -> dict[str, str]:
    """The version of each plug-in package and the digest of each plug-in file, for ``sources`` as :func:`load` takes.

    The files of other plug-ins of this process count too, since any of them may have imported a module.
    """
    given = [Path(file_of(source)) for source in sources]
    own = {one.absolute() for one in given}
    files = [(one.name, one) for one in given] + [(name, file) for name, file in _modules.items() if file not in own]
    found = dict(_packages)
    for name, file in files:
        with suppress(OSError, ValueError):
            if file.is_file():  # two in different folders may have one name
                found[name] = found.get(name, "") + hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return dict(sorted(found.items()))


def libraries(sources: Sequence[str], *, trained: bool = False) -> dict[str, str]:
    """The version of each installed package that the plug-ins' own files import, and of the one that opens ``trained``
    models; without those that every run states."""
    own, imported = [Path(file_of(source)) for source in sources], set[str]()
    for file in own:  # which grows by the neighbours that they import
        for top in _imports(file):
            imported.add(top)
            own += [one for one in [file.with_name(f"{top}.py")] if one.is_file() and one not in own]
    imported -= {*sys.stdlib_module_names, *_STATED}
    owners = packages_distributions() if imported else {}
    names = {owner for top in imported for owner in owners.get(top, ())}
    names |= {"transformers"} if trained else set()
    found = {}
    for name in sorted(names):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


_STATED = ("attnbench", "torch", "numpy")


def _imports(file: Path) -> Iterator[str]:
    with suppress(OSError, SyntaxError, ValueError):  # a compiled one
        for node in ast.walk(ast.parse(file.read_bytes())):
            named = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            named += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            yield from (name.partition(".")[0] for name in named)


def files() -> set[Path]:
    """Files of the loaded plug-ins and of their imports, without those that a version identifies."""
    if _before:
        _modules.update(_own_files(sys.modules.keys() - _before))
    return set(_modules.values())


@cache
def is_versioned(file: str) -> bool:
    """True if a version identifies this file: it is installed, Python's, or ours."""
    path = Path(file)
    return any(part in _INSTALLED for part in path.parts) or any(map(path.is_relative_to, _OF_PYTHON))


def _own_files(names: Iterable[str], package: str = "") -> Iterator[tuple[str, Path]]:
    script = sys.modules["__main__"]  # which multiprocessing gives a second name
    for name in names:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file and module is not script and (name.partition(".")[0] == package or not is_versioned(str(file))):
            yield name, Path(file).absolute()


@contextmanager
def _noting_modules(package: str = "") -> Iterator[None]:
    before = set(sys.modules)
    _before.update(_before or before)
    try:
        yield
    finally:
        _modules.update(_own_files(sys.modules.keys() - before, package))


def with_modules(variants: Sequence[str], sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Variants and plug-ins; ``FILE.py:Class`` of a variant ``FILE.py:Class:dim=64`` becomes a plug-in."""
    names, more = [], dict[str, None]()
    for text in variants:
        file = file_of(text)
        name = text.removeprefix(f"{file}:") if file != text else text
        if file != text:
            more[f"{file}:{name.partition(':')[0]}"] = None
        names.append(name)
    return names, [*sources, *(source for source in more if source not in sources)]


def installed() -> EntryPoints:
    """The installed plug-ins; ``ATTNBENCH_PLUGINS=`` (empty) switches them off."""
    return EntryPoints() if os.environ.get("ATTNBENCH_PLUGINS") == "" else entry_points(group=GROUP)


def load_installed() -> None:
    """Import every installed plug-in once. Raises UsageError: a plug-in cannot be imported; the message names it."""
    for point in installed():
        if point.dist is not None:
            _packages[point.dist.name] = point.dist.version
        with told(f"{point.name!r} ({point.value})", "; uninstall it or set ATTNBENCH_PLUGINS="), _noting_modules():
            point.load()


def file_of(source: str) -> str:
    """The file of a plug-in: ``FILE.py`` of ``FILE.py:Class``; a module's name is unchanged."""
    file, found, _ = source.partition(".py:")
    return f"{file}.py" if found else source


def load(source: str) -> None:
    """Import ``FILE.py`` or a module, so that its ``@register`` lines take effect; a second call does nothing.

    ``FILE.py:Class`` makes a variant of the class as it is: :mod:`attnbench.contract.plugins.own_module`. A file may
    import its neighbours, and files below its package. ``hub:OWNER/NAME@VERSION`` is a kernel of the Hugging Face hub:
    :mod:`attnbench.contract.plugins.hub`. Raises UsageError if there is no such thing, or importing it raises or ends
    Python.
    """
    if source.startswith(HUB):
        from attnbench.contract.plugins.hub import register_kernel  # it needs torch

        with told(source):
            name, build = register_kernel(source.removeprefix(HUB))
        _packages[name] = build
        return
    if source != (file := file_of(source)):
        from attnbench.contract.plugins.own_module import register_module  # it needs torch

        load(file)
        register_module(source)
        return
    path = Path(source)
    if path.suffix != ".py":
        package = source.partition(".")[0]
        if not package.isidentifier() or (package not in sys.modules and importlib.util.find_spec(package) is None):
            raise UsageError(f"plug-in {source}: no installed module of this name; a file's name ends in .py")
        with told(source), _noting_modules(package):
            importlib.import_module(source)
        return
    if not path.is_file():
        raise UsageError(f"plug-in {source}: no such file")
    name = module_name(path)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for folder in dict.fromkeys([str(path.resolve().parent), str(home_of(path)[0])]):
        if folder not in sys.path:
            sys.path.append(folder)
    _refuse_namesakes(path)
    try:
        with told(source), _noting_modules():
            sys.modules[name] = module
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _refuse_namesakes(path: Path) -> None:
    """Refuse a file that would import another plug-in's neighbours in place of its own."""
    folder = path.resolve().parent
    for name, file in _modules.items():
        beside = folder / f"{name}.py"
        if (
            file.resolve() != beside
            and beside.is_file()
            and re.search(rf"\b{name}\b", path.read_text(errors="replace"))
        ):
            raise UsageError(f"plug-in {path}: {file} is loaded already, not {beside.name} beside it; rename one")
