"""The question of a swap: the variants, the layers, and the amount of training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnbench.contract.spec import Spec, comma_separated
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.swap.described import ModelFacts
from attnbench.results.swaps import EXACT, MEAN_VALUE
from attnbench.suite.cell import UNTOUCHED
from attnbench.suite.messages import CommandLine
from attnbench.suite.ranges import parse_range
from attnbench.suite.schema import Suite
from attnbench.text import quantity

_OPTIONS = {
    "seq_len": "--length",
    "batch": "--batch",
    "windows": "--windows",
    "tuned": "--steps",
    "learning_rate": "--lr",
    "redraw": "--redraw",
    "seed": "--seeds",
    "replaced": "--layers",
    "text": "--text",
}
_EACH = re.compile(r"each(?:/([1-9][0-9]{0,3}))?")


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The layers to replace, as after ``--layers``."""

    whole: bool = False
    """``all``: together, all that can be replaced."""
    each: int = 0
    some: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SwapQuestion:
    """A question about one model; ``attnbench swap --help`` says what each field means."""

    model: str
    variants: tuple[Spec, ...]
    layers: LayerChoice
    length: int
    text: str
    windows: int
    steps: tuple[int, ...]
    """In rising order."""
    learning_rate: float
    batch: int
    train: str
    redraw: int
    seeds: int

    @property
    def trains(self) -> bool:
        """True if weights of the model are trained, so that a control has to be trained as long."""
        return self.steps[-1] > 0 and self.train != "variant"

    def suite(self, model: ModelFacts) -> Suite:
        """A suite of up to three sweeps: softmax attention, which must change nothing; the variants in several layers
        together, and trained; the variants in one layer after the other. Raises UsageError, Unsupported."""
        self._refuse(model)
        variants = list(dict.fromkeys([MEAN_VALUE, *(spec.label for spec in self.variants)]))
        wanted, sweeps = self.layers, [self._sweep(EXACT, model, variant="sdpa")]
        together = "+".join(map(str, wanted.some)) or "all" * wanted.whole
        if together:
            trained = {"tuning": {"learning_rate": self.learning_rate, "redraw": self.redraw}} if self.steps[-1] else {}
            about = {
                "seed": list(range(self.seeds)),
                "variant": [*[UNTOUCHED] * self.trains, *variants],
                "replaced": together,
                "train": self.train,
                "tuned": list(self.steps),
            }
            sweeps.append({**self._sweep("together", model, **about), **trained})
        if wanted.each:
            sweeps.append(self._sweep("each", model, variant=variants, replaced=model.free[:: wanted.each]))
        return Suite.of({"name": "swap", "sweeps": sweeps}, CommandLine(options=_OPTIONS))

    def _sweep(self, name: str, model: ModelFacts, **axes: Any) -> dict[str, Any]:
        layer = model.layers[model.free[0]]
        sizes = {
            "seq_len": self.length,
            "batch": self.batch,
            "heads": layer.shape.H,
            "kv_heads": layer.shape.H // layer.sharing,
            "head_dim": layer.shape.D,
            "causal": layer.shape.causal,
        }
        about = {"name": name, "level": "pretrained", "measure": "loss", "model": self.model, "windows": self.windows}
        return {**about, **({"text": self.text} if self.text else {}), "matrix": {**axes, **sizes}}

    def _refuse(self, model: ModelFacts) -> None:
        layers = model.layers
        if model.most is not None and self.windows > model.most:
            raise UsageError(
                f"--windows {self.windows}: the part of the text that is held out has {model.most}; "
                "shorten --length or give a longer --text"
            )
        for place in self.layers.some:
            if place >= len(layers):
                raise UsageError(f"--layers {place}: the model has {quantity(len(layers), 'layer')}, counted from 0")
            if layers[place].kept:
                raise Unsupported(f"layer {place}: {layers[place].kept}")
        if not model.free:
            raise Unsupported(layers[0].kept)


def parse_layers(text: str) -> LayerChoice:
    """``all``, ``each``, ``each/5`` (every fifth), ``each,all``, or ``0,5``, which is layers 0 and 5 together. Raises
    UsageError: none of these."""
    words = comma_separated(text)
    numbers = [word for word in words if word.isdecimal()]
    each = [found for word in words if (found := _EACH.fullmatch(word))]
    unknown = [word for word in words if word not in ("all", *numbers) and not _EACH.fullmatch(word)]
    if unknown:
        raise UsageError(f"--layers {text!r}: {unknown[0]!r} is no layer; write all, each, or numbers such as 0,5")
    if "all" in words and numbers:
        raise UsageError(f"--layers {text!r}: all and {numbers[0]} exclude each other; write one of them")
    strides = {int(found[1] or 1) for found in each}
    if len(strides) > 1:
        raise UsageError(f"--layers {text!r}: {each[0][0]} and {each[1][0]} exclude each other; write one of them")
    return LayerChoice("all" in words, min(strides, default=0), tuple(sorted(set(map(int, numbers)))))


def parse_steps(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """``0,100`` -> the numbers of training steps after which a model is evaluated, in rising order; or UsageError."""
    try:
        return tuple(sorted(set(parse_range(given))))
    except UsageError as error:
        raise UsageError(f"--steps: {error}") from None
