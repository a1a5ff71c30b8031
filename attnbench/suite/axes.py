"""The axes of a suite, in one table.

From one row follow the key of a matrix and of ``exclude``, the default, the override by ``--set``, the values that a
cell's id leaves out and that older results lack, the words of a caption, and which rows may share a figure.
CONTRIBUTING.md says how to add an axis; ``tests/suite/test_axes.py`` names all that is still missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from attnbench.contract.problem.shape import BIASES, SINKS, Shape
from attnbench.contract.spec import Spec
from attnbench.errors import any_of

DTYPES = ("float64", "float32", "bfloat16", "float16")
StateDtype = Literal["auto", "float32", "bfloat16", "float16"]
Architecture = Literal["encoder", "decoder", "encoder-decoder"]
"""encoder: reads a sequence. decoder: answers each token with the next one. encoder-decoder: a decoder that also reads
the output of an encoder for another sequence."""
Launch = Literal["auto", "eager", "graph"]
"""The way in which timed calls reach a GPU (see :mod:`attnbench.harness.inside.launch`)."""
POSITIONS = ("none", "learned", "trained-sinusoid", "sinusoid", "rotary")
Trained = Literal["all", "attention", "variant"]


class _Values:
    """The values of an axis; :mod:`attnbench.suite.axis_values` checks each kind."""

    __slots__ = ()
    condition: ClassVar[str]
    """Its meaning in a row of ``exclude``."""

    def in_words(self, name: str, value: object) -> str:
        return f"no {name}" if value == "none" else f"{name.replace('_', ' ')} {value}"


@dataclass(frozen=True, slots=True)
class Whole(_Values):
    """Whole numbers from ``low`` to ``high``, written as numbers or ranges."""

    low: int
    high: int
    condition = "a number, '>=8' or a range"


@dataclass(frozen=True, slots=True)
class Words(_Values):
    """A few words. ``none`` may be written without quotes, although it is nothing in YAML."""

    known: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Specs(_Values):
    """Names with options, out of a registry."""

    kind: Literal["variant", "input", "task"]
    condition = "name, or name and all options that are not the default"

    def in_words(self, name: str, value: object) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag(_Values):
    """True or false."""

    condition = "true or false"

    def in_words(self, name: str, value: object) -> str:
        return name if value else f"not {name}"


@dataclass(frozen=True, slots=True)
class Masks(_Values):
    """Masks of pairs (:mod:`attnbench.contract.problem.mask`), ``none`` with or without quotes."""

    condition = "one mask or several"


@dataclass(frozen=True, slots=True)
class Layers(_Values):
    """Layers of a trained model: ``all``, a number, or several together, ``0+5``."""

    condition = "all, a layer such as 3, or several together: 0+5"


@dataclass(frozen=True, slots=True)
class Share(_Values):
    """At least 0 and below 1."""

    condition = "one share or several"


@dataclass(frozen=True, slots=True)
class Rate(_Values):
    """Above 0 and at most 1."""

    condition = "one rate or several"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a sweep."""

    name: str
    """Key in a suite, name of its field, column of the results."""
    values: Whole | Words | Specs | Flag | Masks | Layers | Share | Rate
    of: Literal["cell", "shape", "training"]
    """The owner of a field of this name: the cell, its shape or its training."""
    help: str
    """Its text in the schema of a suite."""
    condition: str = ""
    """The same in a row of ``exclude``, if the text for its kind of values says too little; for words these."""
    default: Any = None
    """That of the shape for an axis of shapes."""
    required: bool = False
    same_as: str = ""
    """The axis whose value ``null`` stands for, which is then the default."""
    plus: str = ""
    """An axis that is added to that value."""
    only: Literal[
        "", "operator", "cross", "layer", "model", "task", "score", "prompt", "generate", "steps", "pretrained"
    ] = ""
    """The scope in which it has a meaning: everywhere, level operator, two sequences, layers, models, models with a
    task, scored cells, pass generate, passes generate and decode, all passes of decoding, level pretrained.
    """
    added: bool = False
    """True if older cells and rows lack it; these have the default, and a cell with the default keeps its id."""
    alike: bool = True
    """True if the rows of one series in a figure agree in it."""
    of_model: bool = True
    """True if two models that differ in it are two models."""
    usual: Any = None
    """The usual value, if the default follows from the level; captions leave it out, as they do a default."""
    asked: int = 5
    """Rank in captions: settings are told apart by the axes with the least number first."""
    words: Callable[[Any], str] | None = None
    """Puts a value in the words of a caption, if those of its kind of values say too little."""

    def __post_init__(self) -> None:
        if self.of == "shape" and not self.required:
            object.__setattr__(self, "default", getattr(_PLAIN, self.name))
        if isinstance(self.values, Words) and not self.condition:
            object.__setattr__(self, "condition", any_of(self.values.known))

    def in_words(self, value: object) -> str:
        """``causal``, ``4 heads``, ``bfloat16``."""
        return self.words(value) if self.words else self.values.in_words(self.name, value)

    def unsaid(self, value: object) -> bool:
        return value in (self.default, self.usual)


