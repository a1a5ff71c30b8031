"""Check that there is something to compare."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from attnbench.errors import UsageError

_EXAMPLE = "attnbench compare softmax linear --n 1024..4096"


def refuse_equal(labels: Sequence[str], written: Sequence[str]) -> None:
    """Raise UsageError if there is no variant, or the same one twice.

    ``labels`` leave out default options, so that equal variants are equal; ``written`` is the user's text, for the
    message.
    """
    for (label, one), (other_label, other) in combinations(zip(labels, written, strict=True), 2):
        if label == other_label:
            also = "" if label in (one, other) else f", {label}"
            raise UsageError(f"{one} and {other} are the same variant{also}; name different ones: {_EXAMPLE}")
    if not labels:
        raise UsageError(f"compare needs a variant, or several to be held against the first: {_EXAMPLE}")
