"""Cross-covariance attention: channels attend to channels; tokens only say how alike two channels are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register

_TOKENS = 4096
"""Tokens whose products are added up at a time, in a CPU's cache."""


@register(
    "xca",
    family="mixing",
    source="El-Nouby et al. 2021, arXiv:2106.09681, section 3.2",
    formula="O = V·softmax(τ·Q̂ᵀ·K̂)ᵀ,  Q̂, K̂: every channel of unit norm over the tokens",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        mask=No("its weights belong to pairs of channels, and all tokens take part in each"),
        causal=No("the likeness of two channels is a sum over all tokens, later ones included"),
        cross=No("two channels are compared token by token, so that queries and keys must be the same tokens"),
        bias=No("logits belong to two channels, not to two tokens"),
        v_dim=No("a weight belongs to a channel of keys and the same channel of values"),
        rows_sum_to_one=False,
        permutable=True,
    ),
)
class XCA(nn.Module):
    """Attention among the D channels of a head instead of the tokens.

    El-Nouby et al. 2021, "XCiT: Cross-Covariance Image Transformers", cross-covariance attention: the columns of q and
    k, each a channel over all tokens, are divided by their norms. Channel c of the output is the average of the
    channels of v with the weights ``softmax_c'(τ · q̂_c · k̂_c')``. The matrix is D × D for each head; τ is one learned
    number for each head, 1 at first. q, k and v are ``(B, H, N, D)``.

    Padded tokens are 0 in q, k and v, which gives exactly the output of the shorter sequence; their own output is 0.
    There is no matrix of tokens, so that weights of tokens have no row sums; those of a channel sum to 1. A difference
    from softmax attention is a distance, not an error.

    Differs from the paper: τ multiplies, as in the authors' code, where the paper divides by it. The local patch
    interaction, a block of its own between XCA and the feed-forward layer, is not here.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(shape.H, 1, 1))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        output = torch.zeros_like(v)
        for b in range(q.shape[0]):
            real = slice(None) if key_mask is None else key_mask[b]
            for h in range(q.shape[1]):
                rows, columns, values = (x[b, h, real].T for x in (q, k, v))
                for c in range(q.shape[3]):
                    cosines = torch.cosine_similarity(rows[c], columns, dim=1)
                    weights = (self.temperature[h, 0, 0] * cosines).softmax(0)
                    output[b, h, real, c] = weights @ values
        return output

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = emptied(key_mask, q, k, v)
        products, of_queries, of_keys = _sums(q, k)
        likeness = products / (_norms(of_queries).mT * _norms(of_keys))
        weights = (self.temperature * likeness).softmax(-1).to(v.dtype)
        return torch.matmul(v, weights.mT)


def _sums(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulator(q.dtype)
    products = q.new_zeros(*q.shape[:2], q.shape[3], k.shape[3], dtype=dtype)
    of_queries, of_keys = (torch.zeros_like(products[:, :, :1]) for _ in range(2))
    for queries, keys in zip(*(torch.split(x, _TOKENS, 2) for x in (q, k)), strict=True):
        queries, keys = queries.to(dtype), keys.to(dtype)
        products = products + torch.matmul(queries.mT, keys)
        of_queries = of_queries + queries.square().sum(2, keepdim=True)
        of_keys = of_keys + keys.square().sum(2, keepdim=True)
    return products, of_queries, of_keys


def _norms(squares: Tensor) -> Tensor:
    return squares.clamp(min=1e-24).sqrt()
