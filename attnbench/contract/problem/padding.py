"""Padding tokens of a batch: examples of different lengths, as in a real batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from torch import Tensor


def checked(padding: float) -> float:
    """``padding`` itself, if it is a share of tokens that leaves some real. Raises UsageError: it is not at least 0 and
    below 1."""
    if not 0 <= padding < 1:
        raise UsageError(
            f"padding must be at least 0 and below 1, not {padding:g}; 0.5 makes half of the tokens padding"
        )
    return padding


def real_tokens(batch: int, tokens: int, padding: float) -> list[int]:
    """Number of real tokens of each example, at least one; the shares are spread evenly around ``1 - padding``.

    If half of the tokens are padding, the real shares of four examples are 1/8, 3/8, 5/8 and 7/8; that of one is 1/2.
    """
    real = 1 - padding
    spread = min(real, padding)  # no example has fewer than none or more than all
    shares = (real + spread * ((2 * example + 1) / batch - 1) for example in range(batch))
    return [max(1, round(share * tokens)) for share in shares]


def key_mask(shape: Shape, padding: float) -> Tensor | None:
    """``(B, M)`` bool, True where a token is real; padding follows the real tokens. None without padding. Raises
    Unsupported: the queries are the last tokens, where padding would be."""
    import torch

    if not padding:
        return None
    if shape.q_start:
        raise Unsupported("padding: with q_start the queries are the last tokens, and padding would take their places")
    lengths = torch.tensor(real_tokens(shape.B, shape.M, padding))
    return torch.arange(shape.M) < lengths[:, None]
