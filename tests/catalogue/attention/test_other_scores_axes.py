"""Masks, later queries and sinks where the weights of all pairs come from another score than a product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible

SOFTMAX = ["additive:hidden=3,chunk=5", "bilinear:chunk=5", "location:chunk=5"]
KERNELS = ["kernel:sim=relu,order=dense", "kernel:sim=exp,order=dense", "kernel:sim=gaussian,order=dense"]
MASKS = ["none", "prefix:9", "document:4+9", "sliding:6"]
SHAPE = Shape(batch=2, heads=3, seq_len=17, head_dim=4, causal=True)


def qkv(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(shape.B, shape.H, shape.N, shape.D, dtype=torch.float64)
    return q, *torch.randn(2, shape.B, shape.K, shape.M, shape.D, dtype=torch.float64)


def padded(shape: Shape) -> Tensor:
    real = torch.rand(shape.B, shape.M) < 0.6
    real[1] = torch.arange(shape.M) > 7
    return real


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("start", [0, 11])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("text", SOFTMAX + KERNELS)
def test_a_query_answers_as_if_the_keys_that_it_does_not_see_were_padding(
    text: str, mask: str, start: int, causal: bool, hidden: bool
) -> None:
    if start and not causal and mask == "none":
        return  # nothing asks for places
    shape = replace(SHAPE, mask=mask, causal=causal, q_start=start)
    (q, k, v), real = qkv(shape), padded(shape) if hidden else None
    module = build(text, shape).double()
    plain = build(text, replace(shape, mask="none", causal=False, q_start=0, kv_len=shape.M)).double()
    output, visible = module(q, k, v, key_mask=real), Visible.of(shape)
    torch.testing.assert_close(module.dense(q, k, v, key_mask=real), output)
    for i in range(shape.N):
        first, stop = visible.span(i, shape.M)
        seen = ((torch.arange(shape.M) >= first) & (torch.arange(shape.M) < stop)).expand(shape.B, -1)
        alone = plain(q[:, :, i : i + 1], k, v, key_mask=seen if real is None else seen & real)
        torch.testing.assert_close(output[:, :, i : i + 1], alone)
