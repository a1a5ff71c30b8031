"""The untouched model on the windows to evaluate on, and the distance of one with another attention from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from attnbench.contract.problem.reference import mean_of_visible, relative_error
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Diverged, Unsupported
from attnbench.models.pretrained.operators import Operators, replaced
from attnbench.models.pretrained.subject import Exact, ModelOutput, Subject, Windows

WINDOWS_OF_LAYERS = 4
"""Windows, at most, on which single layers are looked at."""
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
    """The answers in one window ``(1, N)``; None if the model has none, or none is wanted."""
    asked = window.targets[0] != NO_LABEL
    if reading.logits is None or not asked.any():
        return None
    targets, log_probs = window.targets[0, asked], reading.logits[0, asked].float().log_softmax(-1)
    chosen = log_probs.argmax(-1)
    loss = -log_probs.gather(1, targets[:, None]).mean()
    return Answered(float(loss), int((chosen == targets).sum()), chosen, log_probs)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model with another attention compared with the untouched one. Lists have a number for each window."""

    losses: list[float] | None
    """Mean cross-entropy in nats; None, as all up to ``kl``, if the model predicts nothing."""
    accuracy: float | None
    top1_agreement: float | None
    """Share of the answers that are the untouched model's."""
    kl: float | None
    """Mean of KL(untouched ‖ this) over the answers, in nats."""
    hidden_error: float
    """Relative error of the last features, mean over windows."""
    cosine: float
    """Cosine of the features' mean over a window with the untouched model's, mean over windows."""
    neighbours: float | None
    """Share of the windows with the same nearest other window by that cosine; None below three windows."""


def evaluate(subject: Subject, operators: Operators, baseline: Baseline, device: str) -> Evaluated:
    """Read every window with these operators in the place of attention. Raises Diverged: the features or the logits
    hold NaN or infinity. Raises Unsupported: attention that should have been replaced was not reached."""
    answers: list[Answered] = []
    agree: list[float] = []
    divergence: list[float] = []
    hidden_errors: list[float] = []
    means: list[Tensor] = []
    reached = set[int]()
    put_in = replaced(operators)

    def counted(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        reached.add(place)
        return put_in(place, q, k, v, exact)

    with torch.inference_mode():
        for window, original in zip(baseline.windows.each(), baseline.originals, strict=True):
            here = window.to(device)
            reading = subject.read(here.tokens, counted)
            if missed := sorted(operators.keys() - reached):
                raise Unsupported(f"the attention of layer {missed[0]} was not reached, so that it would stay as it is")
            hidden = reading.hidden[0].float().cpu()
            found = answered(reading, here)
            if not hidden.isfinite().all() or (found is not None and not math.isfinite(found.loss)):
                raise Diverged("the model's features or logits hold NaN or infinity")
            if found is not None and original.answered is not None:
                answers.append(found)
                agree.append(float((found.chosen.cpu() == original.answered.chosen).double().mean()))
                divergence.append(_kl(original.answered.log_probs, found.log_probs[:: baseline.step].cpu()))
            hidden_errors.append(relative_error(hidden, original.hidden))
            means.append(hidden.mean(0))
    before, after = torch.stack([one.hidden.mean(0) for one in baseline.originals]), torch.stack(means)
    return Evaluated(
        losses=[one.loss for one in answers] or None,
        accuracy=sum(one.right for one in answers) / baseline.asked if answers else None,
        top1_agreement=fmean(agree) if agree else None,
        kl=fmean(divergence) if divergence else None,
        hidden_error=fmean(hidden_errors),
        cosine=float(cosine_similarity(before, after).mean()),
        neighbours=_same_neighbours(before, after),
    )


def _kl(of: Tensor, by: Tensor) -> float:
    """Mean over rows of KL(p ‖ q), from log-probabilities ``(A, V)``."""
    return float((of.double().exp() * (of.double() - by.double())).sum(-1).mean())


def _same_neighbours(before: Tensor, after: Tensor) -> float | None:
    """Share of the rows whose nearest other row, by cosine, is the same in both ``(W, C)``."""
    if len(before) < 3:
        return None
    nearest = []
    for rows in (before, after):
        near = cosine_similarity(rows[:, None], rows[None], dim=-1)
        nearest.append(near.fill_diagonal_(-math.inf).argmax(-1))
    return float((nearest[0] == nearest[1]).double().mean())


def layer_errors(
    subject: Subject, operators: Operators, baseline: Baseline, device: str
) -> tuple[float, float] | tuple[None, None]:
    """The relative errors of the operators and of the trivial answer, means over layers and the first windows.

    Each operator gets the untouched layer's own q, k, v: nothing is propagated. None without any operator.
    """
    if not operators:
        return None, None
    errors, trivial = list[float](), list[float]()

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        answer = exact()
        if place in operators:
            shape = subject.layers[place].shape
            errors.append(relative_error(operators[place](q, k, v), answer))
            trivial.append(relative_error(mean_of_visible(v, shape.N, causal=shape.causal), answer))
        return answer

    with torch.inference_mode():
        for window in list(baseline.windows.each())[:WINDOWS_OF_LAYERS]:
            subject.read(window.tokens.to(device), look)
    return fmean(errors), fmean(trivial)
