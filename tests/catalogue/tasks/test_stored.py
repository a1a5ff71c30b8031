"""What holds for every task that has as many examples as are stored."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from attnbench.catalogue.tasks.stored import Images, Stored, blocks, digest_of, fixed_order, present
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Form
from attnbench.errors import Unsupported, UsageError


class Numbered(Stored):
    """Example i is the token i."""

    def __init__(self, train: int = 10) -> None:
        super().__init__("numbered", Shape(seq_len=1), Form((256,), 256), masked_share=0.5)
        self.train = train
        self.read_times = 0

    def read(self) -> list:
        self.read_times += 1
        every = np.arange(self.train + 7, dtype=np.uint8)
        images = Images(every[:, None], every)
        return [
            images.at(every[: self.train]),
            images.at(every[self.train : self.train + 2]),
            images.at(every[self.train + 2 :]),
        ]

    def digest_read(self) -> str:
        return digest_of([b"0"])


def seen(task: Stored, steps: range, size: int, seed: int = 0) -> list[int]:
    return [label for step in steps for label in task.batch(seed, step, size).labels.tolist()]


@pytest.mark.parametrize("size", [1, 3, 5, 10, 25])
def test_each_epoch_sees_every_example_once_whatever_the_size_of_a_batch(size: int) -> None:
    order = seen(Numbered(), range(60 // size + 1), size)
    epochs = [order[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_a_step_is_the_same_without_those_before_it() -> None:
    assert seen(Numbered(), range(7, 8), 4) == seen(Numbered(), range(8), 4)[28:]
    assert seen(Numbered(), range(3), 4, seed=0) != seen(Numbered(), range(3), 4, seed=1)


def test_tokens_and_labels_stay_together() -> None:
    batch = Numbered().batch(0, 0, 8)
    assert batch.tokens[:, 0].equal(batch.labels)


def test_what_is_held_out_comes_in_its_order_and_there_is_no_more() -> None:
    task = Numbered()
    assert [part.labels.tolist() for part in task.held_out("test", 2)] == [[12, 13], [14, 15], [16]]
    assert [part.labels.tolist() for part in task.held_out("validation", 9)] == [[10, 11]]
    assert (task.train_examples, task.test_examples) == (10, 5)
    assert task.fresh(0, 4) is None


def test_nothing_is_read_before_it_is_asked_for_and_then_once() -> None:
    task = Numbered()
    assert task.digest
    assert task.read_times == 0
    list(task.held_out("test", 2))
    task.batch(0, 0, 2)
    assert task.read_times == 1


def test_the_order_that_divides_examples_does_not_change() -> None:
    assert fixed_order("digits", 8).tolist() == fixed_order("digits", 8).tolist()
    assert sorted(fixed_order("digits", 8)) == list(range(8))
    assert fixed_order("digits", 8).tolist() != fixed_order("text", 8).tolist()


def test_a_folder_that_is_not_there_is_told_with_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/x", "~nobody-here/x"):
        with pytest.raises(Unsupported, match=rf"^no {folder} here; get x from y$"):
            present(folder, ["a.bin"], "get x from y")
    (tmp_path / "data/x").mkdir(parents=True)
    with pytest.raises(Unsupported, match=r"^no data/x/a.bin here; get x from y$"):
        present("data/x", ["a.bin"], "get x from y")
    (tmp_path / "data/x/a.bin").touch()
    assert present("data/x", ["a.bin"], "get x from y") == Path("data/x")


def test_a_digest_is_of_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (1 << 20) + b"y")
    assert digest_of(blocks(tmp_path / "a")) == digest_of([b"x" * (1 << 20), b"y"])
    assert digest_of([b"x"]) != digest_of([b"y"])


def test_a_pipe_in_the_place_of_a_task_s_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(Unsupported, match=f"no {tmp_path / 'a'} here; get it"):
        present(str(tmp_path), ["a"], "get it")


def test_examples_too_few_for_each_split_are_refused() -> None:
    with pytest.raises(UsageError, match="numbered: too few examples, of which none is left for train; take all files"):
        Numbered(train=0).batch(0, 0, 1)
