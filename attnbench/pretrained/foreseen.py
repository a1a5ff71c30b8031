"""What a swap would take, from the time of one window."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from attnbench.pretrained.evaluate import WINDOWS_OF_LAYERS
from attnbench.pretrained.folder import known_folder
from attnbench.pretrained.question import Entry, Question, entries, refuse
from attnbench.pretrained.subject import Subject
from attnbench.pretrained.swap import Place, Watcher, answered_by, identity_of
from attnbench.pretrained.windows import Text

_STEP = 3
"""Training on one window takes about as long as reading this number of them: forward once, backward twice that."""
_OF_TRAINED = 4
"""Numbers in float32 for each that is trained: the copy itself, its gradient, and two moments of AdamW."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Time is that of the model's own attention: what a variant takes more or less is not known before it runs."""

    visits: int
    """A visit is one variant in some layers with one seed."""
    resumed: int
    """Visits whose rows are there already."""
    windows_read: int
    """Windows to evaluate on, all visits together."""
    windows_trained: int
    """Windows to train on, all visits together."""
    window_s: float
    """Seconds for one window, read."""
    weight_bytes: int
    """The model, and where it is trained its copy with gradients and moments, in float32."""

    @property
    def seconds(self) -> float:
        """What everything that is still to be done takes."""
        return self.window_s * (self.windows_read + _STEP * self.windows_trained)


def foresee(question: Question, subject: Subject, text: Text, place: Place, watcher: Watcher) -> Foreseen:
    """Count what is still to be done, and time one window. Nothing is written, and no folder is made.

    Raises:
        UsageError, Unsupported: the question cannot be asked of this model.
        CorruptResults: rows that are there cannot be read.
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
    """Windows that are read to evaluate one visit."""
    if entry.variant is None:
        return len(entry.rules.steps) * windows
    pairs = 0 if entry.named.isdecimal() else 1
    return len(entry.rules.steps) * (windows + min(windows, WINDOWS_OF_LAYERS)) + pairs


def _seconds_of_a_window(question: Question, subject: Subject, text: Text) -> float:
    subject.module.to(question.device)
    window = next(text.held_out(question.windows).each()).to(question.device)
    seconds = 0.0
    with torch.inference_mode():
        for _ in range(2):  # the first loads what the second finds
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
