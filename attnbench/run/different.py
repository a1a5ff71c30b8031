"""Check that there is something to compare."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from attnbench.errors import UsageError

_EXAMPLE = "attnbench compare softmax linear --n 1024..4096"


def refuse_equal(labels: Sequence[str], written: Sequence[str]) -> None:
    """Check that there is a variant, and each only once.

    Args:
        labels: the variants without options at their defaults, so that equal variants have equal labels.
        written: the same as the user wrote them, for the message.

    Raises:
        UsageError: none, or the same one twice, which could only be compared with itself.
    """
    for (label, one), (other_label, other) in combinations(zip(labels, written, strict=True), 2):
        if label == other_label:
            also = "" if label in (one, other) else f", {label}"
            raise UsageError(f"{one} and {other} are the same variant{also}; name different ones: {_EXAMPLE}")
    if not labels:
        raise UsageError(f"compare needs a variant, or several to be held against the first: {_EXAMPLE}")
