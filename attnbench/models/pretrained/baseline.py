"""The untouched model's answers on the windows to evaluate on, the baseline of every other answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.contract.task import NO_LABEL
from attnbench.models.pretrained.subject import ModelOutput, Subject
from attnbench.models.pretrained.windows import Windows

_MOST_KEPT = 2**26
"""Log-probabilities that are kept of all windows together (256 MiB)."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One window's answers at positions that ask for one."""

    loss: float
    """Mean cross-entropy in nats."""
    right: int
    chosen: Tensor
    """int64 ``(A,)``: the likeliest answer at each of the A positions."""
    log_probs: Tensor
    """float32 ``(A, V)``."""


@dataclass(frozen=True, slots=True)
class Original:
    """The untouched model's result for one window."""

    hidden: Tensor
    """``(N, C)`` on the CPU."""
    answered: Answered | None
    """Log-probabilities at the kept positions only; None if the model predicts nothing."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """The untouched model on all windows."""

    windows: Windows
    originals: tuple[Original, ...]
    step: int
    """Log-probabilities are kept at every ``step``-th position that has an answer."""

    @property
    def losses(self) -> list[float] | None:
        found = [one.answered.loss for one in self.originals if one.answered is not None]
        return found or None

    @property
    def asked(self) -> int:
        return int((self.windows.targets != NO_LABEL).sum())


@torch.inference_mode()
def baseline_of(subject: Subject, windows: Windows, device: str) -> Baseline:
    """Read every window with the untouched model, keeping at most 2²⁶ log-probabilities in memory."""
    originals: list[Original] = []
    step = 0
    for window in windows.each():
        here = window.to(device)
        reading = subject.read(here.tokens)
        found = answered(reading, here)
        if found is not None:
            step = step or -(-(found.log_probs.numel() * len(windows)) // _MOST_KEPT)
            kept = found.log_probs[::step].cpu()
            found = Answered(found.loss, found.right, found.chosen.cpu(), kept)
        originals.append(Original(reading.hidden[0].float().cpu(), found))
    return Baseline(windows, tuple(originals), step)


def answered(reading: ModelOutput, window: Windows) -> Answered | None:
    """The answers in one window ``(1, N)``; None if the model has none."""
    if reading.logits is None:
        return None
    asked = window.targets[0] != NO_LABEL
    targets, log_probs = window.targets[0, asked], reading.logits[0, asked].float().log_softmax(-1)
    chosen = log_probs.argmax(-1)
    loss = -log_probs.gather(1, targets[:, None]).mean()
    return Answered(float(loss), int((chosen == targets).sum()), chosen, log_probs)
