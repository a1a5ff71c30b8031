"""Convolutions as long as the sequence, by Fourier transforms, O(n log n)."""

from __future__ import annotations

import torch
from torch import Tensor


def long_convolution(x: Tensor, later: Tensor, earlier: Tensor | None = None) -> Tensor:
    """y_i = Σ_{j<=i} later_(i-j) x_j + Σ_{j>i} earlier_(j-i-1) x_j for each channel.

    In float64 throughout: a transform spreads rounding errors of the largest number over the whole sequence, so that in
    float32 a loud token would be heard before it has come.

    Args:
        x: ``(B, N, C)``.
        later: what a token adds to itself and those after it, ``(C, N)``; earlier: to those before it, ``(C, N - 1)``.

    Returns:
        ``(B, N, C)`` in x's dtype.
    """
    N = x.shape[1]
    size = 1 << (2 * N - 1).bit_length()  # nothing comes round, and such lengths are the fastest
    kernel = torch.fft.rfft(later.double(), size)
    if earlier is not None:
        # A distance of -t lies at the end of the circle, t from it: its transform is turned round.
        kernel = kernel + torch.fft.rfft(torch.nn.functional.pad(earlier.double(), (1, 0)), size).conj()
    spectrum = torch.fft.rfft(x.mT.double(), size) * kernel
    out: Tensor = torch.fft.irfft(spectrum, size)[..., :N].mT.to(x.dtype)
    return out
