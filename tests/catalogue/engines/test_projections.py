from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import hyp0f1
from torch import Tensor

from attnbench.catalogue.engines.linear.random_maps import Norms, Projection, draw_projection, haar


def test_orthogonal_matrices_are_uniform_and_not_merely_orthogonal() -> None:
    q = haar(20_000, 6)
    assert torch.allclose(q @ q.mT, torch.eye(6, dtype=torch.float64).expand_as(q), atol=1e-12)
    # QR without the sign fix has a mean diagonal of about -0.3 .. -0.8 here; uniform means 0, variance 1/6.
    standard_error = (1 / 6 / 20_000) ** 0.5
    assert (q.mean(0).abs() < 4.5 * standard_error).all()
    assert torch.allclose(q.square().mean(0), torch.full((6, 6), 1 / 6, dtype=torch.float64), atol=0.01)


@pytest.mark.parametrize("norms", ["chi", "sqrt-d", "quantile"])
def test_orthogonal_rows_are_orthogonal_in_blocks_of_the_head_width_only(norms: Norms) -> None:
    omega = draw_projection(21, 8, "orthogonal", norms).double()  # two blocks and five rows
    gram = omega @ omega.T
    norm = omega.norm(dim=1)
    cosine = gram / (norm[:, None] * norm)
    block = torch.arange(21) // 8
    same = block[:, None] == block
    off_diagonal = same & ~torch.eye(21, dtype=torch.bool)
    assert cosine[off_diagonal].abs().max() < 1e-6
    assert cosine[~same].abs().min() > 1e-6


def test_independent_rows_are_not_orthogonal() -> None:
    omega = draw_projection(8, 8, "iid", "chi")
    assert (omega @ omega.T).triu(1).abs().max() > 1.0


@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
@pytest.mark.parametrize("norms", ["chi", "sqrt-d"])
def test_mean_square_length_is_the_head_width(projection: Projection, norms: Norms) -> None:
    squares = draw_projection(16_000, 16, projection, norms).double().square().sum(1)
    if norms == "sqrt-d":
        assert torch.allclose(squares, torch.tensor(16.0, dtype=torch.float64), rtol=1e-6)
    else:
        assert abs(squares.mean() - 16) < 4 * (2 * 16 / 16_000) ** 0.5
        assert abs(squares.var() / 32 - 1) < 0.06


@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
def test_rows_have_the_covariance_of_a_standard_normal(projection: Projection) -> None:
    omega = draw_projection(40_000, 4, projection, "chi").double()
    assert torch.allclose(omega.T @ omega / 40_000, torch.eye(4, dtype=torch.float64), atol=0.03)
    assert omega.mean(0).abs().max() < 4 / 200


def test_radii_are_independent_of_the_directions_in_their_block() -> None:
    omega = draw_projection(4 * 20_000, 4, "orthogonal", "chi").double()
    radius = omega.norm(dim=1)
    direction = omega / radius[:, None]
    for square in (direction[:, 0].square(), direction[:, 3].square()):
        correlation = torch.corrcoef(torch.stack([radius, square]))[0, 1]
        assert abs(correlation) < 4 / 80_000**0.5
    # Radii of one matrix would also be correlated with the other rows' directions, and with each other through Q.
    blocks = radius.view(-1, 4)
    assert (torch.corrcoef(blocks.T) - torch.eye(4)).abs().max() < 4.5 / 20_000**0.5


@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
def test_quantile_radii_are_the_chi_quantiles_in_random_order(projection: Projection) -> None:
    from scipy.stats import chi

    radii = draw_projection(64, 8, projection, "quantile").double().norm(dim=1)
    expected = torch.from_numpy(chi(8).ppf(np.arange(1, 65) / 65))
    assert torch.allclose(radii.sort().values, expected, rtol=1e-6)
    order = torch.arange(64, dtype=torch.float64)
    assert abs(torch.corrcoef(torch.stack([radii, order]))[0, 1]) < 0.5
    again = draw_projection(64, 8, projection, "quantile").double().norm(dim=1)
    assert not torch.allclose(radii, again)


def bias(radii: Tensor, head_dim: int, square: float) -> float:
    """Relative bias of mean exp(R u·z - ‖z‖²/2) over uniform directions u: E exp(R u·z) = 0F1(D/2; R²‖z‖²/4)."""
    values = hyp0f1(head_dim / 2, radii.double().square().numpy() * square / 4)
    return float(values.mean() * np.exp(-square / 2) - 1)


@pytest.mark.parametrize(
    ("norms", "features", "percent"),
    [("quantile", 16, -0.507), ("quantile", 64, -0.197), ("quantile", 256, -0.069), ("sqrt-d", 16, -0.512)],
)
def test_fixed_radii_have_the_known_small_bias(norms: Norms, features: int, percent: float) -> None:
    radii = draw_projection(features, 16, "orthogonal", norms).norm(dim=1)
    assert 100 * bias(radii, 16, 0.62) == pytest.approx(percent, abs=0.006)


def test_the_seed_decides_the_draw() -> None:
    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return draw_projection(10, 4)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("norms", ["chi", "sqrt-d", "quantile"])
@pytest.mark.parametrize("projection", ["orthogonal", "iid"])
def test_any_number_of_features_and_any_width(projection: Projection, norms: Norms) -> None:
    for features, head_dim in ((1, 1), (1, 5), (7, 1), (3, 8)):
        omega = draw_projection(features, head_dim, projection, norms)
        assert omega.shape == (features, head_dim)
        assert omega.dtype == torch.float32
        assert omega.isfinite().all()


@pytest.mark.parametrize("norms", ["sqrt-d", "quantile"])
def test_fixed_radii_have_less_variance_than_random_ones(norms: Norms) -> None:
    x, y = torch.randn(2, 16, dtype=torch.float64) / 4
    random = torch.stack([draw_projection(16, 16) for _ in range(1500)]).double()
    radii = draw_projection(16, 16, "orthogonal", norms).double().norm(dim=1)
    order = torch.rand(1500, 16).argsort(1)
    fixed = torch.nn.functional.normalize(random, dim=2) * radii[order][..., None]
    of_fixed, of_random = (float((omega @ (x + y)).exp().mean(1).var()) for omega in (fixed, random))
    assert of_fixed < 0.97 * of_random
