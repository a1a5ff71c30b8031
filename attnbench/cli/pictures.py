"""Pictures that need no run, as ``attnbench plot`` draws them: which of its options mean something there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.cli import console
from attnbench.errors import CannotCreate, UsageError, did_you_mean
from attnbench.pictures import PICTURES

HELP = f"Or a picture that needs no run: {', '.join(PICTURES)}"
ONLY_PICTURES = ("layer", "head", "plugin")
"""Options of ``attnbench plot`` that mean nothing for runs."""


def asked_for(results: Sequence[Path] | None) -> str | None:
    """The name of the picture that the arguments begin with; None where they are runs. A file or folder comes first.

    Raises:
        UsageError: the first argument is neither, and much like a picture's name.
    """
    first = str(results[0]) if results else ""
    hint = did_you_mean(first, PICTURES)
    if not hint or Path(first).exists():
        return None
    if first not in PICTURES:
        raise UsageError(f"{first}: no such file or folder, and no picture{hint}")
    return first


def refuse_for_runs(options: Mapping[str, Any]) -> None:
    """Raise UsageError where an option is given that only pictures have."""
    for option in ONLY_PICTURES:
        if options.get(option) not in (None, []):
            raise UsageError(
                f"--{option} belongs to a picture that needs no run: attnbench plot weights performer --{option} ..."
            )


def draw_picture(
    name: str,
    of: Sequence[Path],
    *,
    formats: Sequence[str],
    out: Path | None,
    plugins: Sequence[str],
    options: Mapping[str, Any],
) -> None:
    """Draw one picture, write it, and say where.

    Raises:
        UsageError: an option that the picture does not have, or a variant or input that does not exist.
        Unsupported: a variant or an input cannot give it.
        StoreError: a file cannot be written.
    """
    from attnbench.pictures import write
    from attnbench.plugins import load

    folder = out or Path("plots")
    if out is None and folder.is_symlink():
        raise CannotCreate(f"{folder} is a link, and figures are never written through one; remove it or give --out")
    console.only_repeats()
    for source in plugins:
        load(source)
    written = write(name, folder, formats, [str(one) for one in of], **options)
    console.heading(f"{name}: {PICTURES[name]}")
    for file in written:
        console.line(f"  {file}")
