"""The kernel in the picture is the Gaussian one of the distance, and every estimate of it is right on average."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import UsageError
from attnbench.figures.pictures import density, draw
from attnbench.figures.pictures.density import WAYS, gaussian, kernels, rays, true_kernel

SHAPE = Shape(batch=1, heads=1, seq_len=6, head_dim=8)
INPUTS = parse_spec("gaussian:logit_std=0.25")
DISTANCES = torch.tensor([0.0, 1.0, 2.5], dtype=torch.float64)


def test_softmax_over_the_two_lengths_is_the_kernel_of_the_distance() -> None:
    q, k, _ = (x.double() for x in draw_qkv(INPUTS, SHAPE, 3))
    queries, keys = rays(q, k, DISTANCES)
    away = (queries - keys).norm(dim=-1)[:, 0] / 8**0.25
    assert torch.allclose(away, DISTANCES.expand(6, 3))
    exact = gaussian((queries @ keys.mT / 8**0.5).exp(), queries, keys)[:, 0, 0]
    assert torch.allclose(exact, torch.from_numpy(true_kernel(DISTANCES.numpy())).expand(6, 3))
    # Each key lies towards the one that was drawn with the query.
    along = (keys[:, 0, 1] - queries[:, 0, 0]) * (k[0, 0] - q[0, 0])
    assert (along.sum(-1) > 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_every_estimate_is_right_on_average(way: str) -> None:
    q, k, _ = (x.double() for x in draw_qkv(INPUTS, SHAPE, 0))
    queries, keys = rays(q, k, DISTANCES)
    own = Shape(batch=6, heads=1, seq_len=1, kv_len=3, head_dim=8)
    drawn = torch.stack(
        [
            gaussian(build(WAYS[way], own, seed=seed, features=64).double().kernel(queries, keys), queries, keys)
            for seed in range(400)
        ]
    )[:, :, 0, 0]
    truth = torch.from_numpy(true_kernel(DISTANCES.numpy()))
    error = drawn.std(0) / 20
    assert ((drawn.mean(0) - truth).abs() < 4.5 * error + 1e-12).all()
    assert (error < 0.2).all()


def test_trigonometric_features_are_sure_at_no_distance_and_positive_ones_never_negative() -> None:
    found = dict(list(kernels(INPUTS, SHAPE, features=16, draws=5).groupby("features")))
    waves = found["trigonometric"]
    assert np.allclose(waves.filter(like="estimate_").iloc[0], 1.0)
    assert waves["estimate_low"].min() < 0
    for way in ("positive", "hyperbolic", "FAVOR++"):
        assert (found[way].filter(like="estimate_") > 0).all(axis=None)
        # What grows with the distance is the error over the kernel, and far more that of the waves.
        far = [found[one]["relative_error_median"].iloc[-1] for one in ("trigonometric", way)]
        assert far[0] > 3 * far[1]


def test_the_picture_says_the_errors_that_it_draws(
    words: Callable[..., str], faults: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density, "DRAWS", 3)
    for width in ("column", "page"):
        picture = draw("density", n=8, width=width)
        assert faults(picture.figure) == []
    table = picture.numbers
    assert len(table) == 4 * 33
    far = table[table["distance"] == 3.0].set_index("features")["relative_error_median"].sort_values()
    first = f"median relative error at r = 3: {far.index[0]} {density.plain(float(f'{far.iloc[0]:.2g}'))}"
    assert first in words(picture.figure)


def test_one_query_is_no_picture() -> None:
    with pytest.raises(UsageError, match="2 to 4096 queries, not 1"):
        draw("density", n=1)