def _heads(count: float) -> str:
    return f"{count:.0f} head{'' if count == 1 else 's'}"


_SIZE = Whole(1, 2**20)
_LENGTH = Whole(1, 2**30)  # beyond any device; keeps products of sizes printable
_PLAIN = Shape()

_TABLE = (
    Axis(
        "variant",
        Specs("variant"),
        "cell",
        "performer:features=64 or {name: performer, features: 64}",
        required=True,
        alike=False,
    ),
    Axis(
        "seq_len",
        _LENGTH,
        "shape",
        "N: 1024, 16k, 1024..16384 (doubling), 1024..4096+1024 (steps)",
        "1024, '>=65536' or a range",
        required=True,
        alike=False,
        words=lambda n: f"n = {n:.0f}",
    ),
    Axis(
        "kv_len",
        _LENGTH,
        "shape",
        "M; null means q_start + N (level operator, and what an encoder-decoder reads)",
        "compares M, which is q_start + N where kv_len is null",
        same_as="seq_len",
        plus="q_start",
        only="cross",
        alike=False,  # it may grow with the length
        words=lambda keys: f"{keys} keys" if keys else "as many keys",
    ),
    Axis(
        "q_start",
        Whole(0, 2**30),
        "shape",
        "place of the first query among the keys, where causality or a mask asks for places (operator level only)",
        "place of the first query: a number, '>=8' or a range",
        only="operator",
        added=True,
        asked=2,
        words=lambda place: f"queries from place {place:.0f} on" if place else "queries from the first key on",
    ),
    Axis(
        "heads",
        _SIZE,
        "shape",
        "H",
        "H: a number, '>=8' or a range",
        asked=3,
        words=_heads,
    ),
    Axis(
        "kv_heads",
        _SIZE,
        "shape",
        "K, heads of keys and values, which divides H; null means H",
        "compares K, which is H where kv_heads is null",
        same_as="heads",
        added=True,
        asked=3,
        words=lambda heads: f"{_heads(heads)} of keys and values" if heads else "as many heads of keys and values",
    ),
    Axis(
        "qk_heads",
        _SIZE,
        "shape",
        "Q, heads of queries and keys, which divides H, for operators that read gates; null means H",
        "compares Q, which is H where qk_heads is null",
        same_as="heads",
        only="operator",
        added=True,
        asked=3,
        words=lambda heads: f"{_heads(heads)} of queries and keys" if heads else "as many heads of queries and keys",
    ),
    Axis(
        "head_dim",
        _SIZE,
        "shape",
        "D",
        "D: a number, '>=64' or a range",
        asked=2,
        words=lambda width: f"head width {width}",
    ),
    Axis(
        "v_dim",
        _SIZE,
        "shape",
        "E, width of a value and of an output; null means D",
        "compares E, which is D where v_dim is null",
        same_as="head_dim",
        added=True,
        asked=3,
        words=lambda width: f"values {width:.0f} wide" if width else "values as wide",
    ),
    Axis("batch", _SIZE, "shape", "B", "B: a number, '>=8' or a range", of_model=False, asked=4),
    Axis(
        "dtype",
        Words(DTYPES),
        "cell",
        "element type of q, k and v",
        "element type",
        default="float32",
        asked=0,
        words=str,
    ),
    Axis("causal", Flag(), "shape", "query i sees keys j <= i only", asked=1),
    Axis(
        "mask",
        Masks(),
        "shape",
        "pairs that are hidden: none, causal, prefix:64, document:300+200, document:ragged, padded:ragged, sliding:128",
        "none, prefix:64, document:300+200, padded:ragged or sliding:128, as written in the matrix",
        added=True,
        asked=1,
    ),
    Axis(
        "bias",
        Words(BIASES),
        "shape",
        "added to the logits by distance: none, alibi or relative",
        added=True,
        asked=1,
    ),
    Axis(
        "sink",
        Words(SINKS),
        "shape",
        "a logit of each head without a key, which takes weight and gives nothing: none or learned",
        added=True,
        asked=1,
    ),
    Axis(
        "compile",
        Flag(),
        "cell",
        "by torch.compile, all of it or nothing",
        default=False,
        added=True,
        of_model=False,
        words=lambda on: "compiled" if on else "not compiled",
    ),
    Axis(
        "launch",
        Words(get_args(Launch)),
        "cell",
        "on CUDA: eager, from Python, or graph, all kernels at once; auto: graph where that is possible",
        default="auto",
        added=True,
        of_model=False,
        words=lambda how: f"launch: {how}",
    ),
    Axis(
        "padding",
        Share(),
        "cell",
        "share of the batch's tokens that are padding: 0, 0.5; decode: the sequences have these unequal lengths",
        "share of padding: 0, 0.5",
        default=0.0,
        added=True,
        asked=1,
        words=lambda share: f"{share:.0%} padding" if share else "no padding",
    ),
    Axis(
        "new_tokens",
        Whole(0, 2**20),
        "cell",
        "generate: tokens behind a prompt of seq_len, 0 means 32; decode: the last of seq_len, in one step, 0 means 1",
        "tokens generated, or taken in one step: a number, '>=8' or a range",
        default=0,
        only="generate",
        added=True,
        asked=2,
        words=lambda count: f"{count:.0f} new token{'' if count == 1 else 's'}" if count else "no new tokens",
    ),
    Axis(
        "kept_prefix",
        Whole(0, 2**30),
        "cell",
        "first tokens of a prompt whose state is there before the call, as in prefix caching",
        "first tokens of a prompt whose state is kept: a number, '>=8' or a range",
        default=0,
        only="prompt",
        added=True,
        asked=2,
        words=lambda count: f"{count:.0f} tokens kept of the prompt" if count else "no prefix kept",
    ),
    Axis(
        "state_dtype",
        Words(get_args(StateDtype)),
        "cell",
        "element type of a recurrent state between the steps of decoding; auto: that of the variant's sums",
        default="auto",
        only="steps",
        added=True,
        asked=1,
        words=lambda kind: "state as wide as its sums" if kind == "auto" else f"{kind} state",
    ),
    Axis(
        "inputs",
        Specs("input"),
        "cell",
        "where q, k and v come from (operator level only)",
        default=Spec("gaussian"),
        only="operator",
        alike=False,  # a figure of errors has a series for each
    ),
    Axis(
        "added_tokens",
        Whole(0, 2**20),
        "shape",
        "learned tokens in front of each layer's input (level layer or model)",
        "a number, '>=8' or a range",
        only="layer",
        added=True,
        words=lambda count: f"{count:.0f} added token{'' if count == 1 else 's'}" if count else "no added tokens",
    ),
    Axis(
        "query_stride",
        _SIZE,
        "shape",
        "tokens for which a layer has one query, so that its output is shorter (level layer or model)",
        "a number, '>=2' or a range",
        only="layer",
        added=True,
        words=lambda stride: f"one query for {stride:.0f} token{'' if stride == 1 else 's'}",
    ),
    Axis(
        "architecture",
        Words(get_args(Architecture)),
        "cell",
        "encoder, decoder, or encoder-decoder, which reads kv_len tokens and writes seq_len (model level only)",
        default="encoder",
        only="model",
        added=True,
        asked=1,
        words=str,
    ),
    Axis(
        "positions",
        Words(POSITIONS),
        "cell",
        "where tokens have their places from: none or rotary in a layer, also the others in a model",
        only="layer",
        added=True,
        usual="learned",
        asked=1,
        words=lambda kind: "no positions" if kind == "none" else f"{kind or 'unknown'} positions",
    ),
    Axis(
        "task",
        Specs("task"),
        "cell",
        "what the model reads and answers (model level only)",
        only="task",
        added=True,
        alike=False,
    ),
    Axis(
        "test_len",
        _LENGTH,
        "cell",
        "length of the sequences that a model is tested on; null means seq_len, at which it is trained (measure: score "
        "only)",
        "compares the tested length, which is seq_len where test_len is null",
        same_as="seq_len",
        only="score",
        added=True,
        alike=False,  # it may grow with the length
        asked=1,
        words=lambda n: f"tested at n = {n:.0f}" if n else "tested at that length",
    ),
    Axis(
        "learning_rate",
        Rate(),
        "training",
        "several: the best one counts (measure: score only)",
        default=2e-3,
        only="score",
        alike=False,  # of several the best one counts
        words=lambda rate: "one rate a variant" if rate is None or rate != rate else f"rate {rate:g}",
    ),
    Axis(
        "replaced",
        Layers(),
        "cell",
        "layers whose attention gives way to the variant: all that can, a number from 0, or several together: 0+5",
        default="all",
        only="pretrained",
        added=True,
        asked=2,
        words=lambda which: "all layers" if which == "all" else f"layer {str(which).replace('+', ', ')} alone",
    ),
    Axis(
        "tuned",
        Whole(0, 10**6),
        "cell",
        "steps of training after the swap; the largest number of a sweep is that of its training",
        "steps of training after the swap: a number, '>=50' or a range",
        default=0,
        only="pretrained",
        added=True,
        asked=1,
        words=lambda count: f"tuned for {count:.0f} step{'' if count == 1 else 's'}" if count else "not tuned",
    ),
    Axis(
        "train",
        Words(get_args(Trained)),
        "cell",
        "what this training changes: all, attention (its layers and the variant) or the variant's own parameters",
        default="all",
        only="pretrained",
        added=True,
        asked=2,
        words=lambda what: f"trained: {what}",
    ),
    Axis(
        "seed",
        Whole(0, 2**63 - 1),
        "cell",
        "seed of inputs, random projections and initial weights",
        default=0,
        of_model=False,
        asked=9,
    ),
)

