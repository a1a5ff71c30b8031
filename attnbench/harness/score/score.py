"""One training of one model on one task, and the score that it ends with."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.stack import refusal, turns
from attnbench.catalogue.build import build
from attnbench.contract.capabilities import Decoding
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.task import NO_LABEL, Examples, Task, make_task, stream_seed
from attnbench.contract.variant import VARIANTS
from attnbench.errors import BrokenContract, Diverged, Unsupported, UsageError
from attnbench.harness.score.accuracy import Answers, answer, chance
from attnbench.harness.score.loop import TELL, Caller, Checkpoint, Course, Lesson, Loss, train
from attnbench.laws.exact_error import measure_error
from attnbench.measure.energy import Meter, energy_counters
from attnbench.measure.memory import state_bytes
from attnbench.models.encoder import Encoder, cross_entropy
from attnbench.results.manifest import digest
from attnbench.suite.cell import Cell, ModelSize

_EXACT = 1e-5
"""A relative error below this is rounding in float32."""
_ALIKE = 0.1
"""Share by which the number of parameters may differ from softmax's without a warning."""
_TARGET = 0.9
"""The target, as a share of the way from chance to 1."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of a training."""

    columns: dict[str, Any]
    points: list[dict[str, Any]]
    """The learning curve."""
    warnings: list[str]


def score(
    cell: Cell,
    *,
    folder: Path | None = None,
    tell: Callable[[int, int], None] = lambda step, steps: None,
    keep: bool = False,
    alone: bool = False,
) -> Scored:
    """Train the encoder around a variant from its seed for a fixed number of steps, and test it once.

    With ``cell.test_len`` the same trained module reads test examples of that length. Validation keeps the length of
    the training, so that no rate is chosen by a test.

    Args:
        folder: for a checkpoint while the training goes on; None for none.
        keep: leave the checkpoint of the end there, from which other tests of this training begin.
        tell: called about once a second with the steps done and all steps.
        alone: no other training computes meanwhile, so that the machine's counters give the energy of this one.

    Raises:
        Unsupported: the task or the variant does not allow this cell, the model cannot be tested at this length, or the
            variant would be softmax attention here.
        BrokenContract: the score was not earned (see :func:`hold_to_unseen` and :class:`Leaks`).
        Diverged: the loss is not finite.
        UsageError: unknown names or options, data that cannot be read.
    """
    assert cell.task is not None
    assert cell.training is not None
    rules, size, batch, device = cell.training, cell.model or ModelSize(), cell.shape.B, cell.device
    if cell.dtype != "float32":
        raise Unsupported(f"a training in {cell.dtype}: models are trained in float32; remove dtype")
    task = make_task(cell.task, cell.shape)
    _allow(cell, task.batch(cell.seed, 0, batch))
    model = Encoder(cell.variant, cell.shape, size, form=task.form, seed=cell.seed).to(device)
    file = folder / f"{cell.whole_training.cell_id}.pt" if folder else None
    try:
        tested = _tested(cell, task, model)
    except Unsupported:
        if file is not None and not keep:  # the tests before this one have left it
            file.unlink(missing_ok=True)
        raise
    whole = rules.pretrain_steps + rules.steps
    step_done = _told_of_each_call(model, lambda done: tell(done, whole))
    leaks = Leaks(task.held_out("test", batch))
    form = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()}
    owner = {"cell": cell.whole_training.cell_id, "data": task.digest, "model": digest(json.dumps(form))}
    after = Checkpoint(file, owner, keep=keep) if file else None
    before = Checkpoint(file.with_suffix(".before.pt"), owner) if file else None
    meter = Meter(energy_counters(device) if alone else ())
    checkpoints, spent = [one for one in (before, after) if one is not None], 0.0

    def restore(extra: dict[str, Any]) -> None:
        nonlocal spent
        spent = extra["spent"]
        leaks.add(extra["leaks"])

    caller = Caller(
        on_batch=leaks.look,
        extra=lambda: {"leaks": leaks.seen, "spent": spent},
        restore=restore,
        tell=lambda step: step_done(rules.pretrain_steps + step),
    )
    try:
        if rules.pretrain_steps and (after is None or after.load() is None):
            fill = filling_loss(model, task.masked_share, seed=cell.seed, device=device)
            lesson = Lesson(fill, rules.pretrain_steps, "pretrain")
            filling, hooks = Filling(model, seed=cell.seed).to(device), replace(caller, tell=step_done)
            spent = train(filling, task, cell, lesson=lesson, checkpoint=before, caller=hooks, meter=meter).train_s
        course = train(model, task, cell, checkpoint=after, caller=caller, meter=meter)
        earned = answer(model, tested.held_out("test", batch), device)
        guessing = chance(tested.held_out("test", batch))
        hold_to_unseen(model, tested, batch, earned, device)
        leaked = leaks.warning()
    except (BrokenContract, Diverged):  # which another try would repeat
        for one in checkpoints:
            one.remove()
        raise
    for one in checkpoints:
        one.remove()
    low, high = earned.interval()
    params, wanted = _trainable(model), _trainable(Encoder("softmax", cell.shape, size, form=task.form))
    ratio = params / wanted
    warnings = [leaked, *_doubts(ratio, rules.guide), *(one.trouble for one in checkpoints)]
    columns = {
        "score_kind": "token accuracy" if task.form.per_token else "accuracy",
        "score": earned.accuracy,
        "score_low": low,
        "score_high": high,
        "chance_score": guessing,
        "val_score": course.points[-1].val_score,
        "train_loss": sum(course.last_losses) / len(course.last_losses),
        "test_loss": earned.loss,
        "train_examples": min(task.train_examples or rules.steps * batch, rules.steps * batch),
        "test_examples": len(earned.right),
        "best_step": rules.steps,
        "trainable_params": params,
        "params_ratio": ratio,
        "param_bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "state_bytes": _state_bytes(cell, size),
        "train_s": spent + course.train_s,
        "target_s": _time_to_target(course, chance(task.held_out("test", batch)), spent),
        "energy_j": course.energy_j,
        "data_digest": tested.digest,
    }
    return Scored(columns, [asdict(point) for point in course.points], [one for one in warnings if one])


