from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from attnbench.catalogue.tasks.image import Image
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError

SHAPE = Shape(seq_len=1024)


def grey(record: bytes) -> list[int]:
    """By decimal arithmetic, a pixel at a time."""
    planes = zip(record[1:1025], record[1025:2049], record[2049:], strict=True)
    return [int(Decimal("0.299") * r + Decimal("0.587") * g + Decimal("0.114") * b) for r, g, b in planes]


def records(folder: Path, *names: str) -> list[bytes]:
    whole = b"".join((folder / name).read_bytes() for name in names)
    return [whole[start : start + 3073] for start in range(0, len(whole), 3073)]


def test_pixels_are_grey_and_labels_the_first_byte(released_image: Path) -> None:
    (test,) = Image(SHAPE, folder=str(released_image)).held_out("test", 10)
    stored = records(released_image, "test_batch.bin")
    assert test.tokens.tolist() == [grey(record) for record in stored]
    assert test.labels.tolist() == [record[0] for record in stored]
    assert test.key_mask is None


def test_white_is_white_and_black_is_black(released_image: Path) -> None:
    (released_image / "test_batch.bin").write_bytes(b"\3" + b"\xff" * 3072 + b"\4" + b"\0" * 3072)
    (test,) = Image(SHAPE, folder=str(released_image)).held_out("test", 10)
    assert test.tokens.unique(dim=1).tolist() == [[255], [0]]


def test_the_last_tenth_is_for_validation(released_image: Path) -> None:
    task = Image(SHAPE, folder=str(released_image))
    stored = [grey(record) for record in records(released_image, *(f"data_batch_{i}.bin" for i in range(1, 6)))]
    (validation,) = task.held_out("validation", 10)
    assert (task.train_examples, task.test_examples) == (18, 6)
    assert validation.tokens.tolist() == stored[18:]
    assert sorted(task.batch(0, 0, 18).tokens.tolist()) == sorted(stored[:18])


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (slice(None, -1), "record 3 has 3072 of 3073 bytes"),
        (slice(0, 0), "record 0 has 0 of 3073 bytes"),
        (slice(1, None), "record 3 has 3072 of 3073 bytes"),
    ],
)
def test_a_file_of_broken_records_is_refused(released_image: Path, cut: slice, message: str) -> None:
    file = released_image / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[cut])
    with pytest.raises(UsageError, match=f"data_batch_3.bin: {message}; unpack"):
        Image(SHAPE, folder=str(released_image)).batch(0, 0, 1)


def test_a_label_out_of_range_is_refused_with_its_record(released_image: Path) -> None:
    file = released_image / "test_batch.bin"
    content = bytearray(file.read_bytes())
    content[2 * 3073] = 10
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"test_batch.bin: record 2 has the label 10, above 9"):
        list(Image(SHAPE, folder=str(released_image)).held_out("test", 10))


def test_what_is_not_there_or_does_not_fit_is_told_at_once(released_image: Path) -> None:
    with pytest.raises(Unsupported, match="set seq_len to 1024, not 64"):
        Image(Shape(seq_len=64), folder=str(released_image))
    (released_image / "data_batch_5.bin").unlink()
    with pytest.raises(Unsupported, match=r"data_batch_5.bin here; get cifar-10-binary.tar.gz from https"):
        Image(SHAPE, folder=str(released_image))
