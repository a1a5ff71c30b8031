from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.tasks.digits import Digits
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported

TASK = Digits(Shape(seq_len=64))


def rows(split: str) -> list[tuple[int, ...]]:
    return [
        (*tokens, label)
        for part in TASK.held_out(split, 100)
        for tokens, label in zip(part.tokens.tolist(), part.labels.tolist(), strict=True)
    ]


def trained() -> list[tuple[int, ...]]:
    epoch = TASK.batch(0, 0, 1100)
    return [(*tokens, label) for tokens, label in zip(epoch.tokens.tolist(), epoch.labels.tolist(), strict=True)]


def test_the_three_splits_are_all_images_and_share_none() -> None:
    train, validation, test = set(trained()), set(rows("validation")), set(rows("test"))
    assert (len(train), len(validation), len(test)) == (1100, 200, 497)
    assert (TASK.train_examples, TASK.test_examples) == (1100, 497)
    assert len(train | validation | test) == 1797


def test_each_split_has_about_a_tenth_of_each_digit() -> None:
    for split in (trained(), rows("validation"), rows("test")):
        shares = torch.bincount(torch.tensor(split)[:, 64], minlength=10) / len(split)
        assert shares.min() > 0.06
        assert shares.max() < 0.14


def test_images_are_bright_in_the_middle_and_a_zero_has_a_hole() -> None:
    # The margins of the scans are empty; were rows or columns mixed up, the hole of a zero would be gone.
    images = torch.tensor(trained()).float()
    pictures, digits = images[:, :64].view(-1, 8, 8), images[:, 64]
    assert pictures.max() == 16
    assert pictures[:, :, 0].mean() < 0.1
    zero, one = pictures[digits == 0].mean(0), pictures[digits == 1].mean(0)
    assert zero[3:5, 3:5].mean() < 2
    assert one[3:5, 3:5].mean() > 9


def test_nearest_neighbours_know_the_digit() -> None:
    # Labels belong to their images: one neighbour out of 1,100 is right nearly always.
    train, test = torch.tensor(trained()).float(), torch.tensor(rows("test")).float()
    nearest = torch.cdist(test[:, :64], train[:, :64]).argmin(1)
    assert (train[nearest, 64] == test[:, 64]).float().mean() > 0.96


def test_the_first_image_of_the_file_is_the_zero_of_every_introduction() -> None:
    first = (0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0)
    assert sum(row[:16] == first and row[64] == 0 for row in [*trained(), *rows("validation"), *rows("test")]) == 1


def test_another_length_is_refused() -> None:
    with pytest.raises(Unsupported, match="set seq_len to 64, not 128"):
        Digits(Shape(seq_len=128))


def test_the_digest_is_of_the_shipped_file() -> None:
    assert TASK.digest == "09f66e6debdee2cd"
