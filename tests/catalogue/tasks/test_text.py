from __future__ import annotations

from pathlib import Path

import pytest

from attnbench.catalogue.tasks.reviews import Reviews
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples
from attnbench.errors import Unsupported, UsageError


def texts(examples: Examples) -> list[bytes]:
    return [
        bytes(token - 1 for token in row[mask].tolist())
        for row, mask in zip(examples.tokens, examples.key_mask, strict=True)
    ]


def test_reviews_are_their_bytes_and_labels_their_folders(released_text: Path) -> None:
    (test,) = Reviews(Shape(seq_len=200), folder=str(released_text)).held_out("test", 20)
    stored = {file.read_bytes(): int(file.parent.name == "pos") for file in released_text.glob("test/*/*.txt")}
    assert dict(zip(texts(test), test.labels.tolist(), strict=True)) == stored
    assert len(stored) == 8


def test_a_long_review_is_cut_and_a_short_one_padded(released_text: Path) -> None:
    (test,) = Reviews(Shape(seq_len=30), folder=str(released_text)).held_out("test", 20)
    stored = sorted(file.read_bytes()[:30] for file in released_text.glob("test/*/*.txt"))
    assert sorted(texts(test)) == stored
    assert {len(text) for text in stored} >= {30}
    assert (test.tokens[~test.key_mask] == 0).all()
    assert not test.key_mask.all()


def test_a_byte_of_zero_is_no_padding(released_text: Path) -> None:
    (released_text / "test/pos/9_9.txt").write_bytes(b"a\0b\0")
    (test,) = Reviews(Shape(seq_len=30), folder=str(released_text)).held_out("test", 20)
    assert b"a\0b\0" in texts(test)


def test_a_tenth_of_the_training_reviews_is_for_validation(released_text: Path) -> None:
    task = Reviews(Shape(seq_len=200), folder=str(released_text))
    (validation,) = task.held_out("validation", 20)
    trained = texts(task.batch(0, 0, 18))
    assert (task.train_examples, len(validation.labels), task.test_examples) == (18, 2, 8)
    assert {*trained, *texts(validation)} == {file.read_bytes() for file in released_text.glob("train/[pn]*/*.txt")}


def test_the_digest_changes_with_a_byte_and_with_a_name(released_text: Path) -> None:
    def digest() -> str:
        return Reviews(Shape(seq_len=10), folder=str(released_text)).digest

    seen = [digest()]
    file = released_text / "test/neg/0_1.txt"
    file.write_bytes(file.read_bytes() + b"!")
    seen.append(digest())
    file.rename(file.with_name("0_2.txt"))
    seen.append(digest())
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/pos/3_9.txt", b"one\ntwo \xff three", r"3_9.txt:2: byte 8 is not UTF-8"),
        ("train/pos/3_9.txt", b"", "3_9.txt: no text"),
        ("test/neg/3_9.txt", b"good", "3_9.txt: 9 stars do not belong in neg"),
        ("test/pos/3_11.txt", b"good", "3_11.txt: 11 stars do not belong in pos"),
        ("train/neg/3.txt", b"bad", r"3.txt: the name is not <id>_<stars>.txt; remove"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(released_text: Path, name: str, content: bytes, message: str) -> None:
    (released_text / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        Reviews(Shape(seq_len=10), folder=str(released_text)).batch(0, 0, 1)


def test_an_empty_folder_is_refused(released_text: Path) -> None:
    for file in released_text.glob("test/neg/*.txt"):
        file.unlink()
    with pytest.raises(UsageError, match=r"aclImdb/test: not both pos/\*.txt and neg/\*.txt"):
        Reviews(Shape(seq_len=10), folder=str(released_text)).batch(0, 0, 1)


def test_reviews_that_are_not_there_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unsupported, match=r"^no data/aclImdb here; get aclImdb_v1.tar.gz from https://.*folder=PATH$"):
        Reviews(Shape(seq_len=10))
