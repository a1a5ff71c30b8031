"""The errors of random features are those of the matrices that the features make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.figures.kit.ticks import plain
from attnbench.figures.pictures import draw, features
from attnbench.figures.pictures.features import draw_features, errors_over_features
from attnbench.laws.implied import implied

SHAPE = Shape(batch=1, heads=1, seq_len=24, head_dim=8)
INPUTS = parse_spec("gaussian:logit_std=0.5")


def test_an_error_is_that_of_the_matrix_which_the_variant_applies() -> None:
    found, trivial = errors_over_features(INPUTS, SHAPE, features=(16,), draws=3)
    q, k, _ = (x.double() for x in draw_qkv(INPUTS, SHAPE, 2))
    exact = (q @ k.mT * 8**-0.5).softmax(-1)[0]
    errors = found.set_index(["way", "draw"])["mean_squared_error"]
    for way, options in zip(found["way"].unique(), ("", ",projection=iid", ",kernel=trig"), strict=True):
        module = build(f"performer:features=16{options}", SHAPE, seed=2).double()
        error = float((implied(module.dense, q, k) - exact).square().mean())
        assert errors[way, 2] == pytest.approx(error), way
    assert 0 < trivial < 1


def test_more_features_have_less_error_in_every_way() -> None:
    found, _ = errors_over_features(INPUTS, SHAPE, features=(8, 128))
    errors = found.groupby(["way", "features"])["mean_squared_error"]
    median = errors.median()
    assert all(median[way, 8] > 2 * median[way, 128] for way in found["way"].unique())
    assert (errors.count() == 15).all()


def test_the_picture_says_the_ratios_of_its_lines(
    words: Callable[..., str], faults: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = errors_over_features(INPUTS, SHAPE, features=(8, 32), draws=4)
    monkeypatch.setattr(features, "errors_over_features", lambda inputs, shape: few)
    for width in ("column", "page"):
        picture = draw("features", width=width)
        assert faults(picture.figure) == []
    median = picture.numbers.groupby(["projection", "kernel", "features"])["mean_squared_error"].median()
    ratio = median["iid", "positive", 8] / median["orthogonal", "positive", 8]
    assert f"independent over orthogonal: {plain(float(f'{ratio:.2g}'))} times the error at 8 features" in words(
        picture.figure
    )
    assert len(picture.numbers) == 3 * 2 * 4


def test_the_default_is_the_papers_width_and_number_of_draws() -> None:
    assert (features.WIDTH, features.DRAWS) == (16, 15)
    assert torch.get_default_dtype() == torch.float32  # nothing here changes it
    assert draw_features.__kwdefaults__["inputs"] == "gaussian:logit_std=1"
