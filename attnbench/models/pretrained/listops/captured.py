"""Train an encoder on ListOps and store its weights, and one long sequence whose q, k and v the input takes.

``python -m attnbench.models.pretrained.listops.captured --out listops.safetensors`` makes the shipped input
``listops``, with one thread and fixed seeds, so that the same machine and torch make the same file again.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.catalogue.tasks.listops import PAD, TOKENS, ListOps
from attnbench.contract.task import NO_LABEL

logger = logging.getLogger(__name__)

LAYERS, HEADS, HEAD_DIM = 4, 2, 64
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 100


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of training steps on trees of one range of lengths."""

    trees: ListOps
    batch: int
    steps: int


CURRICULUM = (
    Stage(ListOps(min_length=8, max_length=32), batch=96, steps=1500),
    Stage(ListOps(min_length=32, max_length=128), batch=24, steps=1000),
    Stage(ListOps(min_length=128, max_length=512), batch=6, steps=800),
    Stage(ListOps(), batch=2, steps=500),
)
"""Stages from short trees to long ones; in all far less than the Long Range Arena's 5,000 steps of 32 long trees."""


def train(curriculum: Sequence[Stage], seed: int, head_dim: int | None = None) -> ListOpsEncoder:
    """Train an encoder on the value at every closing bracket, with ``head_dim`` or :data:`HEAD_DIM` as width of a head.

    That is a stronger signal than the Long Range Arena's one answer per sequence. The answer to the whole tree is read
    at its last bracket, not at a token of its own.
    """
    torch.manual_seed(seed)
    model = ListOpsEncoder(vocab=len(TOKENS), classes=10, layers=LAYERS, heads=HEADS, head_dim=head_dim or HEAD_DIM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    total = sum(stage.steps for stage in curriculum)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, 1 - step / total))
    step, started = 0, time.monotonic()
    for number, stage in enumerate(curriculum):
        batches = stage.trees.batches(stage.batch, seed=seed + number)
        for _ in range(stage.steps):
            batch = next(batches)
            asked, real = batch.labels != NO_LABEL, batch.tokens != PAD
            logits = model(batch.tokens, None if bool(real.all()) else real)[asked]
            loss = cross_entropy(logits, batch.labels[asked])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation is missing
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            step += 1
            if step % 50 == 0:
                right = float((logits.argmax(-1) == batch.labels[asked]).float().mean())
                elapsed = time.monotonic() - started
                logger.info("%5.0f s  step %d/%d  loss %.3f  brackets %.3f", elapsed, step, total, loss.item(), right)
    return model.eval()


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of right answers; guessing gives 0.1."""

    trees: int
    answers: float
    answers_majority: float
    """Share for whole trees of the best constant answer, chosen on these very trees."""
    brackets: float
    brackets_majority: float


@torch.no_grad()
def accuracy(model: ListOpsEncoder, trees: ListOps, count: int, seed: int) -> Accuracy:
    """Accuracy on ``count`` trees drawn from ``seed``."""
    batches = trees.batches(1, seed)
    right, values, roots = [], [], []
    for _ in range(count):
        batch = next(batches)
        asked = batch.labels[0] != NO_LABEL
        values.append(batch.labels[0, asked])
        right.append((model(batch.tokens)[0, asked].argmax(-1) == values[-1]).float())
        roots.append(torch.arange(len(values[-1])) == len(values[-1]) - 1)
    all_right, all_values, root = torch.cat(right), torch.cat(values), torch.cat(roots)
    return Accuracy(
        trees=count,
        answers=_rounded(all_right[root].mean()),
        answers_majority=_rounded(all_values[root].bincount().max() / count),
        brackets=_rounded(all_right.mean()),
        brackets_majority=_rounded(all_values.bincount().max() / len(all_values)),
    )


def logit_statistics(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Standard deviation of the logits, and mean number of keys that a query attends to, each ``(L, H)``.

    q is ``(L, H, N, D)``, k ``(L, H, M, D)``; the number of keys is exp(entropy), M for uniform attention.
    """
    std, keys = torch.empty(q.shape[:2]), torch.empty(q.shape[:2])
    for layer, head in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        logits = q[layer, head].float() @ k[layer, head].float().T * q.shape[-1] ** -0.5
        log_weights = logits.log_softmax(-1)
        std[layer, head] = logits.std()
        keys[layer, head] = (log_weights.exp() * log_weights).sum(-1).neg().exp().mean()
    return std, keys


def make(out: Path, curriculum: Sequence[Stage], *, seed: int, length: int, test_trees: int) -> dict[str, object]:
    """Train, test, draw a tree of exactly ``length`` tokens and write ``out``; return the metadata."""
    model = train(curriculum, seed)
    score = accuracy(model, curriculum[-1].trees, test_trees, seed=seed + 1000)
    sequence = ListOps(length, length).sample(random.Random(seed + 2000))
    q, k, _ = (tensor.half() for tensor in model.capture(torch.tensor([sequence])))
    std, keys = logit_statistics(q[0], k[0])
    about: dict[str, object] = {
        "made_by": "python -m attnbench.models.pretrained.listops.captured",
        "task": "ListOps, rules of the Long Range Arena",
        "seed": seed,
        "curriculum": [asdict(stage) for stage in curriculum],
        "learning_rate": LEARNING_RATE,
        "test": asdict(score),
        "logit_std": [[_rounded(x) for x in row] for row in std],
        "keys_attended": [[_rounded(x) for x in row] for row in keys],
        "tokens": sequence,
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
    }
    # One key: safetensors writes several in a random order, and the file would differ each time.
    metadata = {"attnbench": json.dumps(about, sort_keys=True)}
    last = f"blocks.{LAYERS - 1}"
    unread = (f"{last}.merge", f"{last}.feed", "norm", "classify")  # behind the last q, k and v
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if not name.startswith(unread)}
    save_file(weights, out, metadata)
    return about


def _rounded(x: Tensor) -> float:
    return round(float(x), 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m attnbench.models.pretrained.listops.captured", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("listops.safetensors"), help="file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the captured sequence")
    parser.add_argument("--test-trees", type=int, default=400)
    parser.add_argument(
        "--shorten", type=int, default=1, metavar="FACTOR", help="divide every stage's steps, to try out"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # the sums, and so the file, depend on the number of threads
    curriculum = [Stage(s.trees, s.batch, max(1, s.steps // options.shorten)) for s in CURRICULUM]
    about = make(options.out, curriculum, seed=options.seed, length=options.length, test_trees=options.test_trees)
    del about["tokens"]
    logger.info("%s\n%s", options.out, json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
