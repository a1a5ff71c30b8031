"""One thing to measure: a variant, a shape, an input, a level and a pass."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.suite.axes import AXES, Architecture, Launch, Specs, StateDtype, Trained, before

if TYPE_CHECKING:
    from attnbench.contract.variant import Variant

Level = Literal["operator", "layer", "model", "pretrained"]
OF_TOKENS: tuple[Level, ...] = ("model", "pretrained")
"""Levels at which the measured model reads tokens."""
Pass = Literal["forward", "backward", "training", "decode", "stepwise", "generate"]
"""decode: the last token of the sequence, or the last ``new_tokens`` in one step, against a state made of all tokens
before. stepwise: all its tokens, one after the other. generate: a prompt of N tokens at once, then ``new_tokens`` more,
one after the other."""
STEPS: tuple[Pass, ...] = ("decode", "stepwise", "generate")
NEW_TOKENS = 32
Measure = Literal["time", "memory", "error", "own_error", "loss", "score"]
UNTOUCHED = "none"
"""The trained model as it is, in place of a variant, at level pretrained only."""
Positions = Literal["learned", "trained-sinusoid", "sinusoid", "rotary", "none"]
"""``learned`` and ``trained-sinusoid``: a position embedding that starts from N(0, 0.02²) or from sinusoids of unit
size, and that training changes. ``sinusoid``: sinusoids that stay as they are (Vaswani et al. 2017). ``rotary``: q and
k of every layer are turned by their places. ``none``: no positions."""

METHOD_VERSION = 5
"""Incremented when a change in how we measure may change a number; rows of two methods are never mixed."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The model around the variant at ``level: model`` (width and heads come from the cell's shape)."""

    layers: int = 4
    ffn: int = 1024
    vocab: int = 256
    positions: Positions = "learned"
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Training:
    """Rules for training a model that is scored (see :mod:`attnbench.harness.score`)."""

    steps: int = 300
    learning_rate: float = 2e-3
    warm_up: float = 0.1
    """Share of the steps in which the rate rises to ``learning_rate``; it then falls to 0 along a cosine."""
    weight_decay: float = 0.01
    protocol: Literal["fixed", "sweep"] = "fixed"
    """``sweep``: this is one of several rates; the one with the best validation score counts."""
    sweep_seeds: int = 2
    """Number of seeds that try each rate; later seeds are trained at the best rate alone."""
    pretrain_steps: int = 0
    """Number of earlier steps that fill in masked tokens of the task's own examples."""
    evaluations: int = 6
    solved: float | None = None
    """Score that softmax must reach; if it fails, or identity is above chance, all rows of the task get a warning."""
    guide: float = 0.0
    """Weight of the guided-attention loss, which keeps attention near the diagonal."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """The trained model in which the variant replaces the attention, at ``level: pretrained``."""

    name: str
    """``listops``, a folder, a .gguf file, or ``pypi:PACKAGE/FILE``."""
    text: str = ""
    """A file of text to read; empty for the model's own."""
    windows: int = 0
    """Held-out windows that measure its loss; 0 if it is not measured."""
    last: int = 0
    """Steps of its training after the swap, over which the learning rate rises and falls; 0 for none."""
    rate: float = 3e-4
    """The largest learning rate of that training."""
    redraw: int = 0
    """Steps after which a variant redraws its random features, if it can; 0 for never."""


def is_causal(causal: bool, architecture: Architecture, pass_: Pass) -> bool:
    """The causality of a cell for which a suite says ``causal``."""
    if architecture == "encoder-decoder":
        return False  # its decoder is causal in any case, its encoder and what lies between them never
    return causal or architecture == "decoder" or pass_ in STEPS  # the tokens after the last one are not known yet


