"""DeltaFormer: a triangular system of softmax weights, in blocks."""

from __future__ import annotations

import torch

from attnbench.catalogue.attention.pairwise.deltaformer import DeltaFormer
from attnbench.contract.problem.reference import exact_attention
from tests.catalogue.attention.small import CAUSAL


def test_a_token_that_takes_nothing_off_leaves_softmax_attention() -> None:
    module, x = DeltaFormer(CAUSAL).double(), torch.randn(2, 23, 12, dtype=torch.float64)
    torch.nn.init.constant_(module.beta.bias, -1e3)
    q, k, v = (part.unflatten(2, (3, 4)).transpose(1, 2) for part in module.qkv(x).chunk(3, 2))
    expected = module.out(exact_attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-12)


def test_a_token_is_taken_off_where_its_key_is_alone() -> None:
    """With equal keys and β = 1 a token's u is its value less the mean of all earlier u."""
    module, x = DeltaFormer(CAUSAL).double(), torch.randn(2, 23, 12, dtype=torch.float64)
    with torch.no_grad():
        module.qkv.weight[12:24] = 0
        module.beta.bias.fill_(1e3)
    v = module.qkv(x)[..., 24:]
    u = v[:, :1]
    for i in range(1, 23):
        u = torch.cat([u, v[:, i, None] - u.mean(1, keepdim=True)], 1)
    expected = module.out(u.cumsum(1) / torch.arange(1, 24)[:, None])
    torch.testing.assert_close(module(x), expected, rtol=1e-10, atol=1e-12)
