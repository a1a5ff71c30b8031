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
        bits,
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

    return (catalogue, laws, bits, claims, commands, suites, columns, tables, python, runs, layers, engines, founding)


def pages() -> Iterator[tuple[str, str]]:
    """Path below docs/ and text of every page."""
    for module in makers():
        yield from module.pages()


SOURCES = {
    "attnbench": "reference/modules.md",
    "attnbench/answers/claims/claims.yaml": "reference/claims.md",
    "attnbench/api": "reference/python.md",
    "attnbench/catalogue/attention": "catalogue/index.md",
    "attnbench/catalogue/engines/__init__.py": "reference/engines.md",
    "attnbench/catalogue/inputs": "reference/inputs.md",
    "attnbench/catalogue/tasks": "reference/tasks.md",
    "attnbench/cli": "commands/index.md",
    "attnbench/contract/traits.py": "reference/python.md",
    "attnbench/contract/variant.py": "reference/contract.md",
    "attnbench/errors.py": "reference/exit-codes.md",
    "attnbench/laws": "reference/laws.md",
    "attnbench/results/record.py": "reference/columns.md",
    "attnbench/suite/schema.py": "reference/suite-keys.md",
    "docs/data/bits.csv": "reference/bits.md",
    "docs/generators/founding.yaml": "reference/founding.md",
    "suites": "reference/suites.md",
    **{f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")},
}


def pages_of_sources() -> dict[str, str]:
    """A file or folder of the repository -> the page below docs/ that is made from it, or shows it.

    Written pages link to the first, which a reader of the repository has; the site links to the second.
    """
    from attnbench.cli.usage import COMMANDS
    from generators.catalogue import shipped
    from generators.reference_rows import RUNS

    variants = {f"{one.make.__module__.replace('.', '/')}.py": f"catalogue/{one.name}.md" for one in shipped()}
    commands = {f"attnbench/cli/{name}.py": f"commands/{name}.md" for name in COMMANDS}
    runs = {f"results/reference/{run.name}": f"reference/runs.md#{run.name}" for run in RUNS.iterdir()}
    return SOURCES | variants | commands | runs


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
