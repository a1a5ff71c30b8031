"""A shift of the sinusoids is a rotation, the same for all positions, and what is no sinusoid is told apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from attnbench.errors import UsageError
from attnbench.figures.pictures import draw
from attnbench.figures.pictures.positions import draw_positions, frequencies, shift_of
from attnbench.models.encoder import sinusoids


def largest_error(shift: pd.DataFrame) -> float:
    return float(shift["largest_error_of_all"].iloc[0])


def test_the_table_of_the_model_obeys_the_shift_law() -> None:
    shift = shift_of(sinusoids(50, 128).double().numpy(), 10)
    assert largest_error(shift) < 1e-5  # of the table, which is in float32
    assert np.abs(np.exp(1j * shift["rotation"]) - np.exp(1j * shift["expected_rotation"])).max() < 1e-6


def test_exact_sinusoids_obey_it_to_the_last_digits() -> None:
    angles = np.arange(40)[:, None] * frequencies(16)
    table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(40, 16)
    assert largest_error(shift_of(table, 7)) < 1e-13


def test_positions_that_are_no_sinusoids_break_it() -> None:
    table = np.random.default_rng(0).standard_normal((50, 16))
    assert largest_error(shift_of(table, 10)) > 0.5


def test_the_numbers_are_those_of_the_picture(words: Callable[..., str]) -> None:
    picture = draw("positions", n=30, head_dim=8)
    assert list(picture.numbers["frequency"]) == pytest.approx([1, 0.1, 0.01, 0.001])
    assert set(picture.numbers["shift"]) == {6}
    assert picture.numbers["rotation"].iloc[1] == pytest.approx(0.6, abs=1e-6)
    error = picture.numbers["largest_error_of_all"].iloc[0]
    assert f"largest error {error:.0e}".replace("e-0", "e-") in words(picture.figure)


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(UsageError, match="sinusoids come in pairs: --head-dim must be even"):
        draw_positions(head_dim=7)
    with pytest.raises(UsageError, match="positions to draw are 5 to 2048, not 4"):
        draw_positions(n=4)
