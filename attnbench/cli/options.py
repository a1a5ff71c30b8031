"""Type, bounds and help of the options that several commands share. Each command sets its own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for results.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run instead of resuming one.")]
Plugins = Annotated[list[str] | None, typer.Option(metavar="PLUGIN", help="FILE.py or module with further variants.")]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads; default all cores.")]
MemoryLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="8GiB, say; default 85 % of what is free.")]
ProcessState = Annotated[
    Literal["tuned", "as-shipped"], typer.Option(help="Allocator and matmul library: tuned, or as torch ships.")
]
Heads = Annotated[int, typer.Option(min=1, metavar="N", help="Heads H.")]
HeadDim = Annotated[int, typer.Option(min=1, metavar="N", help="Head width D.")]
Causal = Annotated[bool, typer.Option("--causal", help="Query i sees keys up to i.")]
