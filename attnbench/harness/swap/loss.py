"""The loss of a trained model with a cell's variant in its layers, before or after a little training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from attnbench.contract.spec import Spec
from attnbench.contract.task import NO_LABEL, stream_seed
from attnbench.errors import Diverged, Unsupported
from attnbench.harness.score.loop import BETAS, CLIPPED_TO, share_of_rate
from attnbench.laws.implied import implied
from attnbench.measure.reuse import Recent
from attnbench.measure.statistics import median, median_interval
from attnbench.models.encoder import cross_entropy
from attnbench.models.pretrained.evaluate import Baseline, baseline_of, evaluate, layer_errors
from attnbench.models.pretrained.operators import Operators, replaced
from attnbench.models.pretrained.pretrained_cell import opened, operators_of
from attnbench.models.pretrained.subject import Exact, Subject, Text, Windows
from attnbench.suite.cell import Cell, Pretrained

_SAME = 1e-4
"""Nats by which softmax attention in the place of softmax attention may move the loss."""


def measure_loss(cell: Cell, tell: Callable[[str], None] = lambda part: None) -> dict[str, Any]:
    """Compare the model with the cell's variant to the untouched one; return the columns of its row.

    ``tell`` gets the part that begins. Raises UsageError and Unsupported as
    :func:`~attnbench.models.pretrained.pretrained_cell.opened`, for the variant, and if softmax attention in the place
    of the model's own changes it; Diverged for NaN or infinity, also of a training.
    """
    untouched = _untouched(cell)
    baseline = _baseline(untouched)
    pupil, trained = _pupil_of(cell, tell)
    tell("its loss")
    if pupil.operators and cell.dtype in ("float32", "float64"):
        moved = _moved(untouched)
        if not moved <= _SAME:
            raise Unsupported(
                f"softmax attention in the place of the model's own moves it by {moved}: this model computes something "
                "else, and no row is believed"
            )
    found = evaluate(pupil.model, pupil.operators, baseline, cell.device)
    error, trivial = layer_errors(pupil.original, pupil.operators, baseline, cell.device)
    columns = {
        **_of_losses(found.losses, baseline),
        "accuracy": found.accuracy,
        "top1_agreement": found.top1_agreement,
        "kl": found.kl,
        "hidden_error": found.hidden_error,
        "feature_cosine": found.cosine,
        "neighbours": found.neighbours,
        "attention_error": error,
        "trivial_error": trivial,
        "pairs_seen": pupil.pairs_seen,
        "trainable_params": trained or None,
    }
    return {name: _finite(value) for name, value in columns.items()}


def _untouched(cell: Cell) -> Cell:
    """The same cell for all that share its baseline: softmax attention in all layers, before any training."""
    assert cell.pretrained is not None
    return Cell(
        "",
        "",
        Spec("sdpa"),
        replace(cell.shape, batch=1),
        "pretrained",
        dtype=cell.dtype,
        device=cell.device,
        measure=("loss",),
        pretrained=Pretrained(cell.pretrained.name, cell.pretrained.text, cell.pretrained.windows),
    )


def _subject(cell: Cell) -> Subject:
    """The untouched model on the cell's device, which is the cached one where that is there."""
    one = opened(cell).subject
    if (cell.device, cell.dtype) == ("cpu", "float32"):
        return one
    one = one.copy()
    one.module.to(cell.device, getattr(torch, cell.dtype))
    return one


def _read(untouched: Cell) -> Baseline:
    assert untouched.pretrained is not None
    windows = opened(untouched).text.held_out(untouched.pretrained.windows)
    return baseline_of(_subject(untouched), windows, untouched.device)


_baseline = Recent(_read, 1)


def _moved_by_softmax(untouched: Cell) -> float:
    """Nats by which softmax attention in the model's own place moves it; else the error of the last features."""
    baseline, subject = _baseline(untouched), _subject(untouched)
    found = evaluate(subject, _operators(untouched, subject), baseline, untouched.device)
    if found.losses is None or baseline.losses is None:
        return found.hidden_error
    return abs(fmean(found.losses) - fmean(baseline.losses))


