"""Convolutions as long as the sequence, by Fourier transforms, O(n log n)."""

from __future__ import annotations

import torch
from torch import Tensor


def long_convolution(x: Tensor, later: Tensor, earlier: Tensor | None = None) -> Tensor:
    """y_i = Σ_{j<=i} later_(i-j) x_j + Σ_{j>i} earlier_(j-i-1) x_j for each channel of x ``(B, N, C)``, in x's dtype.

    ``later`` is ``(C, N)``, ``earlier`` ``(C, N - 1)``. Float64 throughout: a transform spreads rounding errors of the
    largest number over the whole sequence, so that in float32 a loud token would be heard too early.
    """
    N = x.shape[1]
    size = 1 << (2 * N - 1).bit_length()  # no wrap-around, and such lengths are the fastest
    kernel = torch.fft.rfft(later.double(), size)
    if earlier is not None:
        # A distance of -t lies at the end of the circle, t from it: its transform is conjugated.
        kernel = kernel + torch.fft.rfft(torch.nn.functional.pad(earlier.double(), (1, 0)), size).conj()
    spectrum = torch.fft.rfft(x.mT.double(), size) * kernel
    out: Tensor = torch.fft.irfft(spectrum, size)[..., :N].mT.to(x.dtype)
    return out
