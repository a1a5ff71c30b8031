"""Endless tasks, drawn by generators that depend only on their arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Generator, Tensor

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Scalar, Spec
from attnbench.contract.task import Examples, Form, Split, stream_seed
from attnbench.errors import Unsupported

_MOST_DRAWS = 100
"""Draws in search of sequences that are not held out, before the task is given up as too small."""


class Stream:
    """A task that draws its sequences; a subclass says how in :meth:`draw`.

    Validation and test sets are drawn once and stay the same. If one of their sequences turns up in training, another
    is drawn in its place.
    """

    train_examples: int | None = None

    def __init__(
        self,
        name: str,
        shape: Shape,
        form: Form,
        *,
        settings: dict[str, Scalar],
        test: int,
        masked_share: float = 0.15,
        version: int = 1,
    ) -> None:
        """Take everything that the data depends on.

        Args:
            settings: every option that changes the drawn sequences.
            test: number of sequences to test on; half as many, at least one, are for validation.
            version: version of the generator; whoever changes its draws must increment it.

        Raises:
            Unsupported: cross-attention.
        """
        refuse_cross(name, shape)
        self.form = form
        self.test_examples = test
        self.masked_share = masked_share
        self.n = shape.seq_len
        self._label = f"{Spec.of(name, settings)} n={self.n} version={version}"
        self.digest = hashlib.sha256(self._label.encode()).hexdigest()[:16]

    def draw(self, count: int, generator: Generator) -> Examples:
        """``count`` examples, which depend only on the generator."""
        raise NotImplementedError

    def batch(self, seed: int, step: int, size: int) -> Examples:
        """Examples for one training step; raise Unsupported if nearly every possible sequence is held out."""
        return self._draw_others(size, self._generator("train", seed, step), self._held_out_keys)

    def held_out(self, split: Split, size: int) -> Iterator[Examples]:
        return in_parts(self._held_out[split], size)

    def fresh(self, seed: int, size: int) -> Iterator[Examples] | None:
        """New examples, all drawn at once so that they are the same whatever ``size`` is."""
        return in_parts(self.draw(self.test_examples, self._generator("fresh", seed, 0)), size)

    @cached_property
    def _held_out(self) -> dict[Split, Examples]:
        test = self.draw(self.test_examples, self._generator("test", 0, 0))
        validation = self._generator("validation", 0, 0)
        return {
            "test": test,
            "validation": self._draw_others(max(1, self.test_examples // 2), validation, frozenset(keys(test))),
        }

    @cached_property
    def _held_out_keys(self) -> frozenset[bytes]:
        return frozenset(key for examples in self._held_out.values() for key in keys(examples))

    def _generator(self, split: str, seed: int, step: int) -> Generator:
        return torch.Generator().manual_seed(stream_seed(self._label, split, seed, step))

    def _draw_others(self, count: int, generator: Generator, taken: frozenset[bytes]) -> Examples:
        found: list[Examples] = []
        missing = count
        for _ in range(_MOST_DRAWS):
            drawn = self.draw(missing, generator)
            rows = [row for row, key in enumerate(keys(drawn)) if key not in taken]
            if rows:
                found.append(drawn if len(rows) == missing else _rows(drawn, torch.tensor(rows)))
                missing -= len(rows)
            if not missing:
                return found[0] if len(found) == 1 else _joined(found)
        raise Unsupported(
            f"{self._label}: nearly every sequence is in the test set; choose a larger task or a lower test"
        )


def refuse_cross(name: str, shape: Shape) -> None:
    """Raise Unsupported if keys come from another sequence than queries."""
    if shape.cross:
        raise Unsupported(f"{name}: an encoder attends to its own sequence; remove kv_len")


def shuffles(count: int, size: int, generator: Generator) -> Tensor:
    """``count`` permutations of ``size``, int64 ``(count, size)``."""
    # In float64 no two numbers are equal; with equal ones the order would depend on the sort.
    return torch.rand(count, size, dtype=torch.float64, generator=generator).argsort(1)


def choices(count: int, size: int, most: int, generator: Generator) -> Tensor:
    """The first ``most`` of ``count`` permutations of ``size``, int64 ``(count, most)``, in a tenth of the time."""
    return torch.rand(count, size, dtype=torch.float64, generator=generator).topk(most).indices


def keys(examples: Examples) -> list[bytes]:
    """Sixteen bytes that identify each sequence."""
    rows = examples.tokens.flatten(1).contiguous().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def in_parts(examples: Examples, size: int) -> Iterator[Examples]:
    """The same examples, at most ``size`` at a time."""
    for rows in torch.split(torch.arange(len(examples.labels)), size):
        yield _rows(examples, rows)


def _rows(examples: Examples, rows: Tensor) -> Examples:
    mask = examples.key_mask
    return Examples(examples.tokens[rows], examples.labels[rows], None if mask is None else mask[rows])


def _joined(parts: list[Examples]) -> Examples:
    masks = [part.key_mask for part in parts if part.key_mask is not None]
    return Examples(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat(masks) if masks else None,
    )
