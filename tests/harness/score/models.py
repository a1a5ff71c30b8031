"""Small cells and tasks that trainings are tried on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.task import Examples, Form, Split, stream_seed
from attnbench.suite.cell import Cell, ModelSize, Training


def cell(variant: str = "softmax", task: str = "recall:pairs=4,values=4,test=64", **changes: Any) -> Cell:
    rules = Training(steps=changes.pop("steps", 12), learning_rate=changes.pop("rate", 4e-3), evaluations=3)
    rules = replace(rules, **{name: changes.pop(name) for name in list(changes) if hasattr(rules, name)})
    shape = Shape(changes.pop("batch", 8), 2, changes.pop("n", 16), 8)
    base = Cell(
        "s",
        "w",
        parse_spec(variant),
        shape,
        level="model",
        pass_="training",
        measure=("score",),
        model=ModelSize(2, 32, positions="sinusoid"),
        task=parse_spec(task),
        training=rules,
    )
    return replace(base, **changes)


class First:
    """Which of four symbols stands first? Any mixing learns this task in a few steps."""

    form = Form((4,), 4)
    train_examples = None
    test_examples = 256
    digest = "0" * 16
    masked_share = 0.5

    def __init__(self, n: int = 12) -> None:
        self.n = n

    def draw(self, size: int, *names: object) -> Examples:
        generator = torch.Generator().manual_seed(stream_seed("first", *names))
        tokens = torch.randint(4, (size, self.n), generator=generator)
        return Examples(tokens, tokens[:, 0].clone())

    def batch(self, seed: int, step: int, size: int) -> Examples:
        return self.draw(size, "train", seed, step)

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        whole = self.draw(self.test_examples, split)
        for begin in range(0, self.test_examples, size):
            yield Examples(whole.tokens[begin : begin + size], whole.labels[begin : begin + size])

    def fresh(self, seed: int, size: int) -> Iterator[Examples] | None:
        yield self.draw(self.test_examples, "fresh", seed)
