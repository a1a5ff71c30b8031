"""The question of a swap: the variants, the layers, and the amount of training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnbench.contract.spec import Spec, comma_separated
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.swap.tune import Rules
from attnbench.measure.statistics import FEWEST
from attnbench.models.pretrained.subject import Layer

NONE, EXACT, MEAN_VALUE = "none", "exact", "mean-value"
"""Labels of the rows that every swap has: nothing replaced, but trained as long; softmax attention in place of the
variants, which must change nothing; and the mean of the values, which attends to nothing.
"""
MOST_STEPS = 1_000_000
_EACH = re.compile(r"each(?:/([1-9][0-9]{0,3}))?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The layers to replace, as after ``--layers``."""

    whole: bool = False
    """``all``: together, all that can be replaced."""
    each: int = 0
    some: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one model."""

    variants: tuple[Spec, ...]
    layers: Wanted
    windows: int
    """Number of held-out windows to evaluate on."""
    rules: Rules
    """Rules of training; the seed is that of the first of several."""
    seeds: int = 1
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Entry:
    """One visit: a variant in some layers, trained with one seed, evaluated at some numbers of steps."""

    label: str
    variant: Spec | None
    """None: nothing is replaced."""
    layers: tuple[int, ...]
    named: str
    """The layers as rows name them: ``all``, ``0,5``, ``only 3``, ``none``; a bare number is a layer of ``each``."""
    rules: Rules

    @property
    def key(self) -> tuple[str, str, int]:
        return self.label, self.named, self.rules.seed


def parse_layers(text: str) -> Wanted:
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
    return Wanted("all" in words, min(strides, default=0), tuple(sorted(set(map(int, numbers)))))


def parse_steps(text: str) -> tuple[int, ...]:
    """``0,100`` -> the numbers of training steps after which a model is evaluated, in rising order. Raises UsageError:
    not whole numbers from 0 to :data:`MOST_STEPS`."""
    words = comma_separated(text)
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise UsageError(f"--steps {text!r}: not numbers of steps; write for instance --steps 0,100")
    steps = tuple(sorted(set(map(int, words))))
    if steps[-1] > MOST_STEPS:
        raise UsageError(f"--steps must be at most {MOST_STEPS}, got {steps[-1]}; change the number")
    return steps


def named_together(layers: Sequence[int]) -> str:
    """``0,5``; a single layer is ``only 3``, since ``3`` is a layer of ``each``."""
    return f"only {layers[0]}" if len(layers) == 1 else ",".join(map(str, layers))


def refuse(question: Question, layers: Sequence[Layer], most: int | None) -> None:
    """Refuse impossible questions before a model is trained; ``most`` windows can be held out, None if endless.

    Raises UsageError: too few windows for an interval, more than there are, or a layer that does not exist. Raises
    Unsupported: a layer that was named, or every layer, has to stay as it is.
    """
    if question.windows < FEWEST:
        raise UsageError(
            f"--windows {question.windows}: below {FEWEST} no interval of the median exists; take {FEWEST} or more"
        )
    if most is not None and question.windows > most:
        raise UsageError(
            f"--windows {question.windows}: the part of the text that is held out has {most}; "
            "shorten --length or give a longer --text"
        )
    for place in question.layers.some:
        if place >= len(layers):
            raise UsageError(f"--layers {place}: the model has {len(layers)} layers, counted from 0")
        if layers[place].kept:
            raise Unsupported(f"layer {place}: {layers[place].kept}")
    if all(layer.kept for layer in layers):
        raise Unsupported(layers[0].kept)


def entries(question: Question, layers: Sequence[Layer]) -> list[Entry]:
    """All visits in their order: the exact one, which must change nothing, then the control, then the variants."""
    free = tuple(place for place, layer in enumerate(layers) if not layer.kept)
    rules, wanted = question.rules, question.layers
    variants = {MEAN_VALUE: Spec(MEAN_VALUE)} | {spec.label: spec for spec in question.variants}
    untrained = replace(rules, steps=(0,))
    trains = max(rules.steps) > 0 and rules.what != "variant"
    together = [("all", free)] * wanted.whole
    if wanted.some:
        together.append((named_together(wanted.some), wanted.some))
    found = [Entry(EXACT, Spec("sdpa"), free, "all", untrained)]
    for seed in range(rules.seed, rules.seed + question.seeds):
        own = replace(rules, seed=seed)
        if together and trains:
            found.append(Entry(NONE, None, (), NONE, own))
        found += [
            Entry(label, spec, chosen, named, own) for label, spec in variants.items() for named, chosen in together
        ]
    if wanted.each:
        found += [
            Entry(label, spec, (place,), str(place), untrained)
            for label, spec in variants.items()
            for place in free[:: wanted.each]
        ]
    return list({entry.key: entry for entry in reversed(found)}.values())[::-1]
