"""Steps of a training, from the first or from a checkpoint, to the same bits either way."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import AdamW

from attnbench.contract.task import Examples, Task, stream_seed
from attnbench.errors import Diverged
from attnbench.files import remove_unfinished, replace_file
from attnbench.harness.score.accuracy import answer, logits_of
from attnbench.laws.implied import weights_of
from attnbench.measure.energy import Meter
from attnbench.measure.limits import synchronise
from attnbench.models.encoder import MultiHead, cross_entropy
from attnbench.suite.cell import Cell

BETAS = (0.9, 0.98)
CLIPPED_TO = 1.0
"""Largest norm of the gradient."""
_PUT_ASIDE = 60.0
"""Seconds between two checkpoints: at most this much is lost, too little for a shorter training to need one."""
TELL = 1.0
"""Seconds between two messages to the caller."""
_LAST = 0.1
"""Share of the steps, at the end of a pretraining or training, over which the loss is averaged."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation on the validation examples."""

    step: int
    train_loss: float
    """Mean since the previous evaluation."""
    val_score: float
    val_loss: float
    learning_rate: float
    cpu_s: float
    """Seconds of training so far, without evaluations: of the processors, or on a GPU of the clock."""


@dataclass(slots=True)
class Course:
    """The progress of a training, which a checkpoint keeps beside weights and optimizer."""

    step: int = 0
    train_s: float = 0.0
    points: list[Evaluation] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Losses of the steps since the last evaluation."""
    last_losses: list[float] = field(default_factory=list)
    """Losses of the last tenth of the steps."""
    energy_j: float | None = None
    """Joules from the first step to the last, without evaluations; None without a counter."""


Loss = Callable[[nn.Module, Examples, int], Tensor]
"""The loss of a model at the step of this number."""


def answers_loss(device: str, guide: float = 0.0) -> Loss:
    """Cross-entropy of the requested answers, and a share of the guided-attention loss."""

    def loss(model: nn.Module, examples: Examples, step: int) -> Tensor:
        return cross_entropy(logits_of(model, examples, device), examples.labels.to(device))

    def guided(model: nn.Module, examples: Examples, step: int) -> Tensor:
        with calls_of(model) as calls:
            value = loss(model, examples, step)
        return value + guide * guidance(calls)

    return guided if guide else loss


@dataclass(frozen=True, slots=True)
class Lesson:
    """The lesson, if it is not to answer the task."""

    loss: Loss
    steps: int
    stream: str
    """Name of dropout's stream of random numbers."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The hooks of a caller in a training and its checkpoints."""

    on_batch: Callable[[Examples], None] = lambda examples: None
    """Gets each step's batch."""
    extra: Callable[[], dict[str, Any]] = dict
    """The caller's part of a checkpoint."""
    restore: Callable[[dict[str, Any]], None] = lambda extra: None
    """Gets it back."""
    tell: Callable[[int], None] = lambda step: None
    """Called about once a second with the steps done."""


