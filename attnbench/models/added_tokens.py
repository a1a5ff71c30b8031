"""Learned tokens that a layer reads in front of its input."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.drafts import taken
from attnbench.contract.capabilities import Decoding, answered
from attnbench.contract.problem.shape import Shape


class AddedTokens(nn.Module):
    """A layer that puts learned tokens in front of x ``(B, N, C)`` and cuts them off its output, ``(B, N, C)`` again.

    Variants with global tokens (``longformer:global_tokens=2``, ``etc``) take the first tokens for these. If as many
    are added, no token of the sequence is global, as in the extended constructions of Ainslie et al. 2020,
    arXiv:2004.08483, and Zaheer et al. 2020, arXiv:2007.14062. To any other layer they are tokens like others, a memory
    that all may read. They start from N(0, 1), as large as the normalised input. In a causal layer every token sees
    them, and they see none of the sequence.

    Args:
        layer: what maps ``(B, A + N, C)`` to the same shape, for A added tokens.
        shape: that of x, with ``added_tokens`` A and the width C.
    """

    at_once = True

    def __init__(self, layer: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.layer = layer
        self.tokens = nn.Parameter(torch.randn(shape.added_tokens, shape.C))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Mix x; ``key_mask`` is ``(B, N)``, True where a token is real. Added tokens always are."""
        if key_mask is not None:
            key_mask = torch.cat([key_mask.new_ones(len(x), len(self.tokens)), key_mask], 1)
        y: Tensor = self.layer(self._longer(x), key_mask=key_mask)
        return y[:, len(self.tokens) :]

    def begin(self, x: Tensor) -> Any:
        """State after the added tokens and x ``(B, n, C)``, for a layer that decodes."""
        return cast(Decoding, self.layer).begin(self._longer(x))

    def prompted(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs for x ``(B, n, C)``, n >= 1, and the state after it."""
        y, state = answered(self.layer, self._longer(x))
        return y[:, len(self.tokens) :], state

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        """The next tokens x ``(B, n, C)``: their outputs and the state after them."""
        return taken(self.layer, state, x)

    def _longer(self, x: Tensor) -> Tensor:
        return torch.cat([self.tokens.to(x.dtype).expand(len(x), -1, -1), x], 1)
