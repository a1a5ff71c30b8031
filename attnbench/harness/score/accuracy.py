"""The share of right answers, and its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from attnbench.contract.task import NO_LABEL, Examples
from attnbench.models.encoder import cross_entropy

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a model, as numbers for each sequence."""

    right: np.ndarray
    asked: np.ndarray
    loss: float
    """Mean cross-entropy of the requested answers."""
    per_token: bool

    @property
    def accuracy(self) -> float:
        """Share of the answers that are right."""
        return float(self.right.sum() / max(1, self.asked.sum()))

    def interval(self) -> tuple[float, float]:
        """95 % interval over test examples: Wilson's.

        For several answers a sequence it is the interval of a bootstrap over sequences, and at least Wilson's: all
        resamples are alike if no answer is wrong.
        """
        low, high = _wilson(int(self.right.sum()), max(1, int(self.asked.sum())))
        if not self.per_token:
            return low, high
        random, shares = np.random.default_rng(0), list[float]()
        for _ in range(_RESAMPLES):  # one after the other: all at once take gigabytes for a long test
            drawn = random.integers(len(self.right), size=len(self.right))
            shares.append(self.right[drawn].sum() / max(1, self.asked[drawn].sum()))
        least, most = np.quantile(shares, (0.025, 0.975))
        return min(low, float(least)), max(high, float(most))

    def spread(self, other: Answers) -> float:
        """Standard error of the difference between two accuracies of one model, from all sequences of both: those of a
        small test alone may be all right, or all wrong, by chance."""
        parts = [one.right / np.maximum(1, one.asked) for one in (self, other)]
        return float(np.concatenate(parts).std(ddof=1) * np.sqrt(sum(1 / len(part) for part in parts)))


def _wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927): the shares that a normal test does not reject."""
    z = NormalDist().inv_cdf(0.975)
    share, scale = right / of, 1 + z**2 / of
    half = z * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    middle = share + z**2 / (2 * of)
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def answer(model: Callable[..., Tensor], examples: Iterable[Examples], device: str) -> Answers:
    """Ask a model about each of these examples. Nothing is learnt from them."""
    right, asked, losses = [], [], 0.0
    per_token = False
    for some in examples:
        with torch.inference_mode():
            logits = logits_of(model, some, device)
        labels = some.labels.to(device)
        per_token = labels.ndim == 2
        wanted = labels != NO_LABEL
        hits = (logits.argmax(-1) == labels) & wanted
        losses += float(cross_entropy(logits, labels) * wanted.sum())
        right.append(hits.reshape(len(labels), -1).sum(1).cpu().numpy())
        asked.append(wanted.reshape(len(labels), -1).sum(1).cpu().numpy())
    counts = np.concatenate(asked)
    return Answers(np.concatenate(right), counts, losses / max(1, int(counts.sum())), per_token)


def logits_of(model: Callable[..., Tensor], examples: Examples, device: str) -> Tensor:
    """float32 logits of some examples."""
    mask = None if examples.key_mask is None else examples.key_mask.to(device)
    return model(examples.tokens.to(device), key_mask=mask).float()


def chance(examples: Iterable[Examples]) -> float:
    """Accuracy of the best constant answer, on these very labels."""
    labels = torch.cat([some.labels.flatten() for some in examples])
    labels = labels[labels != NO_LABEL]
    return float(labels.bincount().max() / len(labels)) if len(labels) else 0.0
