"""Variants from elsewhere: entry points ``attnbench.variants``, files and modules named on the command line.

The code that they import is recorded, since it is part of a run's identity (:func:`provenance`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path

from attnbench.errors import UsageError
from attnbench.foreign import module_name, told
from attnbench.printable import without_home

GROUP = "attnbench.variants"

_INSTALLED = ("site-packages", "dist-packages")
_OF_PYTHON = (Path(sysconfig.get_path("stdlib")), Path(__file__).parent)
_packages: dict[str, str] = {}
"""Packages of the installed plug-ins -> their versions."""
_modules: dict[str, Path] = {}
"""Files that plug-ins imported and no version identifies: neither installed, nor Python's, nor ours."""


def provenance(sources: Sequence[str]) -> dict[str, str]:
    """What plug-ins' variants are made of: the version of each package, the digest of each file.

    Args:
        sources: what :func:`load` was called with, or will be. If this process has loaded other plug-ins as well,
            their files count too, since any of them may have imported a module.
    """
    files = {source: Path(file_of(source)) for source in sources} | _modules
    found = dict(_packages)
    for name, file in files.items():
        with suppress(OSError, ValueError):
            if file.is_file():
                found[without_home(name)] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return dict(sorted(found.items()))


@contextmanager
def _noting_modules(package: str = "") -> Iterator[None]:
    """Note the files that are imported in this context; those of ``package`` even if they are installed."""
    before = set(sys.modules)
    try:
        yield
    finally:
        script = sys.modules["__main__"]  # which multiprocessing gives a second name
        for name in (name for name in sys.modules.keys() - before if sys.modules[name] is not script):
            file = Path(getattr(sys.modules[name], "__file__", None) or "")
            installed = any(part in _INSTALLED for part in file.parts) and name.partition(".")[0] != package
            ours = any(file.is_relative_to(folder) for folder in _OF_PYTHON)
            if file.name and not installed and not ours:
                _modules[name] = file.absolute()


def with_modules(variants: Sequence[str], sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Variants and plug-ins, in which ``FILE.py:Class`` of a variant ``FILE.py:Class:dim=64`` is a plug-in."""
    names, more = [], dict[str, None]()
    for text in variants:
        file = file_of(text)
        name = text.removeprefix(f"{file}:") if file != text else text
        if file != text:
            more[f"{file}:{name.partition(':')[0]}"] = None
        names.append(name)
    return names, [*sources, *(source for source in more if source not in sources)]


def load_installed() -> None:
    """Import every installed plug-in once; ``ATTNBENCH_PLUGINS=`` (empty) switches them off.

    Raises:
        UsageError: a plug-in cannot be imported; the message names it.
    """
    if os.environ.get("ATTNBENCH_PLUGINS") == "":
        return
    for point in entry_points(group=GROUP):
        if point.dist is not None:
            _packages[point.dist.name] = point.dist.version
        with told(f"{point.name!r} ({point.value})", "; uninstall it or set ATTNBENCH_PLUGINS="), _noting_modules():
            point.load()


def file_of(source: str) -> str:
    """The file of a plug-in: ``FILE.py`` of ``FILE.py:Class``; a module stays what it is."""
    file, found, _ = source.partition(".py:")
    return f"{file}.py" if found else source


def load(source: str) -> None:
    """Import ``FILE.py`` or a module, so that its ``@register`` lines take effect; a second call does nothing.

    ``FILE.py:Class`` makes a variant of the class as it is: :mod:`attnbench.own_module`.

    Raises:
        UsageError: there is no such file, module or class, or importing it raises or ends Python.
    """
    if source != (file := file_of(source)):
        from attnbench.own_module import register_module  # it needs torch

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
    sys.modules[name] = module
    try:
        with told(source), _noting_modules():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
