"""The box is found a second time, by what a frame is: the only shape with a hole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from attnbench.catalogue.tasks.detection import Detection
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples
from attnbench.errors import Unsupported

CASES = [
    (144, {}),
    (144, {"open_frames": True}),
    (256, {"distractors": 8, "open_frames": True}),
    (100, {"distractors": 1}),
]


def made(n: int, **options: bool) -> Detection:
    return Detection(Shape(seq_len=n), test=64, **options)


def pixels(examples: Examples, side: int) -> np.ndarray:
    """Bool images, from ids whose bits are the pixels of a patch: top left, top right, bottom left, bottom right."""
    ids = examples.tokens[:, : side * (side - 1)].view(-1, side - 1, side).numpy()
    images = np.zeros((len(ids), 2 * (side - 1), 2 * side), dtype=bool)
    for place, bit in (((0, 0), 8), ((0, 1), 4), ((1, 0), 2), ((1, 1), 1)):
        images[:, place[0] :: 2, place[1] :: 2] = ids & bit > 0
    return images


def with_holes(image: np.ndarray) -> list[list[int]]:
    """Left, top, right and bottom of each shape with a hole, in pixels."""
    shapes, _ = ndimage.label(image, structure=np.ones((3, 3)))
    found = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(shapes), start=1):
        one = shapes == number
        if (ndimage.binary_fill_holes(one) & ~one).any():
            found.append([columns.start, rows.start, columns.stop - 1, rows.stop - 1])
    return found


@pytest.mark.parametrize(("n", "options"), CASES)
def test_the_labels_are_the_box_of_the_only_shape_with_a_hole(n: int, options: dict) -> None:
    side = int(n**0.5)
    examples = made(n, **options).batch(0, 0, 100)
    asked = examples.labels[:, n - side : n - side + 4]
    for image, box in zip(pixels(examples, side), asked.tolist(), strict=True):
        (found,) = with_holes(image)
        assert [end // 2 for end in found] == box


@pytest.mark.parametrize(("n", "options"), CASES)
def test_shapes_do_not_touch_and_are_as_many_as_asked_for(n: int, options: dict) -> None:
    task = made(n, **options)
    for image in pixels(task.batch(0, 0, 50), int(n**0.5)):
        _, count = ndimage.label(image, structure=np.ones((3, 3)))
        assert count == 1 + options.get("distractors", 3)


def test_a_hole_that_is_open_is_none() -> None:
    # The second computation itself: with a gap planted into the frame it finds nothing, or it could not fail.
    task = made(144)
    (image,) = pixels(task.batch(0, 0, 1), 12)
    ((left, top, right, _),) = with_holes(image)
    image[top, (left + right) // 2] = False
    assert with_holes(image) == []


def test_only_four_tokens_are_asked_and_they_say_nothing_themselves() -> None:
    examples = made(144).batch(0, 0, 20)
    asked = examples.labels != NO_LABEL
    assert asked.sum(1).tolist() == [4] * 20
    assert asked[:, 132:136].all()
    assert examples.tokens[:, 132:].unique(dim=0).shape[0] == 1


def test_frames_are_anywhere_and_of_all_sizes() -> None:
    labels = made(144).batch(0, 0, 2000).labels[:, 132:136]
    for side in labels.unbind(1):
        assert side.bincount().max() < 0.25 * len(labels)
    wide, high = labels[:, 2] - labels[:, 0], labels[:, 3] - labels[:, 1]
    assert set(wide.tolist()) == set(high.tolist()) == {2, 3, 4}


def test_a_distractor_is_at_the_place_of_the_frame_as_often() -> None:
    # Place alone tells little: the frame is in each of the four cells about equally often.
    examples = made(144).batch(0, 0, 2000)
    left, top = examples.labels[:, 132] >= 6, examples.labels[:, 133] >= 5
    shares = torch.bincount(left.long() * 2 + top.long(), minlength=4) / 2000
    assert (shares - 0.25).abs().max() < 0.06


@pytest.mark.parametrize(("n", "distractors", "said"), [(150, 3, "not the square"), (64, 0, "set seq_len to 144")])
def test_another_length_is_refused(n: int, distractors: int, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        Detection(Shape(seq_len=n), distractors=distractors)


def test_shapes_without_room_are_refused() -> None:
    with pytest.raises(Unsupported, match="no room for 5 shapes in n = 144; lower distractors"):
        Detection(Shape(seq_len=144), distractors=4)


def test_many_images_are_drawn_as_few_are() -> None:
    # They are painted in parts, which must not change them.
    one = Detection(Shape(seq_len=144), test=300)
    (whole,) = one.held_out("test", 300)
    side = [[end // 2 for end in with_holes(image)[0]] for image in pixels(whole, 12)]
    assert side == whole.labels[:, 132:136].tolist()
