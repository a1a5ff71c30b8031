"""Every registered task at a small size: what it gives is what its form says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shutil import copyfile

import pytest
import torch

from attnbench.contract.inputs import INPUTS
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_specs
from attnbench.contract.task import NO_LABEL, TASKS, Examples, HasFiles, Task, make_task
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported

SETTINGS = {
    "recall": [
        (24, False, "recall:pairs=4,values=3,test=20"),
        (24, True, "recall:pairs=4,values=3,test=20,form=long,ids=2"),
    ],
    "mqar": [(24, False, "mqar:pairs=4,vocab=64,test=20")],
    "chains": [(24, False, "chains:ring=6,hops=3,test=20")],
    "permutations": [
        (12, False, "permutations:test=20"),
        (12, True, "permutations:size=5,moves=swaps,answers=last,test=20"),
    ],
    "copy": [(12, False, "copy:test=20")],
    "duplication": [(12, True, "duplication:test=20")],
    "listops": [
        (30, False, "listops:min_length=5,max_length=30,test=20"),
        (30, True, "listops:min_length=5,max_length=30,test=20,labels=brackets"),
        (40, False, "listops:folder=listops-1000"),
    ],
    "digits": [(64, False, "digits")],
    "text": [(50, False, "text:folder=aclImdb")],
    "image": [(1024, False, "image:folder=cifar-10-batches-bin")],
    "retrieval": [(50, False, "retrieval:folder=tsv_data")],
    "pathfinder": [(1024, False, "pathfinder:folder=pathfinder32")],
    "contours": [(576, False, "contours:test=20,distractors=1")],
    "next-byte": [(128, True, "next-byte")],
    "detection": [(144, False, "detection:test=20")],
    "contacts": [(24, False, "contacts:test=20")],
}
"""Length, causal and options of each shipped task."""

CASES = [(name, *case) for name, cases in SETTINGS.items() for case in cases]


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has the data of the task that is tried, if it reads files."""
    if "text" in request.fixturenames and "folder=" in request.getfixturevalue("text"):
        request.getfixturevalue(f"released_{request.getfixturevalue('name')}")
    monkeypatch.chdir(tmp_path)


def made(n: int, causal: bool, text: str) -> Task:
    (spec,) = parse_specs(text)
    return make_task(spec, Shape(seq_len=n, causal=causal))


def every(task: Task) -> Iterator[tuple[int, Examples]]:
    yield 7, task.batch(0, 0, 7)
    for split in ("validation", "test"):
        for part in task.held_out(split, 16):
            yield len(part.labels), part
    for part in task.fresh(0, 16) or ():
        yield len(part.labels), part


def test_every_shipped_task_is_tried() -> None:
    shipped = [entry.name for entry in TASKS if entry.make.__module__.startswith("attnbench.catalogue.tasks.")]
    assert shipped == list(SETTINGS)


@pytest.mark.parametrize(("name", "n", "causal", "text"), CASES)
def test_examples_have_the_form_that_is_said(name: str, n: int, causal: bool, text: str) -> None:
    task = made(n, causal, text)
    form = task.form
    for count, examples in every(task):
        towers = (2,) if form.towers == 2 else ()
        parts = (len(form.vocab),) if len(form.vocab) > 1 else ()
        assert examples.tokens.shape == (count, *towers, n, *parts)
        assert examples.tokens.dtype == examples.labels.dtype == torch.int64
        assert examples.labels.shape == ((count, n) if form.per_token else (count,))
        assert examples.tokens.min() >= 0
        assert (examples.tokens.reshape(-1, len(form.vocab)).amax(0) < torch.tensor(form.vocab)).all()
        asked = examples.labels[examples.labels != NO_LABEL]
        assert len(asked) >= count if form.per_token else len(asked) == count
        assert asked.min() >= 0
        assert asked.max() < form.classes
        if examples.key_mask is not None:
            mask = examples.key_mask
            assert mask.dtype == torch.bool
            assert mask.shape == (count, *towers, n)
            assert mask.any(-1).all()
            assert (mask.long().diff(dim=-1) <= 0).all(), "padding stands at the end"
            assert (examples.tokens.reshape(*mask.shape, -1)[~mask] == 0).all()


