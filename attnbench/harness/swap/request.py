"""A swap as requested by the command or from Python: question, model and text, and its cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from attnbench.contract.plugins.load import provenance
from attnbench.contract.spec import Spec, parse_specs
from attnbench.contract.variant import VARIANTS
from attnbench.errors import UsageError
from attnbench.harness.swap.question import Entry, Question, entries, parse_layers, parse_steps, refuse
from attnbench.harness.swap.swap import Place, Swapped, Watcher, answered_by, identity_of, known_folder, swap
from attnbench.harness.swap.tune import Rules
from attnbench.harness.trial import load_all
from attnbench.measure.machine import default_threads, resolve_device
from attnbench.models.pretrained.evaluate import WINDOWS_OF_LAYERS
from attnbench.models.pretrained.models import open_model, threads_of_torch
from attnbench.models.pretrained.subject import Subject
from attnbench.models.pretrained.windows import Text


def variants_of(texts: Sequence[str], plugins: Sequence[str]) -> tuple[Spec, ...]:
    """The variants that are named, each once, after loading the plug-ins. Raises UsageError: an unknown variant or
    option."""
    load_all(plugins)
    found = [VARIANTS.get(spec.name).normalise(spec) for text in texts for spec in parse_specs(text)]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its model and text."""

    question: Question
    subject: Subject
    text: Text
    place: Place

    @classmethod
    def of(cls, model: str, variants: Sequence[Spec], given: Mapping[str, Any]) -> Self:
        """Read the arguments of the command or the function, and open the model.

        ``given`` has ``text``, ``layers``, ``length``, ``windows``, ``steps``, ``learning_rate``, ``batch``, ``train``,
        ``redraw``, ``seeds``, ``device``, ``threads``, ``plugins``, ``out`` and ``fresh``. Raises UsageError for an
        impossible value, an unknown model or a short text, and Unsupported if the model's attention cannot be replaced.
        """
        rate = given["learning_rate"]
        if not 0 < rate <= 1:
            raise UsageError(f"--lr must be above 0 and at most 1, got {rate:g}; write 0.0003, say")
        steps = given["steps"]
        if not isinstance(steps, str):
            steps = ",".join(map(str, [steps] if isinstance(steps, int) else steps))
        question = Question(
            variants=tuple(variants),
            layers=parse_layers(given["layers"]),
            windows=given["windows"],
            rules=Rules(parse_steps(steps), rate, given["batch"], given["train"], given["redraw"]),
            seeds=given["seeds"],
            device=resolve_device(given["device"]),
        )
        text = given["text"]
        code = tuple(provenance(given["plugins"]).items())
        place = Place(Path(given["out"]), given["fresh"], given["threads"] or default_threads(), code)
        with threads_of_torch(place.threads):
            subject, windows = open_model(model, given["length"], None if text is None else Path(text))
        return cls(question, subject, windows, place)

    def foresee(self, watcher: Watcher) -> Foreseen:
        with threads_of_torch(self.place.threads):
            return foresee(self.question, self.subject, self.text, self.place, watcher)

    def answer(self, watcher: Watcher) -> Swapped:
        with threads_of_torch(self.place.threads):
            return swap(self.question, self.subject, self.text, self.place, watcher)


_STEP = 3
"""Training on one window takes about as long as reading this number of them: forward once, backward twice that."""
_OF_TRAINED = 4
"""Numbers in float32 for each that is trained: the copy itself, its gradient, and two moments of AdamW."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The cost of a swap, by the time of the model's own attention: that of a variant is unknown before it runs."""

    visits: int
    resumed: int
    windows_read: int
    windows_trained: int
    window_s: float
    """Seconds for one window, read."""
    weight_bytes: int
    """Bytes of the model and, if it is trained, of its copy with gradients and moments, in float32."""

    @property
    def seconds(self) -> float:
        return self.window_s * (self.windows_read + _STEP * self.windows_trained)


def foresee(question: Question, subject: Subject, text: Text, place: Place, watcher: Watcher) -> Foreseen:
    """Count the remaining work, and time one window. Nothing is written, and no folder is made.

    Raises UsageError and Unsupported if the question does not fit this model, and CorruptResults.
    """
    refuse(question, subject.layers, text.most)
    visits = entries(question, subject.layers)
    identity = identity_of(question, subject, text, place)
    known = None if place.fresh else known_folder(place.out, identity, watcher.warned)
    rows = {(row.key, row.steps): row for row in (known.rows() if known is not None else [])}
    missing = [entry for entry in visits if not answered_by(entry, rows)]
    read = sum(_windows_of(entry, question.windows) for entry in missing)
    return Foreseen(
        visits=len(visits),
        resumed=len(visits) - len(missing),
        windows_read=read + question.windows * bool(missing),  # the untouched model reads them first
        windows_trained=sum(entry.rules.steps[-1] * entry.rules.batch for entry in missing),
        window_s=_seconds_of_a_window(question, subject, text),
        weight_bytes=_bytes_of_weights(question, subject),
    )


def _windows_of(entry: Entry, windows: int) -> int:
    if entry.variant is None:
        return len(entry.rules.steps) * windows
    pairs = 0 if entry.named.isdecimal() else 1
    return len(entry.rules.steps) * (windows + min(windows, WINDOWS_OF_LAYERS)) + pairs


def _seconds_of_a_window(question: Question, subject: Subject, text: Text) -> float:
    subject.module.to(question.device)
    window = next(text.held_out(question.windows).each()).to(question.device)
    seconds = 0.0
    with torch.inference_mode():
        for _ in range(2):  # the first loads code and weights for the second
            start = time.perf_counter()
            float(subject.read(window.tokens).hidden.sum())  # a number on the host: a GPU has then finished
            seconds = time.perf_counter() - start
    return seconds


def _bytes_of_weights(question: Question, subject: Subject) -> int:
    whole = sum(one.numel() for one in subject.module.parameters())
    rules = question.rules
    trained = 0
    if rules.steps[-1] > 0 and rules.what != "variant":
        trained = whole if rules.what == "all" else sum(one.numel() for one in subject.of_attention())
    copied = whole - trained if trained else 0
    return 4 * (whole + copied + _OF_TRAINED * trained)
