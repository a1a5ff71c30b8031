"""Entropy and gradient of softmax rows are those of their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from attnbench.errors import UsageError
from attnbench.figures.pictures import draw
from attnbench.figures.pictures.saturation import draw_saturation, jacobian_norm, quartiles_of


def test_the_norm_is_that_of_the_jacobian_of_softmax() -> None:
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row in logits:
        jacobian = torch.autograd.functional.jacobian(lambda z: z.softmax(-1), row)
        assert float(jacobian_norm(row.softmax(-1)[None])) == pytest.approx(float(jacobian.norm()))


def test_uniform_rows_have_all_the_entropy_and_a_row_of_one_key_has_none_and_no_gradient() -> None:
    entropy, gradient = quartiles_of(torch.full((4, 16), 1 / 16, dtype=torch.float64))
    assert entropy == pytest.approx([1, 1, 1])
    assert gradient == pytest.approx([math.sqrt(15) / 16] * 3)
    entropy, gradient = quartiles_of(torch.eye(16, dtype=torch.float64))
    assert entropy == pytest.approx([0, 0, 0])
    assert gradient == pytest.approx([0, 0, 0])


def test_the_factor_makes_rows_of_every_width_alike_and_without_it_wide_ones_saturate() -> None:
    table = draw_saturation(n=128).numbers
    scaled = table[table["logit_std"] == 1.0].set_index("head_dim")["entropy_median"]
    bare = table[table["scale"] == 1.0].set_index("head_dim")["entropy_median"]
    assert set(scaled.index) == set(bare.index) == {16, 64, 256}
    assert scaled.max() - scaled.min() < 0.03
    assert (scaled > 0.85).all()
    assert list(bare) == sorted(bare, reverse=True)
    assert bare[256] < 0.2


@pytest.mark.parametrize("width", ["page", "column"])
def test_every_word_can_be_read(width: str, faults: Callable[..., list[str]], words: Callable[..., str]) -> None:
    picture = draw("saturation", n=64, width=width)
    assert faults(picture.figure) == []
    if width == "column":  # the sentence takes several lines
        return
    kept = picture.numbers.query("head_dim == 256 and scale == 0.0625")["entropy_median"].iloc[0]
    assert f"with 1/√d a row keeps {kept:.0%} of the entropy" in words(picture.figure)


def test_a_single_width_can_be_asked_for_and_a_single_key_not() -> None:
    assert set(draw_saturation(n=32, head_dim=100).numbers["head_dim"]) == {100}
    with pytest.raises(UsageError, match="softmax rows have 2 to 65536 keys here, not 1"):
        draw_saturation(n=1)
    with pytest.raises(UsageError, match="a head is 1 to 65536 wide here, not 0"):
        draw_saturation(head_dim=0)
