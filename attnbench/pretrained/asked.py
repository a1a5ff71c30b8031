"""A swap as it was asked for, by the command or from Python: the question, the model and the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from attnbench.errors import UsageError
from attnbench.machine import default_threads, resolve_device
from attnbench.plugins import load, provenance
from attnbench.pretrained.foreseen import Foreseen, foresee
from attnbench.pretrained.models import open_model
from attnbench.pretrained.question import Question, parse_layers, parse_steps
from attnbench.pretrained.subject import Subject
from attnbench.pretrained.swap import Place, Swapped, Watcher, swap
from attnbench.pretrained.threads import threads_of_torch
from attnbench.pretrained.tune import Rules
from attnbench.pretrained.windows import Text
from attnbench.spec import Spec, parse_specs
from attnbench.variant import VARIANTS


def variants_of(texts: Sequence[str], plugins: Sequence[str]) -> tuple[Spec, ...]:
    """The variants that are named, each once, after loading the plug-ins.

    Raises:
        UsageError: an unknown variant or option.
    """
    for source in plugins:
        load(source)
    found = [VARIANTS.get(spec.name).normalise(spec) for text in texts for spec in parse_specs(text)]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with all that answers it."""

    question: Question
    subject: Subject
    text: Text
    place: Place

    @classmethod
    def of(cls, model: str, variants: Sequence[Spec], given: Mapping[str, Any]) -> Self:
        """Read the arguments of the command or the function, and open the model.

        Args:
            model: ``listops``, a folder, a .gguf file, ``pypi:PACKAGE/FILE``, an id in the hub's cache.
            given: argument -> value: ``text``, ``layers``, ``length``, ``windows``, ``steps``, ``learning_rate``,
                ``batch``, ``train``, ``redraw``, ``seeds``, ``device``, ``threads``, ``plugins``, ``out``, ``fresh``.

        Raises:
            UsageError: a value that cannot be, no such model, or a text that is too short.
            Unsupported: the model's attention cannot be replaced.
        """
        rate = given["learning_rate"]
        if not 0 < rate <= 1:
            raise UsageError(f"--lr must be above 0 and at most 1, got {rate:g}; write 0.0003, say")
        steps = parse_steps(given["steps"])
        question = Question(
            variants=tuple(variants),
            layers=parse_layers(given["layers"]),
            windows=given["windows"],
            rules=Rules(steps, rate, given["batch"], given["train"], given["redraw"]),
            seeds=given["seeds"],
            device=resolve_device(given["device"]),
        )
        code = tuple(provenance(given["plugins"]).items())
        place = Place(Path(given["out"]), given["fresh"], given["threads"] or default_threads(), code)
        with threads_of_torch(place.threads):
            subject, text = open_model(model, given["length"], given["text"])
        return cls(question, subject, text, place)

    def foresee(self, watcher: Watcher) -> Foreseen:
        """What the answer would take; reads two windows, and writes nothing."""
        with threads_of_torch(self.place.threads):
            return foresee(self.question, self.subject, self.text, self.place, watcher)

    def answer(self, watcher: Watcher) -> Swapped:
        """Every row that is asked for; those that are there already are kept."""
        with threads_of_torch(self.place.threads):
            return swap(self.question, self.subject, self.text, self.place, watcher)
