"""The dtype of sums, and its stand-in for -∞."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from attnbench.contract.compiled import on_cpu


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which inputs of ``dtype`` are summed: float32, or float64 for float64."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def hidden(dtype: torch.dtype) -> float:
    """Logit of a pair that does not count, below every other; finite, so that a row of nothing else is not NaN.

    In float16 it is the lowest number, and must replace the logit. In other dtypes it may be added to a logit, even
    twice, and the sum is still finite.
    """
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min / 4)


def unit(x: Tensor) -> Tensor:
    """x ``(..., d)`` divided by its length, which is taken in float32 at least; zeros stay zeros.

    torch's own divides zeros by 1e-12, which float16 rounds to 0, and multiplies the gradient of zeros by 1e12.
    """
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulator(x.dtype))
    return (x / torch.where(size > 0, size, 1.0)).to(x.dtype)


def softmax_and_log_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis, in the memory of ``logits``, and log Σ exp(logits), ``(..., 1)``.

    The largest weight is 1 / Σ exp(logits - top): cheaper to read than exponentials are to sum again.
    """
    top = logits.amax(-1, keepdim=True)
    weights = torch.softmax(logits, -1, out=logits)
    return weights, top.sub_(weights.amax(-1, keepdim=True).log_())


class LayerNorm(nn.LayerNorm):
    """Layer norm that sums its gradients in float32 too; torch's own sums them in the input's dtype on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = accumulator(input.dtype)
        if dtype == input.dtype or not on_cpu(input.device):
            return super().forward(input)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


LOG2E = 1.0 / log(2.0)
"""Exponentials are taken as 2^(x·log2(e)): torch's exp2 is several times as fast as its exp on some CPUs."""
