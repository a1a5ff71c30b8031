"""Synthesizer: attention weights without queries and keys."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.errors import Unsupported, UsageError
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register

_TILE = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Weights computed at once: a few MiB stay in the cache of a CPU, a GPU needs enough of them to be busy."""


@register(
    "synthesizer",
    kind="mixer",
    family="synthetic",
    source="Tay et al. 2020, arXiv:2005.00743",
    formula="softmax(B) V,  B = W₂ ReLU(W₁ x + b₁) + b₂  |  R  |  R₁ R₂ᵀ",
    cost="O(n²·d)",
    time_exponent=2.0,
    memory_exponent=2.0,
    traits=Traits(
        target="other",
        causal=True,
        cross=No("the weights belong to positions of one sequence, there are no keys to compare with"),
        key_padding=True,
        bias=No("each logit is learned for its pair of positions already; there is none of q and k to add to"),
        stochastic=True,
    ),
    settings=("", "mode=random", "mode=factorized-random,factors=3"),
)
class Synthesizer(nn.Module):
    """Weights from each token alone or from no token, fixed maximum length.

    Tay et al. 2020, section 3: ``Y = softmax(B) V`` in every head, without a division by √D, where row i of B is

    - ``dense``: ``W₂ ReLU(W₁ x_i + b₁) + b₂``, from token i alone (equation 1);
    - ``random``: row i of a learned N × N matrix, the same for every input (equation 4);
    - ``factorized-random``: row i of ``R₁ R₂ᵀ`` with two learned N × ``factors`` matrices (section 3.2.2).

    x is ``(B, N, C)`` and so is the output: the value and the output projection, both C × C without bias, belong to the
    variant. A shorter input uses the first rows and columns of B. Hidden keys, later ones where ``shape.causal`` and
    padded ones, get no weight; a query that sees no key gives 0.

    Entries of R are drawn from N(0, 1), those of the factors so that the product has variance 1, W₂ from
    N(0, 1/``hidden``). W₁ maps to ``hidden`` units of its own for each head.

    Not here: the factorized dense form and the mixtures with each other or with dot products.

    Raises:
        UsageError: an option of another mode.
        Unsupported: in ``forward``, an input longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        mode: Annotated[
            Literal["dense", "random", "factorized-random"], Field(description="where the weights come from")
        ] = "dense",
        hidden: Annotated[
            int | None, Field(ge=1, description="hidden units per head of mode=dense; none means head_dim")
        ] = None,
        factors: Annotated[
            int | None, Field(ge=1, description="columns of R₁ and R₂ of mode=factorized-random; none means 8")
        ] = None,
    ) -> None:
        super().__init__()
        if hidden is not None and mode != "dense":
            raise UsageError(f"synthesizer: hidden belongs to mode=dense, not to mode={mode}")
        if factors is not None and mode != "factorized-random":
            raise UsageError(f"synthesizer: factors belongs to mode=factorized-random, not to mode={mode}")
        H, N, C = shape.H, shape.N, shape.C
        self.mode, self.heads, self.longest, self.causal = mode, H, N, shape.causal
        self.value = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        if mode == "dense":
            units = hidden or shape.D
            self.W1 = nn.Linear(C, H * units)
            self.W2 = nn.Parameter(torch.randn(H, units, N) * units**-0.5)
            self.b2 = nn.Parameter(torch.zeros(H, 1, N))
        elif mode == "random":
            self.R = nn.Parameter(torch.randn(H, N, N))
        else:
            columns = factors or 8
            self.R1 = nn.Parameter(torch.randn(H, N, columns) * columns**-0.25)
            self.R2 = nn.Parameter(torch.randn(H, N, columns) * columns**-0.25)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` with N at most ``shape.N``; ``key_mask`` ``(B, N)``, True where a token is real."""
        B, N, _ = x.shape
        H = self.heads
        if self.longest < N:
            raise Unsupported(f"{N} tokens, but the weights were made for at most {self.longest}")
        own = self.mode == "dense" or key_mask is not None
        values = self.value(x).view(B, N, H, -1)
        # Weights that are the same for the whole batch multiply all of its values in one product.
        values = (values.permute(2, 0, 1, 3) if own else values.permute(2, 1, 0, 3)).reshape(H * B if own else H, N, -1)
        rows = max(8, _TILE.get(x.device.type, 1 << 26) // (N * H * (B if own else 1)))
        parts = []
        start = 0
        # split, not slices: the gradient of each slice would be as large as the whole.
        for part in torch.split(self._rows(x), rows, dim=2):
            stop = start + part.shape[2]
            keys = stop if self.causal else N
            weights = self._hide(self._logits(part, keys), start, key_mask)
            parts.append(torch.bmm(weights.flatten(0, 1), values[:, :keys]))
            start = stop
        y = torch.cat(parts, dim=1)
        y = y.view(H, B, N, -1).permute(1, 2, 0, 3) if own else y.view(H, N, B, -1).permute(2, 1, 0, 3)
        out: Tensor = self.out(y.reshape(x.shape))
        return out

    def _rows(self, x: Tensor) -> Tensor:
        """What the rows of B come from, ``(H, B or 1, N, ...)``."""
        N = x.shape[1]
        if self.mode == "dense":
            units: Tensor = self.W1(x).relu_()
            return units.view(*x.shape[:2], self.heads, -1).permute(2, 0, 1, 3)
        return (self.R if self.mode == "random" else self.R1)[:, None, :N]

    def _logits(self, rows: Tensor, keys: int) -> Tensor:
        """Rows of B before the softmax, ``(H, B or 1, rows, keys)``."""
        if self.mode == "dense":
            logits = torch.baddbmm(self.b2[..., :keys], rows.flatten(1, 2), self.W2[..., :keys])
            return logits.view(*rows.shape[:3], keys)
        if self.mode == "random":
            return rows[..., :keys]
        return torch.matmul(rows, self.R2[:, None, :keys].transpose(-1, -2))

    def _hide(self, logits: Tensor, start: int, key_mask: Tensor | None) -> Tensor:
        """Softmax over the keys that rows ``start, start + 1, ...`` may see."""
        rows, keys = logits.shape[-2:]
        hidden = None
        if self.causal:
            hidden = torch.ones(rows, keys, dtype=torch.bool, device=logits.device).triu(start + 1)
        if key_mask is not None:
            padded = ~key_mask[:, None, :keys]
            hidden = padded if hidden is None else hidden | padded
        if hidden is None:
            return logits.softmax(-1)
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        # Only padding can hide every key of a row, whose softmax is then NaN.
        return weights if key_mask is None else weights.masked_fill(hidden, 0.0)