_moved = Recent(_moved_by_softmax, 1)


def _pupil_of(cell: Cell, tell: Callable[[str], None]) -> tuple[Pupil, int]:
    """The cell's pupil after its training, and the number of trained parameters."""
    assert cell.pretrained is not None
    last = cell.pretrained.last
    if not last:
        return _pupil(cell), 0
    opened(cell).text.held_out(cell.pretrained.windows)  # no training may see them
    whole = replace(cell, tuned=0, suite="", sweep="")
    tuning = _tuning(whole)
    if tuning.done > cell.tuned:
        _tuning.forget()
        tuning = _tuning(whole)
    tuning.advance(cell.tuned, lambda step: tell(f"step {step} of {last}"))
    if tuning.done == last:  # the memory is for others
        _tuning.forget()
    return tuning.pupil, tuning.trained


def _pupil(cell: Cell) -> Pupil:
    original = _subject(cell)
    operators = _operators(cell, original)
    assert cell.pretrained is not None
    own_weights = cell.pretrained.last and cell.train != "variant"
    seen = _pairs_seen(cell, original, operators)
    return Pupil(original, original.copy() if own_weights else original, operators, seen)


def _operators(cell: Cell, subject: Subject) -> Operators:
    operators = operators_of(cell, subject)
    for one in operators.values():
        one.to(cell.device, getattr(torch, cell.dtype))
    return operators


def _begun(cell: Cell) -> PupilTraining:
    pupil, one = _pupil(cell), opened(cell)
    kept = [module for module in (pupil.model.module, pupil.original.module) if module is not one.weights]
    return PupilTraining(pupil, one.text, cell, kept)


_tuning = Recent(_begun, 1)


def _pairs_seen(cell: Cell, subject: Subject, operators: Operators) -> float | None:
    """Share of the visible pairs with a weight other than 0, on the first window, in the first replaced layer."""
    if not operators:
        return None
    first = min(operators)
    taken: list[Tensor] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        if place == first:
            taken.extend((q, k))
        return exact()

    with torch.inference_mode(), suppress(Exception):  # the row itself names the fault
        subject.read(_baseline(_untouched(cell)).windows.tokens[:1].to(cell.device), look)
        weights = implied(operators[first], *taken)
        shape = subject.layers[first].shape
        visible = torch.ones(shape.N, shape.N, dtype=torch.bool, device=weights.device)
        visible = visible.tril() if shape.causal else visible
        return float((weights[:, visible] != 0).double().mean())
    return None


