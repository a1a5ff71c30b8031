from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from scipy import ndimage

from attnbench.catalogue.tasks.contours import Contours
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported

SIDE = 32
SHAPE = Shape(seq_len=SIDE**2)


@pytest.fixture(scope="module")
def examples() -> tuple[np.ndarray, np.ndarray]:
    """300 pictures and their labels."""
    drawn = Contours(SHAPE, test=1).batch(0, 0, 300)
    return drawn.tokens.view(-1, SIDE, SIDE).numpy(), drawn.labels.numpy().astype(bool)


def dots(picture: np.ndarray) -> np.ndarray:
    """Middles of the white patches that hold a square of 2 x 2 and more: a dash is thinner."""
    cross = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]])
    inner = ndimage.binary_erosion(picture == 15, cross)
    patches, count = ndimage.label(inner)
    return np.array(ndimage.center_of_mass(inner, patches, range(1, count + 1)))


def joined(picture: np.ndarray) -> bool:
    """Whether one comes from dot to dot over what is painted, however faintly."""
    patches, _ = ndimage.label(picture > 0, np.ones((3, 3)))
    first, second = np.rint(dots(picture)).astype(int)
    return bool(patches[tuple(first)] == patches[tuple(second)])


def test_every_image_has_two_dots(examples: tuple[np.ndarray, np.ndarray]) -> None:
    assert [len(dots(picture)) for picture in examples[0]] == [2] * 300


def test_the_label_is_whether_a_walk_over_the_paint_joins_the_dots(examples: tuple[np.ndarray, np.ndarray]) -> None:
    pictures, labels = examples
    found = np.array([joined(picture) for picture in pictures])
    assert found[labels].all()
    assert found[~labels].mean() < 0.05, "a dot may touch the faint rim of another curve"


def test_neither_labels_nor_distances_of_dots_nor_brightness_give_the_answer_away(
    examples: tuple[np.ndarray, np.ndarray],
) -> None:
    pictures, labels = examples
    assert abs(labels.mean() - 0.5) < 5 * (0.25 / 300) ** 0.5
    distance = np.array([np.linalg.norm(np.subtract(*dots(picture))) for picture in pictures])
    for told in (distance, pictures.sum((1, 2))):
        difference = told[labels].mean() - told[~labels].mean()
        assert abs(difference) < 5 * told.std() * (4 / 300) ** 0.5
        best = max(abs((told[labels] < at).mean() - (told[~labels] < at).mean()) for at in told)
        assert best < 0.25  # by chance alone 0.16 in 1 of 20 such samples


def test_an_image_has_as_many_curves_as_are_asked_for() -> None:
    few = Contours(SHAPE, distractors=0, test=1).batch(0, 0, 200).tokens.float().mean()
    many = Contours(SHAPE, distractors=4, test=1).batch(0, 0, 200).tokens.float().mean()
    assert many > 1.2 * few


def test_the_same_generator_draws_the_same_images_and_they_do_not_change() -> None:
    batch = Contours(SHAPE, test=1).batch(0, 0, 8)
    again = Contours(SHAPE, test=1).batch(0, 0, 8)
    assert batch.tokens.equal(again.tokens)
    assert int((batch.tokens * torch.arange(1, 1025)).sum()) == 3525287, "raise its version where this changes"


def test_two_hundred_images_a_second_are_drawn() -> None:
    task, start = Contours(SHAPE), time.process_time()
    task.draw(256, torch.Generator().manual_seed(0))
    assert time.process_time() - start < 5, "about 0.6 seconds on a free core"


@pytest.mark.parametrize(("n", "options"), [(1000, {}), (400, {}), (1024, {"dashes": 1000}), (1024, {"dashes": 20})])
def test_what_finds_no_room_is_refused(n: int, options: dict[str, int]) -> None:
    with pytest.raises(Unsupported, match=r"not the square of|no room for"):
        Contours(Shape(seq_len=n), test=1, **options).batch(0, 0, 1)
