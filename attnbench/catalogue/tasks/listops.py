"""ListOps by the rules of the Long Range Arena: nested MIN, MAX, MED and SM (sum modulo 10) of digits.

Source: Nangia & Bowman 2018, arXiv:1804.06028, in the form of Tay et al. 2020, arXiv:2011.04006, section 2.2.1.

The rules are those released with the Long Range Arena. A node less than ``max_depth`` deep is an operator with
probability 1/4, else a digit; the root has depth 1. An operator takes 2 to ``max_args`` arguments. Operators, digits
and argument counts are uniform. MED of an even count is the mean of the middle two, rounded down. Trees of more than
500 and fewer than 2000 tokens are kept.

Two things differ. There the 100,000 examples of the three splits are made once and are distinct; here every seed is an
endless stream. There round brackets are written, then removed before the model sees them; here they are never written,
which gives the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attnbench.contract.task import NO_LABEL, Examples

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("<pad>", *map(str, range(10)), *OPERATORS, "]")
"""The position is the token id; a digit's id is the digit + 1."""

PAD = 0
CLOSE = TOKENS.index("]")

_FIRST_OPERATOR = TOKENS.index("[MIN")
_OPERATOR_PROBABILITY = 0.25
_POOL = 16  # number of batches drawn together and sorted by length, so that there is little padding


@dataclass(frozen=True, slots=True)
class ListOps:
    """Rules of the trees; the defaults are the Long Range Arena's. Raises ValueError if no tree has such a length."""

    min_length: int = 501
    """Fewest tokens of a tree, counting digits, operators and closing brackets."""
    max_length: int = 1999
    max_depth: int = 10
    """Depth of the deepest digit; the root has depth 1."""
    max_args: int = 10

    def __post_init__(self) -> None:
        largest = 1
        for _ in range(self.max_depth - 1):
            largest = 2 + self.max_args * largest
        smallest = 4  # [MIN 1 2 ]
        if self.max_args < 2 or not max(smallest, self.min_length) <= min(largest, self.max_length):
            raise ValueError(f"no tree can be drawn from {self}")

    def sample(self, rng: random.Random) -> list[int]:
        """Token ids of one tree whose root is an operator; trees are drawn until the length fits."""
        while True:
            tokens: list[int] = []
            self._operator(rng, 1, tokens)
            if self.min_length <= len(tokens) <= self.max_length:
                return tokens

    def _operator(self, rng: random.Random, depth: int, tokens: list[int]) -> None:
        tokens.append(_FIRST_OPERATOR + rng.randrange(len(OPERATORS)))
        for _ in range(rng.randint(2, self.max_args)):
            if len(tokens) > self.max_length:
                return  # already too long: sample() draws another
            if depth + 1 < self.max_depth and rng.random() < _OPERATOR_PROBABILITY:
                self._operator(rng, depth + 1, tokens)
            else:
                tokens.append(1 + rng.randrange(10))
        tokens.append(CLOSE)

    def batches(self, batch: int, seed: int) -> Iterator[Examples]:
        """Endless batches of sequences of similar length; the same seed gives the same ones."""
        rng = random.Random(seed)
        while True:
            pool = sorted((self.sample(rng) for _ in range(batch * _POOL)), key=len)
            groups = [pool[start : start + batch] for start in range(0, len(pool), batch)]
            rng.shuffle(groups)
            yield from map(labelled, groups)


def labelled(trees: list[list[int]], n: int | None = None) -> Examples:
    """Trees padded at the end to n tokens, or to the longest; the label of each closing bracket is the value of what it
    closes."""
    tokens = torch.full((len(trees), n or max(map(len, trees))), PAD)
    labels = torch.full_like(tokens, NO_LABEL)
    for row, tree in enumerate(trees):
        tokens[row, : len(tree)] = torch.tensor(tree)
        labels[row, : len(tree)] = torch.tensor(subtree_values(tree))
    return Examples(tokens, labels, tokens != PAD)


def evaluate(tokens: list[int]) -> int:
    """The value, 0 to 9, of a whole tree. Raises ValueError: this is not one tree whose root is an operator."""
    return subtree_values(tokens)[-1]


def subtree_values(tokens: list[int]) -> list[int]:
    """The value of what each closing bracket closes, at that bracket; elsewhere ``NO_LABEL``. Raises ValueError:
    this is not one tree whose root is an operator."""
    result = [NO_LABEL] * len(tokens)
    stack: list[tuple[int, list[int]]] = []
    for position, token in enumerate(tokens):
        if token >= _FIRST_OPERATOR and token != CLOSE:
            if position and not stack:
                break
            stack.append((token, []))
        elif not stack:
            break
        elif token == CLOSE:
            operator, arguments = stack.pop()
            if not arguments:
                break
            result[position] = _apply(TOKENS[operator], arguments)
            if stack:
                stack[-1][1].append(result[position])
        else:
            stack[-1][1].append(token - 1)
    if not tokens or stack or result[-1] == NO_LABEL:
        raise ValueError(f"not a ListOps tree: {to_text(tokens)}")
    return result


def _apply(operator: str, arguments: list[int]) -> int:
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered, middle = sorted(arguments), len(arguments) // 2
    return ordered[middle] if len(arguments) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def to_text(tokens: list[int]) -> str:
    """``[MIN 4 [SM 5 6 ] ]``."""
    return " ".join(TOKENS[token] for token in tokens)
