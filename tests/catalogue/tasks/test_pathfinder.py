from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from PIL import Image

from attnbench.catalogue.tasks.pathfinder import Pathfinder
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError

SHAPE = Shape(seq_len=1024)


def every(folder: Path) -> list[list[int]]:
    """Pixels and label of each image that the task has, of all splits."""
    task = Pathfinder(SHAPE, folder=str(folder))
    assert task.train_examples is not None
    parts = [task.batch(0, 0, task.train_examples), *task.held_out("validation", 50), *task.held_out("test", 50)]
    return torch.cat([torch.cat([part.tokens, part.labels[:, None]], dim=1) for part in parts]).tolist()


def test_every_image_is_in_one_split_and_has_its_label(released_pathfinder: Path) -> None:
    task = Pathfinder(SHAPE, folder=str(released_pathfinder))
    assert (task.train_examples, sum(1 for _ in task.held_out("validation", 1)), task.test_examples) == (32, 4, 4)
    pixels = [np.rint(imread(file) * 255).astype(int).ravel().tolist() for file in released_pathfinder.rglob("*.png")]
    assert sorted(every(released_pathfinder)) == sorted([*image, image[0] % 2] for image in pixels)


def test_the_order_of_lines_and_folders_does_not_matter(released_pathfinder: Path) -> None:
    before = next(Pathfinder(SHAPE, folder=str(released_pathfinder)).held_out("test", 50))
    file = released_pathfinder / "metadata/0.npy"
    file.write_text("\n".join(sorted(file.read_text().splitlines())))
    after = next(Pathfinder(SHAPE, folder=str(released_pathfinder)).held_out("test", 50))
    assert before.tokens.equal(after.tokens)


def test_an_empty_image_is_left_out(released_pathfinder: Path) -> None:
    (released_pathfinder / "imgs/1/sample_7.png").write_bytes(b"")
    rows = every(released_pathfinder)
    assert len(rows) == 39
    assert all(row[0] % 2 == row[-1] for row in rows)


def test_a_broken_image_is_refused_with_its_path(released_pathfinder: Path) -> None:
    file = released_pathfinder / "imgs/1/sample_7.png"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for content in (whole[:-200], whole[:10], b"no image", bytes(flipped)):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"imgs/1/sample_7.png: not a readable image .*; unpack"):
            every(released_pathfinder)
    file.unlink()
    with pytest.raises(UsageError, match=r"imgs/1/sample_7.png: not a readable image .*No such file"):
        every(released_pathfinder)
    Image.new("L", (128, 64)).save(file)
    with pytest.raises(UsageError, match=r"imgs/1/sample_7.png: 128 x 64 pixels, not 32 x 32"):
        every(released_pathfinder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("imgs/0 sample_3.png 3", "3 fields, fewer than 4"),
        ("", "0 fields, fewer than 4"),
        ("imgs/0 sample_3.png 3 2 1.0", "no number and label 0 or 1"),
        ("imgs/0 sample_3.png three 1 1.0", "no number and label 0 or 1"),
        ("\x93NUMPY\x01", "1 fields, fewer than 4"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(released_pathfinder: Path, line: str, message: str) -> None:
    file = released_pathfinder / "metadata/0.npy"
    lines = file.read_text().splitlines()
    lines[4] = line
    file.write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(UsageError, match=f"metadata/0.npy:5: {message}.*; unpack"):
        every(released_pathfinder)


def test_what_is_not_there_or_does_not_fit_is_told(released_pathfinder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="set seq_len to 1024, not 4096"):
        Pathfinder(Shape(seq_len=4096), folder=str(released_pathfinder))
    with pytest.raises(Unsupported, match=r"nowhere here; get lra_release.gz"):
        Pathfinder(SHAPE, folder=str(tmp_path / "nowhere"))
    for file in (released_pathfinder / "metadata").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match="no image is listed"):
        every(released_pathfinder)


def test_the_digest_is_of_labels_and_images(released_pathfinder: Path) -> None:
    def digest() -> str:
        return Pathfinder(SHAPE, folder=str(released_pathfinder)).digest

    seen = [digest(), digest()]
    Image.new("L", (32, 32)).save(released_pathfinder / "imgs/1/sample_7.png")
    seen.append(digest())
    file = released_pathfinder / "metadata/0.npy"
    file.write_text(file.read_text().replace(" 3 0 1.0", " 3 x 1.0").replace(" 3 1 1.0", " 3 0 1.0").replace("x", "1"))
    seen.append(digest())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