def _of_losses(losses: list[float] | None, baseline: Baseline) -> dict[str, Any]:
    before = baseline.losses
    if losses is None or before is None:
        return {}
    deltas = [after - base for after, base in zip(losses, before, strict=True)]
    low, high = median_interval(deltas) or (None, None)
    right = [one.answered.right for one in baseline.originals if one.answered is not None]
    return {
        "loss": fmean(losses),
        "loss_base": fmean(before),
        "loss_delta": median(deltas),
        "loss_delta_low": low,
        "loss_delta_high": high,
        "accuracy_base": sum(right) / baseline.asked if right and baseline.asked else None,
        "window_losses": json.dumps(losses),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_WARM_UP = 0.1


@dataclass(frozen=True, slots=True)
class Pupil:
    """The trained parts: a copy of the model, and the operators in it."""

    original: Subject
    model: Subject
    """Weights of its own, or the untouched model itself if these are not trained."""
    operators: Operators
    pairs_seen: float | None = None
    """As in the column, before any training."""

    def parameters(self, what: str) -> list[nn.Parameter]:
        """The trained parameters, each once. Raises Unsupported if the variant has none that could be fitted."""
        own = [parameter for one in self.operators.values() for parameter in one.parameters()]
        if what == "variant":
            if not own:
                raise Unsupported("train: variant: it brings no parameters to fit; train attention, or all")
            model: list[nn.Parameter] = []
        else:
            model = self.model.of_attention() if what == "attention" else list(self.model.module.parameters())
        return list({id(one): one for one in (*model, *own)}.values())


class PupilTraining(nn.Module):
    """A pupil in training, which goes on from one number of steps to the next.

    AdamW without decay; the rate rises linearly and falls along a cosine over all steps; gradients are clipped to norm
    1. No dropout. The windows of step s depend on the seed and s alone. It is a module, so that a cache counts its
    memory.
    """

    def __init__(self, pupil: Pupil, text: Text, cell: Cell, kept: Sequence[nn.Module]) -> None:
        """``kept``: the models that no other cache has."""
        super().__init__()
        assert cell.pretrained is not None
        self.pupil, self._text, self._cell, self._rules = pupil, text, cell, cell.pretrained
        self.kept = nn.ModuleList([*kept, *pupil.operators.values()])
        self._trained: list[nn.Parameter] = []
        self._optimizer: AdamW | None = None
        self.done = 0

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Those of the model and the variant, and the optimiser's moments."""
        yield from super().buffers(recurse)
        for state in self._optimizer.state.values() if self._optimizer else ():
            yield from (one for one in state.values() if isinstance(one, Tensor))

    def advance(self, steps: int, tell: Callable[[int], None] = lambda step: None) -> None:
        """Train in place until ``steps`` are done; ``tell`` gets the number of steps done after each.

        Raises Diverged for a loss that is not finite, and Unsupported if nothing can be trained.
        """
        if steps > self.done and self._optimizer is None:
            self._trained = self.pupil.parameters(self._cell.train)
            for parameter in self.pupil.model.module.parameters() if self._cell.train != "variant" else ():
                parameter.requires_grad_(False)
            for parameter in self._trained:
                parameter.requires_grad_(True)
            self._optimizer = AdamW(self._trained, lr=self._rules.rate, betas=BETAS, weight_decay=0.0)
        while self.done < steps:
            self._step(self.done)
            self.done += 1
            tell(self.done)

    @property
    def trained(self) -> int:
        """Number of trained parameters; 0 before the first step."""
        return sum(one.numel() for one in self._trained)

    def _step(self, step: int) -> None:
        assert self._optimizer is not None
        cell, rules = self._cell, self._rules
        for group in self._optimizer.param_groups:
            group["lr"] = rules.rate * share_of_rate(step, rules.last, _WARM_UP)
        if rules.redraw and step and step % rules.redraw == 0:
            _redraw(self.pupil.operators, stream_seed("redraw", cell.seed, step))
        batch = self._text.batch(cell.seed, step, cell.shape.B).to(cell.device)
        value = _fit(self.pupil, batch.tokens) if cell.train == "variant" else _loss(self.pupil, batch)
        number = float(value.detach())
        if not math.isfinite(number):
            raise Diverged(f"the loss is {number} at step {step + 1} of {rules.last}")
        value.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
        nn.utils.clip_grad_norm_(self._trained, CLIPPED_TO)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _loss(pupil: Pupil, batch: Windows) -> Tensor:
    logits = pupil.model.read(batch.tokens, replaced(pupil.operators)).logits
    if logits is None or not (batch.targets != NO_LABEL).any():
        raise Unsupported("this model predicts nothing, so that it has no loss; train: variant fits the variant alone")
    return cross_entropy(logits.float(), batch.targets)


def _fit(pupil: Pupil, tokens: Tensor) -> Tensor:
    """Squared relative error of each operator on the untouched layer's inputs, mean over layers."""
    errors: list[Tensor] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        answer = exact()
        if place in pupil.operators:
            with torch.enable_grad():
                difference = pupil.operators[place](q.detach(), k.detach(), v.detach()) - answer
                errors.append(difference.square().sum() / answer.square().sum())
        return answer

    with torch.no_grad():
        pupil.original.read(tokens, look)
    return torch.stack(errors).mean()


def _redraw(operators: Operators, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for one in operators.values():
            draw = getattr(one, "redraw", None)
            if draw is not None:
                draw()