AXES: Mapping[str, Axis] = {axis.name: axis for axis in _TABLE}
"""Name -> axis, in the order in which a suite's schema shows them."""
ALIKE = tuple(axis.name for axis in sorted(_TABLE, key=lambda axis: axis.asked) if axis.alike)
"""Axes in which the rows of one series agree, with those that readers ask about first in front."""
OF_MODEL = tuple(name for name in ALIKE if AXES[name].of_model)
"""Axes of ``ALIKE`` that are the same in all trainings of one model."""
IN_ROWS = tuple(axis.name for axis in _TABLE if not axis.required and axis.only not in ("task", "score", "pretrained"))
"""Axes that tell the rows of one variant and length apart, without those of trainings and of trained models."""
OF_SWAPS = tuple(axis.name for axis in _TABLE if axis.only == "pretrained")
"""Axes that tell the rows of trained models apart."""
FOLLOWING: Mapping[str, str] = {axis.name: axis.same_as for axis in _TABLE if axis.same_as}
"""Axis -> the axis whose value it has unless it says otherwise: as many keys as queries."""


OF_PRETRAINED = (
    *("variant", "seq_len", "heads", "kv_heads", "head_dim", "batch", "dtype", "causal", "seed"),
    *("replaced", "tuned", "train"),
)
"""Axes at level pretrained; the others are the trained model's own."""
_LEVELS = {
    "operator": ("operator",),
    "layer": ("layer", "model"),
    "model": ("model",),
    "task": ("model",),
    "pretrained": (),
}
"""Part of the models in which an axis has a meaning -> the levels with that part."""


