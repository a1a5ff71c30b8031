"""The pages of the documentation that are made from the code, at the moment when it is built.

Each file here makes one kind of page. Nothing that it writes is committed: see :data:`FOLDERS`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

FOLDERS = ("catalogue", "commands", "reference")
"""Below docs/; git ignores them."""


def makers() -> tuple[ModuleType, ...]:
    """The modules that make pages, each with a function ``pages``."""
    from generators import (
        catalogue,
        claims,
        columns,
        commands,
        engines,
        founding,
        laws,
        layers,
        python,
        runs,
        suites,
        tables,
    )

    return (catalogue, laws, claims, commands, suites, columns, tables, python, runs, layers, engines, founding)


def pages() -> Iterator[tuple[str, str]]:
    """Path below docs/ and text of every page."""
    for module in makers():
        yield from module.pages()


def write(docs: Path) -> None:
    """Write all pages, and remove those of an earlier time that are not made any more."""
    import torch

    torch.set_num_threads(1)  # small tensors: a second thread waits more than it works
    made = {docs / path: text for path, text in pages()}
    for folder in FOLDERS:
        for old in (docs / folder).rglob("*") if (docs / folder).exists() else ():
            if old.is_file() and old not in made:
                old.unlink()
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx reads again what is newer
            path.write_text(text, encoding="utf-8")


def remove(docs: Path) -> None:
    """Remove every folder of generated pages."""
    for folder in FOLDERS:
        shutil.rmtree(docs / folder, ignore_errors=True)