def train(
    model: nn.Module,
    task: Task,
    cell: Cell,
    *,
    lesson: Lesson | None = None,
    checkpoint: Checkpoint | None = None,
    caller: Caller = Caller(),
    meter: Meter | None = None,
) -> Course:
    """Train for a fixed number of steps; the weights after the last one count.

    AdamW with decoupled decay; the rate goes up along a line and down along a cosine; gradients are clipped to norm 1.
    A step sees what seed and step decide, dropout follows the seed alone. So a training from a checkpoint ends with the
    same weights bit by bit (on the same machine and torch, with as many threads).

    Args:
        lesson: the task instead of the answers; the model is then not evaluated.
        checkpoint: read first, and written every minute and at the end of a lesson.
        meter: counts the energy, on top of its own earlier count, or the checkpoint's.

    Raises:
        Diverged: the loss is not finite.
    """
    assert cell.training is not None
    rules, batch, seed, device = cell.training, cell.shape.B, cell.seed, cell.device
    meter = meter or Meter()
    steps, evaluations = (lesson.steps, 0) if lesson else (rules.steps, rules.evaluations)
    loss = lesson.loss if lesson else answers_loss(device, rules.guide)
    stream = lesson.stream if lesson else "train"
    optimizer = AdamW(
        model.parameters(), lr=rules.learning_rate, betas=BETAS, weight_decay=rules.weight_decay, fused=True
    )
    course = Course()
    with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(stream_seed("dropout", stream, seed))
        if checkpoint is not None and (state := checkpoint.load()) is not None:
            course = _restored(state, model, optimizer, device)
            caller.restore(state.about["extra"])
            meter.go_on(course.energy_j)
        due = {round(steps * (k + 1) / evaluations) for k in range(evaluations)}
        model.train()
        meter.skip()
        told = put_aside = time.monotonic()
        while course.step < steps:
            examples = task.batch(seed, course.step, batch)
            caller.on_batch(examples)
            rate = rules.learning_rate * share_of_rate(course.step, steps, rules.warm_up)
            for group in optimizer.param_groups:
                group["lr"] = rate
            began = _now(device)
            value = loss(model, examples, course.step)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_TO)
            optimizer.step()
            number = float(value.detach())
            course.train_s += _now(device) - began
            course.step += 1
            if not math.isfinite(number):
                raise Diverged(f"the loss is {number} at step {course.step} of {steps}")
            course.losses.append(number)
            if course.step > (1 - _LAST) * steps:
                course.last_losses.append(number)
            if course.step in due:
                meter.joules()
                course.points.append(_evaluated(model, task, batch, course, rate, device))
                course.losses = []
                model.train()
                meter.skip()
            now = time.monotonic()
            if now - told >= TELL:
                told = now
                meter.joules()
                caller.tell(course.step)
            ended = course.step == steps
            if checkpoint is not None and (checkpoint.keep or lesson if ended else now - put_aside >= _PUT_ASIDE):
                put_aside = now
                course.energy_j = meter.joules()
                checkpoint.save(_state(course, model, optimizer, device, caller.extra()))
        course.energy_j = meter.joules()
    model.eval()
    return course


def share_of_rate(step: int, steps: int, warm_up: float) -> float:
    """Share of the learning rate at ``step`` (from 0): up to 1 along a line, down to 0 along a cosine."""
    rising = max(1, round(warm_up * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising))))


def _evaluated(model: nn.Module, task: Task, batch: int, course: Course, rate: float, device: str) -> Evaluation:
    model.eval()
    found = answer(model, task.held_out("validation", batch), device)
    return Evaluation(
        step=course.step,
        train_loss=sum(course.losses) / max(1, len(course.losses)),
        val_score=found.accuracy,
        val_loss=found.loss,
        learning_rate=rate,
        cpu_s=course.train_s,
    )


def _now(device: str) -> float:
    """Processor seconds of this process; on a GPU seconds of the clock, once it has done its work so far."""
    synchronise(device)
    return time.process_time() if device == "cpu" else time.perf_counter()


FORMAT = 2


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Tensors by name, and the rest as plain data."""

    tensors: Mapping[str, Tensor]
    about: Mapping[str, Any]


class Checkpoint:
    """One file, replaced as a whole: a digest of the rest, a line of JSON, and tensors as in safetensors.

    It belongs to one cell, one torch, one state of the data.
    """

    def __init__(self, path: Path, owner: Mapping[str, str], *, keep: bool = False) -> None:
        """``keep``: also of the last step, and for other tests of this training."""
        self.path, self._owner = path, {**owner, "torch": torch.__version__, "format": str(FORMAT)}
        self.keep = keep
        self.trouble = ""
        """Why it could not be written or read, for the row."""

    def save(self, state: TrainingState) -> None:
        """Write the file. A full disk costs the checkpoint, not the training."""
        about = json.dumps({"owner": self._owner, **state.about}).encode()
        content = about + b"\n" + save({n: t.contiguous() for n, t in state.tensors.items()})
        try:
            self.path.parent.mkdir(exist_ok=True)
            replace_file(self.path, _digest(content) + content)
        except OSError as error:
            self.trouble = f"no checkpoint could be written: {error.strerror}"

    def load(self) -> TrainingState | None:
        """The saved state; None without a file that fits."""
        if not self.path.is_file():
            return None
        try:
            content = self.path.read_bytes()
            digest, content = content[: len(_digest(b""))], content[len(_digest(b"")) :]
            if digest != _digest(content):
                raise ValueError("not as it was written")
            line, _, tensors = content.partition(b"\n")
            about = json.loads(line)
            return TrainingState(load(tensors), about) if about.pop("owner") == self._owner else None
        except (OSError, SafetensorError, ValueError):
            self.trouble = "its checkpoint was damaged, so it began anew"
            return None

    def remove(self) -> None:
        """Remove the file and the remains of a killed training, once the row is there; unless it is to be kept."""
        if self.keep:
            return
        with suppress(OSError):
            self.path.unlink()
        remove_unfinished(self.path)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _state(course: Course, model: nn.Module, optimizer: AdamW, device: str, extra: dict[str, Any]) -> TrainingState:
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for place, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{place}.{name}": tensor for name, tensor in moments.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if device.startswith("cuda"):
        tensors["random.cuda"] = torch.cuda.get_rng_state(torch.device(device))
    return TrainingState(tensors, {"course": asdict(course), "extra": extra})


def _restored(state: TrainingState, model: nn.Module, optimizer: AdamW, device: str) -> Course:
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "random": {}}
    for name, tensor in state.tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = tensor
    model.load_state_dict(parts["model"])
    moments: dict[int, dict[str, Tensor]] = {}
    for name, tensor in parts["optimizer"].items():
        place, _, what = name.partition(".")
        moments.setdefault(int(place), {})[what] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    torch.set_rng_state(parts["random"]["cpu"])
    if device.startswith("cuda"):
        torch.cuda.set_rng_state(parts["random"]["cuda"], torch.device(device))
    course = Course(**state.about["course"])
    course.points = [Evaluation(**point) for point in state.about["course"]["points"]]
    return course


WIDTH = 0.2
"""g, as a share of the length: the paper's."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """The inputs of one operator in a forward pass."""

    operator: nn.Module
    q: Tensor
    """``(B, H, N, D)``"""
    k: Tensor
    """``(B, H, M, D)``"""
    key_mask: Tensor | None