def _doubts(ratio: float, guide: float) -> list[str]:
    size = f"{ratio:.2f} times the parameters of softmax" if abs(ratio - 1) > _ALIKE else ""
    guided = f"trained to attend near the diagonal: guide={guide:g}, which train_loss holds as well" if guide else ""
    return [size, guided]


def _told_of_each_call(model: nn.Module, tell: Callable[[int], None]) -> Callable[[int], None]:
    """Have ``tell`` called about once a second while the model is called, since tests of it take no steps.

    Returns the function to call with the steps that are done, which passes them on.
    """
    reached, last = 0, time.monotonic()

    def done(steps: int) -> None:
        nonlocal reached, last
        reached, last = steps, time.monotonic()
        tell(steps)

    def called(*_: object) -> None:
        if time.monotonic() - last >= TELL:
            done(reached)

    model.register_forward_hook(called)
    return done


def _allow(cell: Cell, examples: Examples) -> None:
    variant = VARIANTS.get(cell.variant.name)
    if cell.training and cell.training.guide and variant.kind == "mixer":
        raise Unsupported(f"guide: {variant.name} replaces the layer, and has no weights of pairs to be guided")
    if examples.key_mask is not None and not bool(examples.key_mask.all()):
        reason = refusal(cell.variant, cell.shape, key_mask=True)
        if reason:
            raise Unsupported(f"{cell.task} has padding: {reason}")
    if variant.kind == "mixer" or variant.claims(cell.variant, causal=cell.shape.causal).exact:
        return
    one = replace(cell, shape=replace(cell.shape, batch=1), inputs=Spec("gaussian"), padding=0.0, error_draws=1)
    error = measure_error(replace(one, device="cpu")).rel_error
    if error is not None and error < _EXACT:
        n = cell.shape.N
        raise Unsupported(
            f"with these options it is softmax attention at n = {n}: every pair is seen; give it a smaller budget"
        )


def _tested(cell: Cell, task: Task, model: Encoder) -> Task:
    """The task at the length of the test, for which the model is given room."""
    shape, at = cell.shape, cell.test_len
    if at is None or cell.task is None:
        return task
    longer = VARIANTS.get(cell.variant.name).claims(cell.variant, causal=shape.causal).longer
    try:
        if not longer:
            raise Unsupported(f"it is made for n = {shape.N} alone: {longer}")
        if shape.query_stride > 1:
            raise Unsupported("query_stride: a layer with fewer queries is made for one length")
        if at > shape.N:
            model.make_room(at - shape.N)
        tested = make_task(cell.task, replace(shape, seq_len=at))
    except (Unsupported, UsageError) as reason:
        raise Unsupported(f"test_len={at}: {reason}") from None
    if tested.form != task.form:
        raise Unsupported(f"test_len={at}: {cell.task.label} has other tokens or answers at that length")
    return tested


def _time_to_target(course: Course, guessing: float, spent: float) -> float | None:
    target = guessing + _TARGET * (1 - guessing)
    return next((spent + point.cpu_s for point in course.points if point.val_score >= target), None)


def _trainable(model: nn.Module) -> int:
    return sum(t.numel() for t in model.parameters() if t.requires_grad)


def _state_bytes(cell: Cell, size: ModelSize) -> int | None:
    """Bytes that all layers keep of a sequence to decode the next token, in the causal form; None without decoding."""
    shape = cell.shape
    length = (cell.test_len or shape.N) + shape.added_tokens
    causal = replace(shape, batch=1, seq_len=length, kv_len=None, causal=True, added_tokens=0, query_stride=1)
    if refusal(cell.variant, causal, decode=True):
        return None
    in_turn = turns(cell.variant)
    bytes_of = {spec: _layer_state_bytes(spec, causal, cell.seed) for spec in dict.fromkeys(in_turn)}
    return sum(bytes_of[spec] for spec in islice(cycle(in_turn), size.layers))


