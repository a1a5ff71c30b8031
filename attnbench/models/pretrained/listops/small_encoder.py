"""Train a smaller encoder on short trees of ListOps: the trained model that ``attnbench swap listops`` starts from.

``python -m attnbench.models.pretrained.listops.small_encoder --out encoder.safetensors`` makes the shipped file, with
one thread and fixed seeds. It is half as wide as the encoder of the input ``listops``, and saw trees of at most 128
tokens, so that a swap with some training takes seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.catalogue.tasks.listops import TOKENS, ListOps
from attnbench.models.pretrained.listops.captured import HEADS, LAYERS, LEARNING_RATE, Stage, accuracy, train

logger = logging.getLogger(__name__)

WEIGHTS = Path(__file__).parent / "data" / "encoder.safetensors"
"""The shipped weights, in half precision; the metadata says how they were made."""
HEAD_DIM = 32
CURRICULUM = (
    Stage(ListOps(min_length=8, max_length=32), batch=48, steps=1000),
    Stage(ListOps(min_length=32, max_length=128), batch=12, steps=800),
)
LONGEST = CURRICULUM[-1].trees.max_length


def untrained_encoder() -> ListOpsEncoder:
    """An encoder of the shipped one's sizes."""
    return ListOpsEncoder(vocab=len(TOKENS), classes=10, layers=LAYERS, heads=HEADS, head_dim=HEAD_DIM)


def trained_encoder() -> ListOpsEncoder:
    """The shipped encoder, in float32, ready to answer."""
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn, and then replaced
        model = untrained_encoder()
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()})
    return model.eval()


def make(out: Path, curriculum: Sequence[Stage], *, seed: int, test_trees: int) -> dict[str, object]:
    """Train, test and write the weights to ``out``; return the metadata."""
    model = train(curriculum, seed, HEAD_DIM)
    about: dict[str, object] = {
        "made_by": "python -m attnbench.models.pretrained.listops.small_encoder",
        "task": "ListOps, rules of the Long Range Arena, short trees",
        "seed": seed,
        "curriculum": [asdict(stage) for stage in curriculum],
        "learning_rate": LEARNING_RATE,
        "test": asdict(accuracy(model, curriculum[-1].trees, test_trees, seed=seed + 1000)),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
    }
    weights = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, out, {"attnbench": json.dumps(about, sort_keys=True)})
    return about


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m attnbench.models.pretrained.listops.small_encoder", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("encoder.safetensors"), help="file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-trees", type=int, default=400)
    parser.add_argument("--shorten", type=int, default=1, metavar="FACTOR", help="divide every stage's steps")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)  # the sums, and so the file, depend on the number of threads
    curriculum = [Stage(s.trees, s.batch, max(1, s.steps // options.shorten)) for s in CURRICULUM]
    about = make(options.out, curriculum, seed=options.seed, test_trees=options.test_trees)
    logger.info("%s\n%s", options.out, json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