@pytest.mark.parametrize(("name", "n", "causal", "text"), CASES)
def test_the_same_question_has_the_same_answer(name: str, n: int, causal: bool, text: str) -> None:
    def asked(task: Task) -> list[list]:
        return [[examples.tokens.tolist(), examples.labels.tolist()] for _, examples in every(task)]

    first, second = made(n, causal, text), made(n, causal, text)
    torch.manual_seed(99)
    assert asked(first) == asked(second)
    assert first.digest == second.digest
    assert len(bytes.fromhex(first.digest)) == 8


@pytest.mark.parametrize(("name", "n", "causal", "text"), [case for case in CASES if "folder=" in case[3]])
def test_the_files_that_a_task_names_are_all_that_it_reads(
    name: str, n: int, causal: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = made(n, causal, text)
    assert isinstance(task, HasFiles)
    for file in task.files():
        copy = tmp_path / "alone" / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copyfile(file, copy)
    whole = [examples.tokens.tolist() for _, examples in every(task)]
    monkeypatch.chdir(tmp_path / "alone")
    other = made(n, causal, text)
    assert other.digest == task.digest
    assert [examples.tokens.tolist() for _, examples in every(other)] == whole


@pytest.mark.parametrize(("name", "n", "causal", "text"), CASES)
def test_seeds_and_steps_differ(name: str, n: int, causal: bool, text: str) -> None:
    task = made(n, causal, text)
    batches = [task.batch(seed, step, 4).tokens.tolist() for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert batches[0] != batches[1]
    assert batches[0] != batches[2]


@pytest.mark.parametrize(("name", "n", "causal", "text"), CASES)
def test_no_held_out_sequence_is_trained_on(name: str, n: int, causal: bool, text: str) -> None:
    task = made(n, causal, text)
    held = {
        str(row)
        for split in ("validation", "test")
        for part in task.held_out(split, 16)
        for row in part.tokens.tolist()
    }
    steps = 20 if task.train_examples is None else task.train_examples // 8 + 1
    trained = {str(row) for step in range(steps) for row in task.batch(0, step, 8).tokens.tolist()}
    assert not held & trained
    assert sum(len(part.labels) for part in task.held_out("test", 16)) == task.test_examples


@pytest.mark.parametrize(("name", "n", "causal", "text"), CASES)
def test_cross_attention_is_refused(name: str, n: int, causal: bool, text: str) -> None:
    (spec,) = parse_specs(text)
    with pytest.raises(Unsupported, match="remove kv_len"):
        make_task(spec, Shape(seq_len=n, kv_len=2 * n))


@pytest.mark.parametrize(
    ("n", "causal", "text", "count"),
    [
        (64, False, "copy", 500),
        (66, True, "duplication:symbols=8", 500),
        (64, False, "mqar:pairs=4,vocab=16", 2000),
        (64, False, "recall", 500),
    ],
    ids=str,
)
def test_guessing_is_right_as_often_as_there_are_classes(n: int, causal: bool, text: str, count: int) -> None:
    task = made(n, causal, text)
    labels = task.batch(0, 0, count).labels
    asked, chance = labels[labels != NO_LABEL], 1 / task.form.classes
    shares = torch.bincount(asked, minlength=task.form.classes) / len(asked)
    assert shares.sub(chance).abs().max() < 5 * (chance * (1 - chance) / len(asked)) ** 0.5


@pytest.mark.parametrize(("name", "n", "causal", "text"), CASES)
def test_the_share_that_is_hidden_is_a_share(name: str, n: int, causal: bool, text: str) -> None:
    assert 0 < made(n, causal, text).masked_share < 1


def test_every_task_names_its_source_and_the_options_say_what_they_mean() -> None:
    for name in SETTINGS:
        entry = TASKS.get(name)
        assert entry.source
        assert entry.summary
        assert all(field.description for field in entry.options.values())
        assert len(f"{name}: {entry.summary}") <= 80


def test_no_task_has_the_name_of_a_variant_or_an_input() -> None:
    shipped = set(SETTINGS)
    assert not shipped & set(VARIANTS.names())
    assert shipped & set(INPUTS.names()) <= {"listops"}
