"""Softmax attention as the textbook writes it: the N x M matrix is in memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import CachedDecoding
from attnbench.catalogue.engines.masks import seeing
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import masked
from attnbench.contract.variant import EXACT, register


@register(
    "softmax",
    family="exact",
    source="Vaswani et al. 2017, arXiv:1706.03762, equation 1",
    formula="O = softmax(Q·Kᵀ/√D)·V",
    cost="O(n²·d)",
    memory_exponent=2.0,
    traits=replace(
        EXACT,
        baseline="two products and a softmax that overwrites the logits; softmax(q @ k.mT / d**0.5) @ v, as a textbook "
        "has it, writes a matrix in each step and takes longer",
    ),
)
class Softmax(CachedDecoding, nn.Module):
    """Exact softmax attention with the whole N × M matrix in memory.

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. Two batched products and a
    softmax, differentiated by plain autograd; heads that share keys and values are rows of one product with them. Where
    no gradient is wanted, the softmax overwrites the logits, so that one matrix is held, not two. A bias of the
    positions takes up to H × N × M more numbers. A mask saves neither time nor memory here.

    Differs from the paper: a padded key has the lowest logit of the dtype instead of -∞, and its content must be
    finite; a query that sees no key gives 0.
    """

    at_once = unequal = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal, self.capacity, self.visible = shape.causal, shape.M, masked(shape)
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        B, H, N, D = q.shape
        K, M, E = *k.shape[1:3], v.shape[3]
        rows = H // K * N
        logits = torch.bmm((q * D**-0.5).reshape(B * K, rows, D), k.reshape(B * K, M, D).mT)
        if H != K:
            logits = logits.view(B * H, N, M)  # not always: gradients pay for writing into a view
        visible = self.visible
        if self.position_bias is not None:
            start = 0 if visible is None else visible.start
            logits.view(B, H, N, M).add_(self.position_bias(slice(start, start + N), slice(0, M), logits.dtype))
        # Adding is five times faster on a CPU than masked_fill_. A token sees itself: no row is -inf throughout.
        if visible is not None:
            seen = visible.pairs(slice(0, N), slice(0, M), M, q.device)
            logits += torch.zeros(N, M, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
        elif self.causal:
            logits += torch.full((N, M), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        if key_mask is not None:
            logits.masked_fill_(~key_mask.repeat_interleave(H, 0)[:, None], hidden(q.dtype))
        top = None if self.sink is None else logits.amax(-1, keepdim=True)
        weights = logits.softmax(-1) if logits.requires_grad else torch.softmax(logits, -1, out=logits)
        output = torch.bmm(weights.view(B * K, rows, M), v.reshape(B * K, M, E)).view(B, H, N, E)
        if self.sink is not None and top is not None:
            # The largest weight is exp(top - L), which gives L = log Σ exp(l) without another pass over the logits.
            sums = accumulator(q.dtype)
            log_sums = top.to(sums) - weights.amax(-1, keepdim=True).to(sums).log()
            output = (output * self.sink.share(log_sums.view(B, H, N, 1))).to(q.dtype)
        if key_mask is None:
            return output
        some = seeing(key_mask, self.causal) if visible is None else visible.seeing(key_mask, N)
        return output.masked_fill(~some, 0)
