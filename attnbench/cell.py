"""One thing to measure: a variant, a shape, an input, a level and a pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, Literal

from attnbench.shape import Shape
from attnbench.spec import Spec

Level = Literal["operator", "layer", "model"]
Pass = Literal["forward", "backward", "training", "decode"]
"""decode: the last token of the sequence against a state made of all tokens before it."""
Measure = Literal["time", "memory", "error", "score"]
Positions = Literal["learned", "sinusoid"]
"""What a position embedding starts from, N(0, 0.02²) or sinusoids of unit size; training changes both."""

METHOD_VERSION = 5
"""Incremented when a change in how we measure may change a number; rows of two methods are never mixed."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The encoder around the variant at ``level: model`` (width and heads come from the cell's shape)."""

    layers: int = 4
    ffn: int = 1024
    vocab: int = 256
    positions: Positions = "learned"
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained to be scored (see :mod:`attnbench.training`)."""

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
    """Number of points on the learning curve."""
    solved: float | None = None
    """Score that softmax must reach; if it fails, or identity is above chance, all rows of the task get a warning."""


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
    compile: bool = False
    """Whether ``torch.compile`` compiles it, all of it or nothing (see :mod:`attnbench.compiled`)."""
    padding: float = 0.0
    """Share of the batch's tokens that are padding (see :mod:`attnbench.padding`)."""
    task: Spec | None = None
    """What the model reads and answers (see :mod:`attnbench.task`), at level model only; None for random bytes."""
    training: Training | None = None
    """None unless the cell is scored."""

    def __post_init__(self) -> None:
        if self.pass_ == "decode" and not self.shape.causal:  # the tokens after the last one are not known yet
            object.__setattr__(self, "shape", replace(self.shape, causal=True))

    @property
    def cell_id(self) -> str:
        """Sixteen hex digits; the same on every machine and in every session."""
        return _identify(self)

    @property
    def label(self) -> str:
        """The text that ``-k`` matches and progress shows: ``performer:features=64/n4096``."""
        return f"{self.variant.label}/n{self.shape.N}"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cell:
        """Inverse of :meth:`to_json`, after a trip through JSON text."""
        data = dict(data)
        for key in ("variant", "inputs", "task"):
            if data.get(key) is not None:
                data[key] = Spec(data[key]["name"], tuple((k, v) for k, v in data[key]["options"]))
        data["shape"] = Shape(**data["shape"])
        data["measure"] = tuple(data["measure"])
        if data["model"] is not None:
            data["model"] = ModelSize(**data["model"])
        if data.get("training") is not None:
            data["training"] = Training(**data["training"])
        return cls(**data)


def _identify(cell: Cell) -> str:
    """Digest of the cell as JSON with sorted keys, put together from parts that most cells of a suite share."""
    import hashlib  # loads OpenSSL, so only here: a caller may only want to know what passes there are

    parts = ", ".join([_canonical(names, values_of(cell)) for names, values_of in _parts_of(cell)])
    return hashlib.sha256(f"[{METHOD_VERSION}, {{{parts}}}]".encode()).hexdigest()[:16]


@lru_cache(maxsize=100_000)
def _canonical(names: tuple[str, ...], values: Any) -> str:
    """Some fields and their values as JSON, without the braces around the object."""
    given = dict(zip(names, values if len(names) > 1 else (values,), strict=True))
    return _ENCODER.encode(given)[1:-1]


_ADDED_TO_PARTS = {"bias": "none", "positions": "learned", "dropout": 0.0}
"""Fields that were added to a part later -> what older cells mean by leaving them out, so that their ids stay."""


def _plain(part: Shape | Spec | ModelSize | Training) -> dict[str, Any]:
    data = {name: getattr(part, name) for name in part.__slots__}
    for name, before in _ADDED_TO_PARTS.items():
        if data.get(name) == before:
            del data[name]
    return data


_ENCODER = json.JSONEncoder(sort_keys=True, default=_plain)


def _parts(names: list[str]) -> list[tuple[tuple[str, ...], Callable[[Cell], Any]]]:
    """The fields in three parts, each with a getter of its values; the shape, which cells share least, is one part."""
    at = names.index("shape")
    parts = (names[:at], names[at : at + 1], names[at + 1 :])
    return [(tuple(part), attrgetter(*part)) for part in parts]


_NAMES = sorted(field.name for field in fields(Cell))
_LATER = {
    field.name: field.default for field in fields(Cell) if field.name in ("compile", "padding", "task", "training")
}
"""Fields that were added to cells later -> what older cells mean by leaving them out, so that their ids stay."""
_later = attrgetter(*_LATER)
_AS_BEFORE = tuple(_LATER.values())


def _parts_of(cell: Cell) -> list[tuple[tuple[str, ...], Callable[[Cell], Any]]]:
    values = _later(cell)
    if values == _AS_BEFORE:  # true of nearly all cells in large suites
        return _parts_without(tuple(_LATER))
    return _parts_without(tuple(name for name, value in zip(_LATER, values, strict=True) if value == _LATER[name]))


@cache
def _parts_without(left_out: tuple[str, ...]) -> list[tuple[tuple[str, ...], Callable[[Cell], Any]]]:
    return _parts([name for name in _NAMES if name not in left_out])
