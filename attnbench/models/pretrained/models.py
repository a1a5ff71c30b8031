"""Look up a model by its name, with the text that it reads: trees of ListOps for the project's encoder."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from attnbench.catalogue.tasks.listops import CLOSE, OPERATORS, TOKENS, ListOps, subtree_values
from attnbench.contract.task import stream_seed
from attnbench.errors import UsageError
from attnbench.models.pretrained.gated_model import GatedModel
from attnbench.models.pretrained.language_model import LanguageModel
from attnbench.models.pretrained.listops.small_encoder import LONGEST
from attnbench.models.pretrained.loading import open_language_model
from attnbench.models.pretrained.own_encoder import NAME, OwnEncoder
from attnbench.models.pretrained.subject import Subject, Text, Windows

_LENGTH = 512


def open_model(name: str, length: int | None, text: Path | None, *, gates: bool = False) -> tuple[Subject, Text]:
    """The model of this name, and windows of ``length`` tokens for it, of a file ``text`` or the model's own.

    ``name`` is ``listops`` or as for :func:`~attnbench.models.pretrained.loading.open_language_model`; ``length`` is by
    default :func:`default_length`. With ``gates`` the layers are its recurrences
    (:class:`~attnbench.models.pretrained.gated_model.GatedModel`). Raises UsageError and Unsupported.
    """
    length = length or default_length(name)
    if name != NAME:
        return open_language_model(name, length, text, GatedModel if gates else LanguageModel)
    if gates:
        raise UsageError(f"the model {NAME} has attention alone; remove --gates")
    if text is not None:
        raise UsageError(f"the model {NAME} reads trees of ListOps; remove --text")
    return OwnEncoder(length), Trees(length)


def default_length(name: str) -> int:
    """Tokens of a window: 128 with ``listops``, and 512 with all other models."""
    return LONGEST if name == NAME else _LENGTH


_VERSION = 1
_FIRST_OPERATOR = TOKENS.index(OPERATORS[0])
_SHORTER = 10
"""A tree is drawn up to a tenth shorter than wanted: one in thousands would have exactly the length."""
_DRAWS = 1000
"""Draws for each window, before its length is given up as too short."""


class Trees:
    """Trees of ListOps, each with a question at every closing bracket, as a text of windows.

    They are drawn without end by the rules of :class:`~attnbench.catalogue.tasks.listops.ListOps`. A slightly short
    tree is filled up with digits, so that no window needs padding. Trees to evaluate on have a seed of their own; equal
    trees of a training are replaced. Raises UsageError: no tree has this length, or all of them are to evaluate on.
    """

    name = "ListOps trees"
    most: int | None = None

    def __init__(self, length: int) -> None:
        self.length = length
        try:
            self._trees = ListOps(min_length=max(4, length - length // _SHORTER), max_length=length)
        except ValueError:
            raise UsageError(f"--length {length}: no ListOps tree has as many tokens; take 4 or more") from None
        self.digest = f"{stream_seed('pretrained trees', _VERSION, length):016x}"
        self._held = frozenset[tuple[int, ...]]()

    def held_out(self, count: int) -> Windows:
        trees = self._drawn(random.Random(stream_seed("pretrained trees", "held out", self.length)), count, frozenset())
        self._held = frozenset(map(tuple, trees))
        return _windows(trees)

    def batch(self, seed: int, step: int, size: int) -> Windows:
        rng = random.Random(stream_seed("pretrained trees", "train", seed, step))
        return _windows(self._drawn(rng, size, self._held))

    def _drawn(self, rng: random.Random, count: int, others: frozenset[tuple[int, ...]]) -> list[list[int]]:
        trees: list[list[int]] = []
        for _ in range(_DRAWS * count):
            tree = filled(self._trees.sample(rng), self.length, self._trees.max_args, rng)
            if len(tree) == self.length and tuple(tree) not in others:
                trees.append(tree)
            if len(trees) == count:
                return trees
        raise UsageError(f"--length {self.length}: nearly all trees are held out; take fewer --windows or longer ones")


def filled(tree: list[int], length: int, max_args: int, rng: random.Random) -> list[int]:
    """The tree with digits as further last arguments, up to ``max_args`` each, until it has ``length`` tokens."""
    tree = list(tree)
    while len(tree) < length and (ends := _ends_with_room(tree, max_args)):
        tree.insert(rng.choice(ends), 1 + rng.randrange(10))
    return tree


def _ends_with_room(tree: list[int], max_args: int) -> list[int]:
    ends: list[int] = []
    counts: list[int] = []
    for position, token in enumerate(tree):
        if token == CLOSE:
            if counts.pop() < max_args:
                ends.append(position)
        else:
            if counts:
                counts[-1] += 1
            if token >= _FIRST_OPERATOR:
                counts.append(0)
    return ends


def _windows(trees: list[list[int]]) -> Windows:
    return Windows(torch.tensor(trees), torch.tensor([subtree_values(tree) for tree in trees]))