def _layer_state_bytes(spec: Spec, shape: Shape, seed: int) -> int:
    module = build(spec, shape, seed=seed)
    sizes = ((shape.H, shape.D), (shape.K, shape.D), (shape.K, shape.E))
    prompt = [torch.zeros(1, heads, shape.N, width) for heads, width in sizes]
    if VARIANTS.get(spec.name).kind == "mixer":
        prompt = [torch.zeros(1, shape.N, shape.C)]
    with torch.inference_mode():
        return state_bytes(cast(Decoding, module).begin(*prompt))


class Filling(nn.Module):
    """The encoder with a vector for masked tokens, and a head that fills them in, before the task is learnt.

    Amos et al. 2023, arXiv:2310.02980: trained from scratch, models look further apart than they are. A model that
    first learns to fill in masked tokens of the same data already knows the kind of data. No further data is used.
    """

    def __init__(self, encoder: Encoder, *, seed: int) -> None:
        if encoder.query_stride > 1:
            raise Unsupported("query_stride: masked tokens cannot be filled in where outputs are fewer than tokens")
        super().__init__()
        self.encoder = encoder
        width = encoder.norm.normalized_shape[0]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed("filling", seed))
            self.mask = nn.Parameter(torch.randn(width))
            self.heads = nn.ModuleList(nn.Linear(width, ids) for ids in encoder.form.vocab)

    def forward(self, tokens: Tensor, hidden: Tensor, *, key_mask: Tensor | None = None) -> list[Tensor]:
        """Logits ``(B, N, vocab)`` of each part of the tokens ``(B, N)`` or ``(B, N, P)``; ``hidden`` ``(B, N)``."""
        x = torch.where(hidden[:, :, None], self.mask, self.encoder.embedded(tokens))
        x = self.encoder.in_context(x, key_mask)
        return [head(x) for head in self.heads]


def filling_loss(encoder: Encoder, share: float, *, seed: int, device: str) -> Loss:
    """Mean cross-entropy of the masked tokens: ``share`` of the real ones, at least one, drawn again in each step."""
    towers = encoder.form.towers

    def loss(model: nn.Module, examples: Examples, step: int) -> Tensor:
        tokens, mask = examples.tokens, examples.key_mask
        if towers > 1:
            tokens, mask = tokens.flatten(0, 1), None if mask is None else mask.flatten(0, 1)
        generator = torch.Generator().manual_seed(stream_seed("masked", seed, step))
        drawn = torch.rand(tokens.shape[:2], generator=generator)
        drawn = drawn if mask is None else drawn.masked_fill(~mask, 1.0)
        hidden = ((drawn < share) | (drawn == drawn.min())).to(device)
        tokens = tokens.to(device)
        found = model(tokens, hidden, key_mask=None if mask is None else mask.to(device))
        parts = tokens.unbind(-1) if tokens.ndim == 3 else (tokens,)
        losses = [
            cross_entropy(logits.float(), part.masked_fill(~hidden, NO_LABEL))
            for logits, part in zip(found, parts, strict=True)
        ]
        return torch.stack(losses).mean()

    return loss


_STANDARD_ERRORS = 5
"""Standard errors that a difference may have by chance."""
_LEAKED = 0.01
"""Share of the test that may have been trained on, as a note in the row; more is an error of the task."""


def hold_to_unseen(model: Callable[..., Tensor], task: Task, size: int, earned: Answers, device: str) -> None:
    """Ask about examples drawn now, from a seed that cannot be known, unless the task has only stored ones.

    Raises:
        BrokenContract: it is better at the test than chance explains.
    """
    fresh = task.fresh(int.from_bytes(os.urandom(7)), size)
    if fresh is None:
        return
    unseen = answer(model, fresh, device)
    if earned.accuracy - unseen.accuracy > _STANDARD_ERRORS * earned.spread(unseen) + 1e-9:
        raise BrokenContract(
            f"it knows the test: {earned.accuracy:.2f} of its answers are right there, and {unseen.accuracy:.2f} on "
            "examples that were drawn after the training"
        )


class Leaks:
    """Counts the sequences of the test that a training saw."""

    def __init__(self, test: Iterable[Examples]) -> None:
        self._test = {one for some in test for one in _digests(some)}
        self._seen: set[bytes] = set()

    def look(self, examples: Examples) -> None:
        """Look at the examples of a step of the training."""
        self._seen |= self._test.intersection(_digests(examples))

    def warning(self) -> str | None:
        """The row's warning about leaks; None without any. Raises BrokenContract if over a hundredth of the test
        leaked."""
        count, whole = len(self._seen), len(self._test)
        if count > _LEAKED * whole:
            raise BrokenContract(f"{count} of the {whole} test sequences were trained on: the task gives its test away")
        return f"{count} of the {whole} test sequences were trained on" if count else None

    @property
    def seen(self) -> list[str]:
        """The sequences seen, for a checkpoint."""
        return sorted(one.hex() for one in self._seen)

    def add(self, seen: Iterable[str]) -> None:
        """Add the content of a checkpoint."""
        self._seen |= {bytes.fromhex(one) for one in seen}


def _digests(examples: Examples) -> Iterator[bytes]:
    for sequence in examples.tokens.numpy():
        yield hashlib.blake2b(sequence.tobytes(), digest_size=8).digest()
