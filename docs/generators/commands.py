"""A page for every command: its help, as the command prints it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from attnbench.cli.usage import COMMANDS
from generators.markdown import page, table

WIDTH = 80


def pages() -> Iterator[tuple[str, str]]:
    """The overview, then the commands."""
    rows = [
        [f"[attnbench {name}]({name}.md)", one.what, f"`attnbench {one.example}`"] for name, one in COMMANDS.items()
    ]
    yield (
        "commands/index.md",
        page(
            "# The commands",
            "These pages show what `attnbench COMMAND --help` prints.",
            table(["command", "what it does", "example"], rows),
            "`attnbench --install-completion` teaches the shell names, axes and options. `attnbench --version` prints "
            "the version. The [exit codes](../reference/exit-codes.md) are the same for all commands.",
            ":::{toctree}\n:hidden:\n\n" + "\n".join(COMMANDS) + "\n:::",
        ),
    )
    for name, command in COMMANDS.items():
        yield f"commands/{name}.md", page(f"# attnbench {name}", command.what, f"```text\n{help_of(name)}```")


def help_of(name: str) -> str:
    """What ``attnbench NAME --help`` prints in 80 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", name, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
        check=True,
    )
    return done.stdout