def tokens_after(new_tokens: int, pass_: Pass) -> int:
    """The new tokens of a cell for which a suite says ``new_tokens``."""
    return NEW_TOKENS if pass_ == "generate" and not new_tokens else new_tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """Everything that decides a measurement; two equal cells measure the same thing."""

    suite: str
    sweep: str
    variant: Spec
    shape: Shape
    level: Level = "operator"
    pass_: Pass = "forward"
    dtype: str = "float32"
    device: str = "cpu"
    inputs: Spec = Spec("gaussian")
    seed: int = 0
    measure: tuple[Measure, ...] = ("time", "memory")
    model: ModelSize | None = None
    error_draws: int = 5
    fit: int = 0
    """Steps by which a variant's parameters are fitted to the exact output before its error (see
    :mod:`attnbench.laws.exact_error`)."""
    compile: bool = False
    """True if ``torch.compile`` compiles all of it (see :mod:`attnbench.contract.compiled`)."""
    launch: Launch = "auto"
    """``eager``: Python starts each kernel. ``graph``: a CUDA graph holds all of them. ``auto``: a graph on CUDA where
    that is possible."""
    padding: float = 0.0
    """Share of the batch's tokens that are padding (see :mod:`attnbench.contract.problem.padding`)."""
    new_tokens: int = 0
    """Tokens that pass generate takes one after the other, behind the prompt; left at 0, they are :data:`NEW_TOKENS`.
    Tokens that pass decode takes in one step, the last of the sequence; 0 for one. 0 in other passes."""
    kept_prefix: int = 0
    """First tokens of the prompt of pass generate whose state is made once, before all calls."""
    state_dtype: StateDtype = "auto"
    """The dtype of a recurrent state between the steps of decoding (see
    :class:`attnbench.catalogue.engines.decoding.drafts.NarrowState`); auto: that of the variant's sums."""
    architecture: Architecture = "encoder"
    """The kind of model, at level model only (see :mod:`attnbench.models.encoder` and
    :mod:`attnbench.models.decoder`)."""
    positions: Positions | None = None
    """The source of a layer's positions: None for none, or ``rotary``. For a model the value moves to :attr:`model`."""
    task: Spec | None = None
    """The task (see :mod:`attnbench.contract.task`), at level model only; None for random bytes."""
    test_len: int | None = None
    """Length of the examples that a trained model is tested on; None for that of its training."""
    training: Training | None = None
    pretrained: Pretrained | None = None
    replaced: str = "all"
    """Layers of the trained model whose attention gives way to the variant: ``all`` that can, ``3``, or ``0+5``."""
    tuned: int = 0
    """Steps of training after the swap, of the :attr:`Pretrained.last` steps of its schedule."""
    train: Trained = "all"
    """The parameters that this training changes: all of them; those of the attention layers and the variant; or the
    variant's own, which are fitted layer by layer to the untouched layer's output."""

    def __post_init__(self) -> None:
        causal = is_causal(self.shape.causal, self.architecture, self.pass_)
        if causal is not self.shape.causal:
            object.__setattr__(self, "shape", replace(self.shape, causal=causal))
        object.__setattr__(self, "new_tokens", tokens_after(self.new_tokens, self.pass_))
        if self.positions is not None:
            self._move_positions(self.positions)
        if self.pretrained is None or not self.pretrained.last:
            object.__setattr__(self, "train", "all")  # where nothing is trained, it has no meaning

    def _move_positions(self, positions: Positions) -> None:
        if self.level == "model":
            size = self.model or ModelSize()
            if positions != size.positions:
                object.__setattr__(self, "model", replace(size, positions=positions))
        if self.level == "model" or positions == "none":
            object.__setattr__(self, "positions", None)

    @property
    def entry(self) -> Variant:
        """The entry that its level measures; at level operator the core of a mixer that has one. Raises UsageError:
        there is no such variant."""
        from attnbench.contract.variant import VARIANTS  # not for a command's help

        return VARIANTS.get(self.variant.name).at(self.level)

    @property
    def cell_id(self) -> str:
        """Sixteen hex digits; the same on every machine and in every session."""
        return _identify(self)

    @property
    def whole_shape(self) -> Shape:
        """The shape with the tokens that are generated: prompt and new tokens are one sequence."""
        if self.pass_ != "generate":
            return self.shape
        return replace(self.shape, seq_len=self.shape.N + self.new_tokens, kv_len=None)

    @property
    def label(self) -> str:
        """The text that ``-k`` matches and progress shows: ``performer:features=64/n4096``."""
        return f"{self.variant.label}/n{self.shape.N}"

    @property
    def whole_training(self) -> Cell:
        """The cell that stands for all that are tests of one training, at whatever length."""
        return self if self.test_len is None else replace(self, test_len=None)

    def at(self, axis: str) -> Any:
        """The value of an axis as a suite gives it; None for an axis of trainings if nothing is trained."""
        if axis == "positions" and self.level == "model":
            return (self.model or ModelSize()).positions
        owner = {"cell": self, "shape": self.shape, "training": self.training}[AXES[axis].of]
        return None if owner is None else getattr(owner, axis)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        data = dict(data)
        for key, axis in AXES.items():
            if isinstance(axis.values, Specs) and data.get(key) is not None:
                data[key] = Spec(data[key]["name"], tuple((k, v) for k, v in data[key]["options"]))
        data["shape"] = Shape(**data["shape"])
        data["measure"] = tuple(data["measure"])
        if data["model"] is not None:
            data["model"] = ModelSize(**data["model"])
        if data.get("training") is not None:
            data["training"] = Training(**data["training"])
        if data.get("pretrained") is not None:
            data["pretrained"] = Pretrained(**data["pretrained"])
        return cls(**data)


_LATER = {**before("cell"), "training": None, "fit": 0, "pretrained": None}
"""Fields that were added to cells later -> the meaning of their absence in older cells, so that ids stay."""
_LATER_IN_PARTS = {
    **before("shape"),
    "positions": "learned",
    "dropout": 0.0,
    "guide": 0.0,
    "last": 0,
    "rate": 3e-4,
    "redraw": 0,
}
"""The same for fields of shapes, models and trainings."""


@lru_cache(maxsize=100_000)
def _identify(cell: Cell) -> str:
    import hashlib  # not for whoever only asks what passes there are: it loads OpenSSL

    given = {field.name: getattr(cell, field.name) for field in fields(cell)}
    identity = [METHOD_VERSION, _without(given, _LATER)]
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=_plain).encode()).hexdigest()[:16]


def _plain(part: Shape | Spec | ModelSize | Training | Pretrained) -> dict[str, Any]:
    return _without({name: getattr(part, name) for name in part.__slots__}, _LATER_IN_PARTS)


def _without(given: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in before or value != before[name]}
