"""Train a model briefly after its attention was replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from attnbench.contract.task import stream_seed
from attnbench.errors import Diverged, Unsupported
from attnbench.harness.score.loop import BETAS, CLIPPED_TO, share_of_rate
from attnbench.models.encoder import cross_entropy
from attnbench.models.pretrained.operators import Operators, replaced
from attnbench.models.pretrained.subject import Exact, Subject
from attnbench.models.pretrained.windows import Text, Windows

Trained = Literal["all", "attention", "variant"]
_WARM_UP = 0.1


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of the training after a swap."""

    steps: tuple[int, ...]
    """Numbers of steps at which it is evaluated, in rising order; 0 is before the first."""
    learning_rate: float
    batch: int
    what: Trained
    """``all`` parameters of the model; those of its ``attention`` layers; or only the ``variant``'s own, which are
    fitted layer by layer to the untouched layer's answers.
    """
    redraw: int
    """Steps after which a variant redraws its random features, if it can; 0 for never."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pupil:
    """The trained parts: a copy of the model, and the operators in it."""

    original: Subject
    model: Subject
    """Weights of its own, or the untouched model itself if these are not trained."""
    operators: Operators

    def parameters(self, what: Trained) -> list[nn.Parameter]:
        """The trained parameters, each once. Raises Unsupported if the variant has none that could be fitted."""
        own = [parameter for one in self.operators.values() for parameter in one.parameters()]
        if what == "variant":
            if not own:
                raise Unsupported("--train variant: it brings no parameters to fit; train attention, or all")
            model: list[nn.Parameter] = []
        else:
            model = self.model.of_attention() if what == "attention" else list(self.model.module.parameters())
        return list({id(one): one for one in (*model, *own)}.values())


def tuned(
    pupil: Pupil, text: Text, rules: Rules, device: str, tell: Callable[[int], None] = lambda step: None
) -> Iterator[int]:
    """Train in place, and yield each number of steps in ``rules.steps`` after that many.

    AdamW without decay; the rate rises linearly and falls along a cosine over all steps; gradients are clipped to norm
    1. No dropout. The windows of step s depend on the seed and s alone. ``tell`` gets the number of steps done after
    each. Raises Diverged for a loss that is not finite, and Unsupported if nothing can be trained.
    """
    if 0 in rules.steps:
        yield 0
    last = max(rules.steps)
    if not last:
        return
    parameters = pupil.parameters(rules.what)
    for parameter in pupil.model.module.parameters():
        parameter.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = AdamW(parameters, lr=rules.learning_rate, betas=BETAS, weight_decay=0.0)
    for step in range(last):
        for group in optimizer.param_groups:
            group["lr"] = rules.learning_rate * share_of_rate(step, last, _WARM_UP)
        if rules.redraw and step and step % rules.redraw == 0:
            _redraw(pupil.operators, stream_seed("redraw", rules.seed, step))
        batch = text.batch(rules.seed, step, rules.batch).to(device)
        value = _fit(pupil, batch.tokens) if rules.what == "variant" else _loss(pupil, batch)
        number = float(value.detach())
        if not math.isfinite(number):
            raise Diverged(f"the loss is {number} at step {step + 1} of {last}")
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
        nn.utils.clip_grad_norm_(parameters, CLIPPED_TO)
        optimizer.step()
        tell(step + 1)
        if step + 1 in rules.steps:
            yield step + 1


def _loss(pupil: Pupil, batch: Windows) -> Tensor:
    logits = pupil.model.read(batch.tokens, replaced(pupil.operators)).logits
    if logits is None:
        raise Unsupported("this model predicts nothing, so that it has no loss; --train variant fits the variant alone")
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
