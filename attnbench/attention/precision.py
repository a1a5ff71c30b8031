"""In which dtype sums are taken, and what stands for -∞ in it."""

from __future__ import annotations

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which inputs of ``dtype`` are summed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def hidden(dtype: torch.dtype) -> float:
    """Logit of a pair that does not count: finite, also twice and beside another logit, so that no row becomes NaN."""
    return torch.finfo(dtype).min / 4
