from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from attnbench.catalogue.tasks.retrieval import Retrieval
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Examples
from attnbench.errors import Unsupported, UsageError


def texts(examples: Examples) -> list[list[bytes]]:
    return [
        [bytes((tower[real] - 1).tolist()) for tower, real in zip(pair, mask, strict=True)]
        for pair, mask in zip(examples.tokens, examples.key_mask, strict=True)
    ]


def stored(file: Path) -> list[list[str]]:
    """By the standard library's reader, without quoting."""
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_both_texts_are_their_bytes(released_retrieval: Path) -> None:
    task = Retrieval(Shape(seq_len=300), folder=str(released_retrieval))
    rows = stored(released_retrieval / "new_aan_pairs.test.tsv")
    (test,) = task.held_out("test", 10)
    assert texts(test) == [[row[3].encode(), row[4].encode()] for row in rows]
    assert test.labels.tolist() == [int(float(row[0])) for row in rows]
    assert (task.train_examples, task.test_examples) == (20, 6)


def test_long_texts_are_cut_at_n_and_at_ten_thousand_bytes(released_retrieval: Path) -> None:
    (released_retrieval / "new_aan_pairs.test.tsv").write_text(f"1\ta\tb\t{'x' * 200_000}\t{'y' * 30}")
    for n, expected in ((20, [20, 20]), (11_000, [10_000, 30])):
        (test,) = Retrieval(Shape(seq_len=n), folder=str(released_retrieval)).held_out("test", 10)
        assert test.key_mask.sum(2).tolist() == [expected]
        assert test.tokens.shape == (1, 2, n)


def test_a_text_without_bytes_is_one_token(released_retrieval: Path) -> None:
    (released_retrieval / "new_aan_pairs.test.tsv").write_bytes(b"0.0\ta\tb\t\ty\r\n1.0\ta\tb\tx\t\r\n")
    (test,) = Retrieval(Shape(seq_len=4), folder=str(released_retrieval)).held_out("test", 10)
    assert test.tokens.tolist() == [[[0] * 4, [122, 0, 0, 0]], [[121, 0, 0, 0], [0] * 4]]
    assert test.key_mask.equal(torch.tensor([True, False, False, False]).expand(2, 2, 4))


def test_a_batch_has_the_pairs_that_belong_together(released_retrieval: Path) -> None:
    task = Retrieval(Shape(seq_len=300), folder=str(released_retrieval))
    rows = stored(released_retrieval / "new_aan_pairs.train.tsv")
    batch = task.batch(0, 0, 20)
    found = [(*pair, label) for pair, label in zip(texts(batch), batch.labels.tolist(), strict=True)]
    assert sorted(found) == sorted((row[3].encode(), row[4].encode(), int(float(row[0]))) for row in rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"1.0\ta\tb\tx", "4 columns, not 5"),
        (b"1.0\ta\tb\tx\ty\tz", "6 columns, not 5"),
        (b"", "1 columns, not 5"),
        (b"2.0\ta\tb\tx\ty", "the label '2.0' is neither 0.0 nor 1.0"),
        (b"\xff\ta\tb\tx\ty", "the label '\ufffd' is neither"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(released_retrieval: Path, line: bytes, message: str) -> None:
    file = released_retrieval / "new_aan_pairs.eval.tsv"
    lines = file.read_bytes().split(b"\n")
    lines[2] = line
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(UsageError, match=f"new_aan_pairs.eval.tsv:3: {message}.*; unpack"):
        Retrieval(Shape(seq_len=10), folder=str(released_retrieval)).batch(0, 0, 1)


def test_an_empty_file_is_refused_and_a_missing_one_told_at_once(released_retrieval: Path) -> None:
    file = released_retrieval / "new_aan_pairs.train.tsv"
    file.write_bytes(b"")
    task = Retrieval(Shape(seq_len=10), folder=str(released_retrieval))
    with pytest.raises(UsageError, match=r"new_aan_pairs.train.tsv:1: no line"):
        task.batch(0, 0, 1)
    file.unlink()
    with pytest.raises(Unsupported, match=r"new_aan_pairs.train.tsv here; get lra_release.gz from"):
        Retrieval(Shape(seq_len=10), folder=str(released_retrieval))