@contextmanager
def calls_of(model: nn.Module) -> Iterator[list[OperatorCall]]:
    """Collect the inputs of each operator inside the model, in order."""
    found: list[OperatorCall] = []

    def keep(operator: nn.Module, inputs: tuple[Tensor, ...], more: dict[str, Tensor | None]) -> None:
        found.append(OperatorCall(operator, inputs[0], inputs[1], more.get("key_mask")))

    operators = [layer.operator for layer in model.modules() if isinstance(layer, MultiHead)]
    hooks = [operator.register_forward_pre_hook(keep, with_kwargs=True) for operator in operators]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def implied_weights(call: OperatorCall) -> Tensor:
    """The weights of every pair ``(B, H, N, M)``, of any operator. Gradients pass through them."""
    return weights_of(partial(call.operator, key_mask=call.key_mask), call.q, call.k)


def penalty(n: int, m: int, width: float = WIDTH) -> Tensor:
    """1 - exp(-(i/n - j/m)²/2g²) for i < n and j < m, ``(n, m)`` float64: 0 on the diagonal."""
    i, j = (torch.arange(length, dtype=torch.float64) / length for length in (n, m))
    return -torch.expm1(-(i[:, None] - j).square() / (2 * width**2))


def guided_loss(weights: Tensor, key_mask: Tensor | None = None, *, width: float = WIDTH) -> Tensor:
    """Mean over the rows of Σ_j P_ij·(1 - exp(-(i/N - j/M)²/2g²)); 0 if all weight is on the diagonal.

    Tachibana et al. 2017, "Efficiently Trainable Text-to-Speech System Based on Deep Convolutional Networks with Guided
    Attention", arXiv:1710.08969, adds it to the loss of the answers, with g = 0.2. Where input and output go forward at
    one pace, as text and speech do, attention that keeps to the diagonal is learnt sooner. The paper takes the mean
    over all pairs; here it is between 0 and 1 whatever the length.

    Args:
        weights: P, ``(B, H, N, M)``.
        key_mask: ``(B, M)``, True where a key is real; if N = M, padded queries have no part in the mean.
        width: g, as a share of the length, padding included.
    """
    N, M = weights.shape[-2:]
    rows = (weights * penalty(N, M, width).to(weights)).sum(-1)
    if key_mask is None or N != M:
        return rows.mean()
    real = key_mask[:, None].expand_as(rows)
    return rows.masked_fill(~real, 0.0).sum() / real.sum().clamp(min=1)


def guidance(calls: list[OperatorCall]) -> Tensor:
    """The mean of the loss over the operators of a model; raise ValueError without any."""
    if not calls:
        raise ValueError("no operator attended to anything that could be guided")
    # A copy: while they are collected, the calls that this makes are collected, too.
    return torch.stack([guided_loss(implied_weights(call), call.key_mask) for call in list(calls)]).mean()
