"""Train a model briefly after its attention was replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from attnbench.suite.cell import Cell

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
    if logits is None:
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
