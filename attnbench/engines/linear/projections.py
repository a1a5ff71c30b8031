"""Random projections ω for random-feature attention: directions and radii."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

Projection = Annotated[
    Literal["orthogonal", "iid"], Field(description="rows of ω orthogonal in blocks of D, or independent")
]
Norms = Literal["chi", "sqrt-d", "quantile"]


def draw_projection(
    features: int, head_dim: int, projection: Projection = "orthogonal", norms: Norms = "chi"
) -> Tensor:
    """Rows ω_1 .. ω_R, each a direction times a radius, from the global CPU generator.

    Args:
        features: R.
        head_dim: D.
        projection: ``iid``: independent uniform directions. ``orthogonal``: independent blocks of D rows, each the
            rows of a Haar-distributed orthogonal matrix (the last block cut).
        norms: ``chi``: independent chi radii with D degrees of freedom, so that each row by itself is N(0, I).
            ``sqrt-d``: every radius is √D. ``quantile``: the chi quantiles i / (R + 1), i = 1 .. R, given to the rows
            by a random permutation.

    Returns:
        ``(R, D)`` float32.
    """
    if projection == "iid":
        gaussian = torch.randn(features, head_dim, dtype=torch.float64)
        if norms == "chi":
            return gaussian.float()
        directions = torch.nn.functional.normalize(gaussian, dim=1)
    else:
        directions = haar(-(-features // head_dim), head_dim).flatten(0, 1)[:features]
    return (directions * _radii(features, head_dim, norms)[:, None]).float()


def haar(count: int, size: int) -> Tensor:
    """``(count, size, size)`` float64 orthogonal matrices, uniformly distributed.

    QR alone is not uniform, since LAPACK fixes the signs by its own rule; Q · sign(diag R) is. (So is sign(diag R) · Q:
    in the reflections behind Q, the sign of R_jj goes with the sign of row j as it goes with that of column j.)
    """
    q, r = torch.linalg.qr(torch.randn(count, size, size, dtype=torch.float64))
    signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)
    uniform: Tensor = q * signs[:, None, :]
    return uniform


def _radii(features: int, head_dim: int, norms: Norms) -> Tensor:
    if norms == "chi":
        # Drawn apart from the directions: the norms of the matrix behind Q are not independent of Q.
        return torch.randn(features, head_dim, dtype=torch.float64).square().sum(1).sqrt()
    if norms == "sqrt-d":
        return torch.full((features,), head_dim**0.5, dtype=torch.float64)
    import numpy as np
    from scipy.special import gammaincinv  # loads slowly, and only this option needs it

    # No tensors in between: this may run where only shapes are traced.
    levels = np.arange(1, features + 1) / (features + 1)
    quantiles = torch.tensor(np.sqrt(2 * gammaincinv(head_dim / 2, levels)).tolist(), dtype=torch.float64)
    return quantiles[torch.randperm(features)]
