from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.kernel.cosformer import CosFormer
from attnbench.contract.problem.shape import Shape
from tests.catalogue.attention.small import CAUSAL, HOLES, SHAPE, both, close, qkv


def pair_by_pair(
    q: Tensor, k: Tensor, v: Tensor, M: int, causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    rows = []
    for i in range(q.shape[2]):
        above, below = torch.zeros_like(v[:, :, 0]), torch.zeros_like(v[:, :, 0, :1])
        for j in range(i + 1 if causal else k.shape[2]):
            weight = (q[:, :, i].relu() * k[:, :, j].relu()).sum(-1, keepdim=True) * math.cos(math.pi * (i - j) / 2 / M)
            if key_mask is not None:
                weight = weight * key_mask[:, j, None, None]
            above, below = above + weight * v[:, :, j], below + weight
        rows.append(above / torch.where(below == 0, torch.ones_like(below), below))
    return torch.stack(rows, 2)


@both
@pytest.mark.parametrize("chunk", [1, 2, 7, 22, 64])
def test_equals_the_sum_over_pairs_for_every_chunk(shape: Shape, chunk: int) -> None:
    module, inputs = CosFormer(shape, chunk=chunk), qkv(shape)
    for key_mask in (None, HOLES):
        expected = pair_by_pair(*inputs, 23, shape.causal, key_mask)
        close(module(*inputs, key_mask=key_mask), expected)
        close(module.dense(*inputs, key_mask=key_mask), expected)


def test_a_longer_horizon_flattens_the_cosine() -> None:
    inputs = qkv(SHAPE)
    close(CosFormer(SHAPE, horizon=40)(*inputs), pair_by_pair(*inputs, 40))
    q, k, v = inputs
    weights = q.relu() @ k.relu().mT
    total = weights.sum(-1, keepdim=True)
    flat = weights @ v / total.masked_fill(total == 0, 1.0)
    torch.testing.assert_close(CosFormer(SHAPE, horizon=10**6)(*inputs), flat, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kv_len", [9, 31])
def test_cross_attention_measures_by_the_longer_sequence(kv_len: int) -> None:
    shape = Shape(batch=2, heads=3, seq_len=23, kv_len=kv_len, head_dim=4)
    inputs = qkv(shape)
    close(CosFormer(shape)(*inputs), pair_by_pair(*inputs, max(23, kv_len)))


def test_a_shorter_input_has_the_cosines_of_the_shape() -> None:
    q, k, v = (x[:, :, :9] for x in qkv(CAUSAL))
    close(CosFormer(CAUSAL)(q, k, v), pair_by_pair(q, k, v, 23, True))
