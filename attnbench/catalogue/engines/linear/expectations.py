"""Means and variances of products of random features, in closed form.

x ``(..., N, D)`` and y ``(..., M, D)`` give ``(..., N, M)``. z = x + y and Δ = x - y; R is the number of rows of ω.
"""

from __future__ import annotations

from math import log, pi, sqrt

import torch
from torch import Tensor


def squared_sums(x: Tensor, y: Tensor) -> Tensor:
    """‖x + y‖² for every pair."""
    return squares(x) + squares(y).mT + 2 * x @ y.mT


def squares(x: Tensor) -> Tensor:
    """‖x‖² ``(..., N, 1)``."""
    square: Tensor = torch.linalg.vecdot(x, x)[..., None]
    return square


def positive_variance(x: Tensor, y: Tensor, features: int) -> Tensor:
    """Variance of exp(ω·x - ‖x‖²/2)·exp(ω·y - ‖y‖²/2) for independent ω: (e^‖z‖² - 1) e^(2x·y) / R."""
    return torch.expm1(squared_sums(x, y)) * (2 * x @ y.mT).exp() / features


def hyperbolic_variance(x: Tensor, y: Tensor, features: int) -> Tensor:
    """Variance of the mean over ω and -ω of that product: ½(1 - e^-‖z‖²) times :func:`positive_variance`."""
    return positive_variance(x, y, features) * -torch.expm1(-squared_sums(x, y)) / 2


def cosine_variance(x: Tensor, y: Tensor, features: int) -> Tensor:
    """Variance of cos(ω·Δ) for independent ω: (1 - e^-‖Δ‖²)² / 2R, about the mean e^(-‖Δ‖²/2)."""
    return torch.expm1(-squared_sums(x, -y)).square() / (2 * features)


def general_second_moment(kernel: str, gamma: float, x: Tensor, y: Tensor) -> Tensor:
    """E of the squared product of two features of one ω, drawn from N(0, γ²I) and weighed as if from N(0, I).

    With s = 2γ² - 1 it is γ^(2D) s^(-D/2) exp(2γ²‖z‖²/s - ‖x‖² - ‖y‖²) for positive features; for hyperbolic ones half
    the sum of that and of the same at z = 0; for trigonometric ones ½(1 + exp(-2γ²‖Δ‖²/s)) in place of the first
    exponential, and squares of the other sign. It is infinite for γ² <= ½.
    """
    s, lengths = 2 * gamma**2 - 1, squares(x) + squares(y).mT
    constant = x.shape[-1] * (2 * log(gamma) - log(s) / 2)
    if kernel == "trig":
        return (1 + (squared_sums(x, -y) * (-2 * gamma**2 / s)).exp()) / 2 * (constant + lengths).exp()
    positive = (constant + squared_sums(x, y) * (2 * gamma**2 / s) - lengths).exp()
    return positive if kernel == "positive" else (positive + (constant - lengths).exp()) / 2


def radial_mean(square: Tensor, radii: Tensor) -> Tensor:
    """Mean of exp(r u·z) over directions u, uniform on the sphere, and the given radii r: 0F1(D/2; r²‖z‖²/4).

    Args:
        square: ‖z‖², any shape; negative for the mean of cos(r u·z).
        radii: ``(R, D)``, rows whose lengths are the radii.
    """
    from scipy.special import hyp0f1  # loads slowly, and only this needs it

    half, values = radii.shape[1] / 2, torch.zeros_like(square, dtype=torch.float64)
    for length in radii.double().square().sum(1).tolist():
        values += torch.from_numpy(hyp0f1(half, length / 4 * square.double().cpu().numpy())).to(values.device)
    return (values / radii.shape[0]).to(square.dtype)


def rectified(x: Tensor, y: Tensor, floor: float, first: float = 1.0, second: float = 1.0) -> Tensor:
    """Mean of (max(ω·x, 0) + floor)·(max(ω·y, 0) + floor), for rows ω of uniform directions.

    For ω ~ N(0, I) and no floor it is ‖x‖‖y‖ (sin θ + (π - θ) cos θ) / 2π, half the arc-cosine kernel of order 1 of
    Cho and Saul 2009. ``first`` and ``second`` are the mean length and mean square length of ω over those of N(0, I).
    """
    long_x, long_y = squares(x).sqrt(), squares(y).sqrt().mT
    lengths = long_x * long_y
    cosine = (x @ y.mT / lengths.clamp(min=torch.finfo(x.dtype).tiny)).clamp(-1, 1)
    theta = cosine.acos()
    arc_cosine = lengths * (theta.sin() + (pi - theta) * cosine) / (2 * pi)
    linear = (long_x + long_y) / sqrt(2 * pi)  # E max(ω·x, 0) = ‖x‖/√(2π)
    return second * arc_cosine + floor * first * linear + floor**2