def exists(name: str, level: str) -> bool:
    """True if a level has this axis or column: an operator has no architecture."""
    if level == "pretrained" and name in AXES:
        return name in OF_PRETRAINED
    only = AXES[name].only if name in AXES else ""
    return only not in _LEVELS or level in _LEVELS[only]


def names_of(owner: Literal["cell", "shape", "training"]) -> tuple[str, ...]:
    """The axes that are fields of a cell, of its shape or of its training."""
    return tuple(axis.name for axis in _TABLE if axis.of == owner)


def before(owner: Literal["cell", "shape"]) -> dict[str, Any]:
    """Axes that cells and rows did not have at first -> what leaving them out means."""
    return {axis.name: axis.default for axis in _TABLE if axis.added and axis.of == owner}


def defaults() -> dict[str, Any]:
    """Every axis with its default; None for those that a matrix must name."""
    return {axis.name: axis.default for axis in _TABLE}


def filled(at: Mapping[str, Any]) -> dict[str, Any]:
    """Values by axis, with null replaced by the value that it stands for, such as the number of keys."""
    return {**at, **{name: _stood_for(name, at) for name in FOLLOWING if at[name] is None}}


def shortened(at: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`filled`: the same value has one form."""
    return {**at, **{name: None for name in FOLLOWING if at[name] == _stood_for(name, at)}}


def _stood_for(name: str, at: Mapping[str, Any]) -> Any:
    more = AXES[name].plus
    return at[AXES[name].same_as] + at[more] if more else at[AXES[name].same_as]
