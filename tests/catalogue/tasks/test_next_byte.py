from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from attnbench.catalogue.tasks.next_byte import NextByte, divided, help_of_python
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.task import make_task
from attnbench.errors import Unsupported

CAUSAL = Shape(seq_len=64, causal=True)
TEXT = b"a0\n\na1\n\n  a0 \n\na2\n\na3\n\na4\n\na5\n\na6\n\na7\n\na8\n\na1\n\na9"


def paragraphs(text: bytes) -> list[bytes]:
    return [b" ".join(one.split()) for one in text.split(b"\n\n") if one.strip()]


def test_each_label_is_the_byte_after_its_place() -> None:
    task = NextByte(CAUSAL)
    text = b"".join(divided(help_of_python().encode()))
    for examples in (task.batch(0, 3, 5), next(task.held_out("test", 5))):
        for tokens, labels in zip(examples.tokens.tolist(), examples.labels.tolist(), strict=True):
            assert bytes([*tokens, labels[-1]]) in text
            assert labels[:-1] == tokens[1:]


def test_every_paragraph_is_kept_once_where_it_stands_first_and_in_one_part() -> None:
    parts = divided(TEXT)
    assert [paragraphs(part) for part in parts] == [
        [b"a0", b"a1", b"a2", b"a3", b"a4", b"a5", b"a6", b"a7"],
        [b"a8"],
        [b"a9"],
    ]


def test_nothing_of_the_test_is_trained_on_though_the_text_repeats_itself() -> None:
    text = help_of_python().encode()
    every = paragraphs(text)
    assert len(every) - len(set(every)) > 300  # the trap: without care these stand on both sides
    cut = len(every) * 9 // 10
    assert set(every[:cut]) & set(every[cut:])  # and so they would
    train, validation, test = (set(paragraphs(part)) for part in divided(text))
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert train | validation | test == set(every)


@pytest.mark.parametrize("n", [4, 8, 32])
def test_short_windows_that_are_trained_on_are_in_no_test(n: int) -> None:
    train, *held_out = NextByte(Shape(seq_len=n, causal=True)).read()
    trained, *others = (
        {tuple(row) for row in part.take(torch.arange(len(part))).tokens.tolist()} for part in (train, *held_out)
    )
    assert not any(trained & one for one in others)


def test_the_parts_are_eight_one_and_one_tenths() -> None:
    sizes = [len(part) for part in divided(help_of_python().encode())]
    assert [round(10 * size / sum(sizes)) for size in sizes] == [8, 1, 1]
    task = NextByte(CAUSAL)
    assert task.train_examples == (sizes[0] - 1) // 64
    assert task.test_examples == (sizes[2] - 1) // 64


def test_it_is_english() -> None:
    words = help_of_python().lower().split()
    assert words.count("the") > 0.04 * len(words)


def test_a_model_that_sees_later_bytes_is_refused() -> None:
    with pytest.raises(Unsupported, match="set causal: true"):
        NextByte(Shape(seq_len=64))


def test_a_text_of_ones_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(b"\n\n".join(f"paragraph {number} is about {number}".encode() for number in range(200)))
    task = make_task(parse_spec(f"next-byte:file={file}"), CAUSAL)
    assert bytes(task.batch(0, 0, 1).tokens[0].tolist()) in file.read_bytes() + b"\n\n"
    assert task.digest != NextByte(CAUSAL).digest
    assert list(task.files()) == [file]  # type: ignore[attr-defined]
    before = task.digest
    file.write_bytes(file.read_bytes() + b".")
    assert make_task(parse_spec(f"next-byte:file={file}"), CAUSAL).digest != before


@pytest.mark.parametrize("text", [b"", b"too short", b"\n\n\n\n"])
def test_a_text_that_is_too_short_is_refused(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(text)
    with pytest.raises(Unsupported, match="too short for windows of 64 bytes; lower seq_len"):
        NextByte(CAUSAL, file=str(tmp_path / "short.txt")).batch(0, 0, 1)


def test_a_missing_file_and_a_python_without_the_text_say_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"no nowhere\.txt here; write next-byte:file=PATH"):
        NextByte(CAUSAL, file="nowhere.txt")
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(Unsupported, match="comes without pydoc_data"):
        help_of_python()


def test_an_epoch_sees_every_window_once() -> None:
    task = NextByte(Shape(seq_len=2048, causal=True))
    assert task.train_examples is not None
    seen = {str(row) for step in range(task.train_examples) for row in task.batch(0, step, 1).tokens.tolist()}
    assert len(seen) == task.train_examples
    assert torch.equal(task.batch(0, 0, 2).tokens[:1], task.batch(0, 0, 1).tokens)


def test_a_text_that_repeats_all_of_its_windows_has_no_test(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(b"\n\n".join(b"a" * (100 + number) for number in range(200)))
    with pytest.raises(Unsupported, match="repeats all windows of 1 bytes; raise seq_len"):
        NextByte(Shape(seq_len=1, causal=True), file=str(file)).read()
