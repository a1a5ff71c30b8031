"""Synthesizer: attention weights without queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.attention.synthetic.synthesizer.logits import (
    DenseLogits,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    LogitSource,
    RandomLogits,
)
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.masks import at_most, emptied, visible_pairs
from attnbench.catalogue.engines.tiling import budget
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import UsageError

Mode = Literal["dense", "random", "factorized-random", "factorized-dense", "mixture"]
Mixture = Literal["random+dense", "random+dot", "dense+dot", "random+dense+dot"]


@register(
    "synthesizer",
    kind="mixer",
    family="synthetic",
    also=("learned pattern", "low rank"),
    source="Tay et al. 2020, arXiv:2005.00743, section 3",
    formula="softmax(B) V,  B = W₂ ReLU(W₁ x + b₁) + b₂  |  R  |  R₁ R₂ᵀ  |  tile(A)·repeat(B)  |  Σ α B",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=Traits(
        target="other",
        cross=No("the weights belong to positions of one sequence, there are no keys to compare with"),
        bias=No("its logits are learned for positions, which is all that a bias would add"),
        longer=No("its weights are learned for positions"),
        stochastic=True,
        decode=True,
        knob=Knob("hidden"),
        given=(
            ("mode=random", {"knob": None}),
            ("mode=factorized-random", {"knob": Knob("factors")}),
            ("mode=mixture", {"knob": None}),
        ),
    ),
    settings=(
        "",
        "mode=random",
        "mode=factorized-random,factors=3",
        "mode=factorized-dense,factors=4",
        "mode=mixture",
        "mode=mixture,mixture=random+dense+dot",
    ),
)
class Synthesizer(nn.Module):
    """Weights from single tokens or from none, fixed maximum length.

    Tay et al. 2020, "Synthesizer": ``Y = softmax(B) V`` in every head, where row i of B is

    - ``mode=dense``: ``W₂ ReLU(W₁ x_i + b₁) + b₂``, from token i alone;
    - ``mode=random``: row i of a learned N × N matrix, the same for every input;
    - ``mode=factorized-random``: row i of ``R₁ R₂ᵀ`` with two learned matrices of ``factors`` columns, by default the
      paper's 8;
    - ``mode=factorized-dense``: ``A_i[j mod a] · B_i[j div a]``, where A_i and B_i, of length a = ``factors`` and
      N / a, come from token i through one hidden layer;
    - ``mode=mixture``: ``Σ α_p B_p`` over two or three of these and of dot products ``q_i · k_j / √D``, mixed before
      the one softmax; α is the softmax of learned numbers, equal at first.

    x is ``(B, N, C)`` and so is the output: the value and the output projection, both C × C without bias, belong to the
    variant. A shorter input uses the first rows and columns of B. Padded keys and, if ``shape.causal``, later keys get
    no weight; a query that sees no key gives 0. Decoding keeps values, and the keys of dot products.

    Entries of R are drawn from N(0, 1), those of the factors such that the product has variance 1, W₂ from
    N(0, 1/``hidden``). W₁ maps to ``hidden`` units of its own for each head. Only dot products are divided by √D.

    Differs from the paper: a need not divide N, and the last of the N / a numbers is then used for fewer keys; A_i and
    B_i share their hidden layer.

    Raises:
        UsageError: ``hidden`` without dense weights.
        Unsupported: in ``forward``, an input longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        mode: Annotated[Mode, Field(description="where the weights come from")] = "dense",
        hidden: Annotated[
            int | None, Field(ge=1, description="hidden units per head of dense weights; none: D")
        ] = None,
        factors: Annotated[
            int | None,
            Field(ge=1, description="columns of R₁ (none: 8) of factorized-random, length a (√N) of factorized-dense"),
            Needs("mode=factorized-random or mode=factorized-dense"),
        ] = None,
        mixture: Annotated[
            Mixture | None, Field(description="parts of the mixture; none: random+dense"), Needs("mode=mixture")
        ] = None,
    ) -> None:
        super().__init__()
        parts = (mixture or "random+dense").split("+") if mode == "mixture" else [mode]
        if hidden is not None and not {"dense", "factorized-dense"} & set(parts):
            raise UsageError(f"synthesizer: hidden belongs to dense weights, not to mode={mode}")
        C, units = shape.C, hidden or shape.D
        self.heads, self.longest, self.causal = shape.H, shape.N, shape.causal
        self.value = nn.Linear(C, C, bias=False)
        self.out = nn.Linear(C, C, bias=False)
        sources: dict[str, Callable[[], LogitSource]] = {
            "dense": lambda: DenseLogits(shape, units),
            "random": lambda: RandomLogits(shape),
            "factorized-random": lambda: FactorizedRandom(shape, factors or 8),
            "factorized-dense": lambda: FactorizedDense(shape, units, min(shape.N, factors or isqrt(shape.N - 1) + 1)),
            "dot": lambda: DotProduct(shape),
        }
        self.sources = nn.ModuleDict({part: sources[part]() for part in parts})
        self.alpha = nn.Parameter(torch.zeros(len(parts))) if len(parts) > 1 else None
        self.per_example = any(source.per_example for source in self._sources())

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        visible = visible_pairs(x, x, self.causal, key_mask)
        shares = torch.ones(1, device=x.device, dtype=x.dtype) if self.alpha is None else self.alpha.softmax(0)
        pairs = torch.stack([source.of_pairs(x) for source in self._sources()], -1) @ shares
        weights = pairs.masked_fill(~visible, float("-inf")).softmax(-1).masked_fill(~visible, 0.0)
        values = self.value(x).view(B, N, self.heads, -1)
        out: Tensor = self.out(torch.einsum("bhnm,bmhd->bnhd", weights, values).flatten(2))
        return out

    def _sources(self) -> list[LogitSource]:
        return [source for source in self.sources.values() if isinstance(source, LogitSource)]

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)`` with N at most ``shape.N``; ``key_mask`` ``(B, N)``, True for a real token."""
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        H = self.heads
        at_most(self.longest, N, "the weights were")
        own = self.per_example or key_mask is not None
        values = self.value(x).view(B, N, H, -1)
        # Weights that are the same for the whole batch multiply all of its values in one product.
        values = (values.permute(2, 0, 1, 3) if own else values.permute(2, 1, 0, 3)).reshape(H * B if own else H, N, -1)
        length = max(8, budget("synthesizer.weights", x.device) // (N * H * (B if own else 1)))
        key_rows = self._key_rows(x)
        parts = []
        start = 0
        # split, not slices: the gradient of each slice would be as large as the whole.
        for rows in zip(*(torch.split(source.rows(x), length, dim=2) for source in self._sources()), strict=True):
            stop = start + rows[0].shape[2]
            keys = stop if self.causal else N
            weights = self._hide(self._logits(rows, keys, key_rows), start, key_mask)
            parts.append(torch.bmm(weights.flatten(0, 1), values[:, :keys]))
            start = stop
        y = torch.cat(parts, dim=1)
        y = y.view(H, B, N, -1).permute(1, 2, 0, 3) if own else y.view(H, N, B, -1).permute(2, 1, 0, 3)
        out: Tensor = self.out(y.reshape(x.shape))
        return out

    def _key_rows(self, x: Tensor) -> Tensor | None:
        return next((source.keys(x) for source in self._sources() if isinstance(source, DotProduct)), None)

    def _logits(self, rows: tuple[Tensor, ...], keys: int, key_rows: Tensor | None) -> Tensor:
        logits = [source.logits(part, keys, key_rows) for source, part in zip(self._sources(), rows, strict=True)]
        if self.alpha is None:
            return logits[0]
        shares = self.alpha.softmax(0)
        mixed = shares[0] * logits[0]
        for share, part in zip(shares[1:], logits[1:], strict=True):
            mixed = mixed + share * part
        return mixed

    def _hide(self, logits: Tensor, start: int, key_mask: Tensor | None) -> Tensor:
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
        # Only padding can hide every key of a row; its softmax is then NaN.
        return weights if key_mask is None else weights.masked_fill(hidden, 0.0)

    def begin(self, x: Tensor) -> Cache:
        return Cache.of(*self._kept(x), self.longest)

    def step(self, state: Cache, x: Tensor) -> tuple[Tensor, Cache]:
        at_most(self.longest, state.length + 1, "the weights were")
        rows = tuple(source.rows(x, state.length) for source in self._sources())
        state = state.append(*self._kept(x))
        weights = self._logits(rows, state.length, state.keys.transpose(0, 1)).softmax(-1)
        y = torch.matmul(weights, state.values.transpose(0, 1))
        return self.out(y.permute(1, 2, 0, 3).reshape(x.shape)), state

    def _kept(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = self.value(x).view(*x.shape[:2], self.heads, x.shape[2] // self.heads).transpose(1, 2)
        keys = self._key_rows(x)
        return values[..., :0] if keys is None else keys.transpose(0, 1), values

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, mode: str, mixture: str = "", **_: object) -> int:
        """The values of a token, and its keys if products are in the mixture."""
        return (2 if mode == "mixture" and "dot" in mixture else 1) * shape.C * width
