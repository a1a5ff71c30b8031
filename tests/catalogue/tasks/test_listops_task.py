from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from attnbench.catalogue.tasks.listops import CLOSE, TOKENS
from attnbench.catalogue.tasks.listops_task import listops
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import NO_LABEL, Examples, Task
from attnbench.errors import Unsupported, UsageError

INNERMOST = re.compile(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]")
VALUE = {"MIN": min, "MAX": max, "MED": lambda a: int(statistics.median(a)), "SM": lambda a: sum(a) % 10}


def by_rewriting(text: str) -> int:
    """The value of a tree, found by replacing what holds no bracket by its value, again and again."""
    while "[" in text:
        text = INNERMOST.sub(lambda one: str(VALUE[one[1]]([int(digit) for digit in one[2].split()])), text)
    return int(text)


def trees(examples: Examples) -> list[list[str]]:
    return [
        [TOKENS[token] for token in row[mask]] for row, mask in zip(examples.tokens, examples.key_mask, strict=True)
    ]


def drawn(n: int = 50, **options: object) -> Task:
    return listops(Shape(seq_len=n), **{"min_length": 6, "max_length": 50, "test": 30} | options)


def test_the_label_is_the_value_of_the_tree() -> None:
    examples = drawn().batch(0, 0, 60)
    assert examples.labels.tolist() == [by_rewriting(" ".join(words)) for words in trees(examples)]
    assert all(6 <= len(words) <= 50 for words in trees(examples))


def test_at_each_bracket_the_label_is_the_value_of_what_it_closes() -> None:
    examples = drawn(labels="brackets").batch(0, 0, 60)
    for row, labels, words in zip(examples.tokens.tolist(), examples.labels.tolist(), trees(examples), strict=True):
        assert [label != NO_LABEL for label in labels] == [token == CLOSE for token in row]
        for at, label in enumerate(labels):
            if label != NO_LABEL:
                depth, start = 1, at
                while depth:
                    start -= 1
                    depth += (words[start] == "]") - words[start].startswith("[")
                assert label == by_rewriting(" ".join(words[start : at + 1]))


def test_both_labels_are_of_trees_of_the_same_lengths() -> None:
    lengths = [
        sum(part.key_mask.sum().item() for part in drawn(labels=labels, test=300).held_out("test", 50)) / 300
        for labels in ("root", "brackets")
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.15)


def test_short_trees_that_are_tested_are_not_trained_on() -> None:
    task = drawn(n=6, min_length=4, max_length=5, test=500)
    held = {
        str(words) for split in ("validation", "test") for part in task.held_out(split, 50) for words in trees(part)
    }
    draws = [str(words) for part in task.fresh(0, 50) for words in trees(part)]
    assert sum(one in held for one in draws) > 50, "trees this short repeat"
    assert not held & {str(words) for words in trees(task.batch(0, 0, 500))}


def test_the_most_frequent_value_of_long_trees_is_as_frequent_as_in_the_long_range_arena() -> None:
    task = listops(Shape(seq_len=1999), test=600)
    labels = [label for part in task.fresh(0, 100) for label in part.labels.tolist()]
    share = max(labels.count(value) for value in range(10)) / len(labels)
    assert share == pytest.approx(0.175, abs=0.05)


def test_trees_that_do_not_fit_or_do_not_exist_are_refused() -> None:
    with pytest.raises(Unsupported, match="up to 1999 tokens do not fit into 64"):
        listops(Shape(seq_len=64))
    with pytest.raises(UsageError, match="no tree has 501 to 64 tokens; widen the lengths"):
        listops(Shape(seq_len=64), max_length=64)


def test_the_released_files_are_read_without_their_round_brackets(released_listops: Path) -> None:
    task = listops(Shape(seq_len=40), folder=str(released_listops))
    assert (task.train_examples, task.test_examples) == (40, 12)
    (test,) = task.held_out("test", 20)
    lines = (released_listops / "basic_test.tsv").read_text().splitlines()[1:]
    for words, label, line in zip(trees(test), test.labels.tolist(), lines, strict=True):
        source, target = line.split("\t")
        assert words == [word for word in source.split() if word not in "()"]
        assert label == int(target)
    assert task.batch(0, 0, 40).labels.sort().values.tolist() == sorted(
        int(line.split("\t")[1]) for line in (released_listops / "basic_train.tsv").read_text().splitlines()[1:]
    )


def test_the_released_files_can_be_asked_at_each_bracket(released_listops: Path) -> None:
    root = next(listops(Shape(seq_len=40), folder=str(released_listops)).held_out("test", 20))
    task = listops(Shape(seq_len=40), folder=str(released_listops), labels="brackets")
    brackets = next(task.held_out("test", 20))
    last = root.key_mask.sum(1, keepdim=True) - 1
    assert brackets.labels.gather(1, last).squeeze(1).equal(root.labels)
    assert (brackets.labels != NO_LABEL).equal(root.tokens == CLOSE)


def test_the_digest_changes_with_one_byte(released_listops: Path) -> None:
    def digest() -> str:
        return listops(Shape(seq_len=40), folder=str(released_listops)).digest

    before = digest()
    file = released_listops / "basic_test.tsv"
    file.write_bytes(file.read_bytes() + b"\n")
    assert digest() != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("( [MIN 4 2 ) ]\t3", "the tree has the value 2, not '3'"),
        ("( [MIN 4 2 ) ]", "the tree has the value 2, not ''"),
        ("( [MIN 4 2 ) ]\ttwo", "the tree has the value 2, not 'two'"),
        ("( [MIN 4 2\t2", "not one whole tree"),
        ("( [MIN 4 12 ) ]\t4", "'12' is no word of ListOps"),
        ("\xff\t2", "is no word of ListOps"),
        ("", "not one whole tree"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(released_listops: Path, line: str, message: str) -> None:
    file = released_listops / "basic_val.tsv"
    lines = file.read_text().splitlines()
    lines[4] = line
    file.write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(UsageError, match=rf"basic_val.tsv:5: .*{message}.*; unpack"):
        listops(Shape(seq_len=40), folder=str(released_listops)).batch(0, 0, 4)


def test_other_damage_to_the_released_files_is_refused(released_listops: Path) -> None:
    task = listops(Shape(seq_len=20), folder=str(released_listops))
    with pytest.raises(Unsupported, match=r"basic_train.tsv:\d+: a tree of \d+ tokens; set seq_len to 2000, not 20"):
        task.batch(0, 0, 1)
    file = released_listops / "basic_train.tsv"
    for text, message in (
        ("Source\tTarget\n", ":2: no tree"),
        ("", ":1: not the header"),
        ("[MIN 1 2 ]\t1", ":1: not"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            listops(Shape(seq_len=40), folder=str(released_listops)).batch(0, 0, 1)
    file.unlink()
    with pytest.raises(Unsupported, match=r"basic_train.tsv here; get lra_release.gz from https"):
        listops(Shape(seq_len=40), folder=str(released_listops))
