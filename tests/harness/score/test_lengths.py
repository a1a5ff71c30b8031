"""Trained short and tested long: the same trained module, at the length of the test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.task import make_task
from attnbench.errors import Unsupported
from attnbench.harness.score import score as module
from attnbench.harness.score.accuracy import answer
from attnbench.harness.score.loop import Checkpoint
from attnbench.harness.score.score import score
from attnbench.models.encoder import Encoder
from attnbench.suite.cell import Cell, ModelSize
from tests.harness.score.models import cell

TASK = "chains:ring=4,test=64"
CLOCK = ("train_s", "target_s")
OF_THE_TEST = (
    "score",
    "score_low",
    "score_high",
    "chance_score",
    "test_loss",
    "data_digest",
    "state_bytes",
    "param_bytes",
)


def at(length: int | None, variant: str = "gla:chunk=4", **changes: Any) -> Cell:
    positions = changes.pop("positions", "sinusoid")
    return replace(cell(variant, TASK, test_len=length, **changes), model=ModelSize(2, 32, positions=positions))


def without(columns: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if name not in names}


@pytest.mark.parametrize("positions", ["sinusoid", "rotary", "none"])
@pytest.mark.parametrize("length", [12, 40])
def test_a_model_that_is_made_for_the_test_and_given_the_weights_answers_as_many_questions(
    positions: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = at(length, "softmax", positions=positions, steps=20)
    kept = []
    saved = Checkpoint.save
    monkeypatch.setattr(Checkpoint, "save", lambda self, state: kept.append(state) or saved(self, state))
    columns = score(asked, folder=tmp_path, keep=True).columns
    weights = {name.removeprefix("model."): one for name, one in kept[-1].tensors.items() if name.startswith("model.")}
    shape = replace(asked.shape, seq_len=length)
    task = make_task(parse_spec(TASK), shape)
    made = Encoder("softmax", shape, asked.model, form=task.form)
    made.load_state_dict(weights)
    found = answer(made, task.held_out("test", 8), "cpu")
    assert columns["score"] == pytest.approx(found.accuracy)
    assert columns["test_loss"] == pytest.approx(found.loss, rel=1e-5)


@pytest.mark.parametrize("positions", ["sinusoid", "rotary"])
def test_room_for_more_tokens_changes_no_bit_of_what_a_shorter_sequence_gives(positions: str) -> None:
    model, tokens = Encoder("softmax", Shape(1, 2, 10, 8), ModelSize(2, 16, 20, positions)), torch.arange(10)[None]
    before = model(tokens)
    model.make_room(13)
    assert torch.equal(model(tokens), before)
    longer = Encoder("softmax", Shape(1, 2, 23, 8), ModelSize(2, 16, 20, positions))
    longer.load_state_dict(model.state_dict())
    tokens = torch.arange(23)[None] % 20
    torch.testing.assert_close(model(tokens), longer(tokens))


def test_tests_of_one_training_share_it_to_the_bit_and_the_last_one_clears_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {length: score(at(length)) for length in (None, 24)}
    assert without(alone[None].columns, *CLOCK, *OF_THE_TEST) == without(alone[24].columns, *CLOCK, *OF_THE_TEST)
    assert alone[None].columns["test_loss"] != alone[24].columns["test_loss"]
    first = score(at(None), folder=tmp_path, keep=True)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(module, "Filling", None)
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", None)  # no step can be taken
    then = score(at(24), folder=tmp_path)
    assert not file.exists()
    for found, length in ((first, None), (then, 24)):
        assert without(found.columns, *CLOCK) == without(alone[length].columns, *CLOCK)
        assert [without(point, "cpu_s") for point in found.points] == [
            without(point, "cpu_s") for point in alone[length].points
        ]
    assert then.columns["train_s"] == first.columns["train_s"]


def test_pretraining_is_shared_as_well(tmp_path: Path) -> None:
    first = score(at(None, pretrain_steps=4), folder=tmp_path, keep=True)
    then = score(at(24, pretrain_steps=4), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert then.columns["train_s"] == first.columns["train_s"]
    alone = score(at(24, pretrain_steps=4))
    assert without(alone.columns, *CLOCK) == without(then.columns, *CLOCK)


def test_the_state_is_that_of_the_length_of_the_test() -> None:
    softmax = [score(at(length, "softmax", steps=1)).columns["state_bytes"] for length in (None, 32)]
    assert softmax[1] == 2 * softmax[0]
    assert len({score(at(length, steps=1)).columns["state_bytes"] for length in (None, 32)}) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"variant": "linformer:rank=4"}, "test_len=24: it is made for n = 16 alone: the projection has a column"),
        (
            {"variant": "stack:layers=gla+linformer[rank=4]"},
            "test_len=24: it is made for n = 16 alone: linformer:rank=4: the",
        ),
        (
            {"positions": "learned"},
            "test_len=24: positions are learned for 16 tokens; write positions: sinusoid, rotary",
        ),
        ({"length": 7}, "test_len=7: chains: ring=4 needs a length of at least 8, not 7"),
        ({"shape": Shape(8, 2, 16, 8, query_stride=2)}, "test_len=24: query_stride"),
    ],
)
def test_what_cannot_be_tested_there_is_a_row_with_the_reason_before_any_training(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = at(changes.pop("length", 24), changes.pop("variant", "softmax"), **changes)
    if asked.shape.query_stride > 1:
        asked = replace(asked, task=parse_spec("listops:min_length=4,max_length=16,test=20"))
    monkeypatch.setattr(module, "train", None)
    kept = tmp_path / f"{asked.whole_training.cell_id}.pt"
    for keep in (True, False):
        kept.touch()  # as an earlier test left it
        with pytest.raises(Unsupported) as refused:
            score(asked, folder=tmp_path, keep=keep)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
        assert kept.exists() is keep


def test_learned_positions_are_known_for_shorter_sequences() -> None:
    assert score(at(8, "softmax", positions="learned", steps=1)).columns["test_loss"] > 0


def test_a_stack_that_is_longer_than_its_model_names_layers_that_nobody_would_meet() -> None:
    with pytest.raises(Unsupported, match="a turn of 4 layers in a model of 2 layers; name fewer, or give the model"):
        score(at(None, "stack:3*gla+softmax"))
