from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from attnbench.contract.task import NO_LABEL
from attnbench.errors import UsageError
from attnbench.models.pretrained.loading import Around, TokenText, words_of
from tests.models.pretrained import properties

IDS = list(range(1000, 2000))


def test_the_next_token_is_asked_for_everywhere_but_at_the_end() -> None:
    windows = TokenText("t", IDS, 10, Around("next")).held_out(3)
    assert torch.equal(windows.targets[:, :-1], windows.tokens[:, 1:])
    assert (windows.targets[:, -1] == NO_LABEL).all()


def test_what_is_held_out_is_the_end_of_the_text_and_never_trained_on() -> None:
    properties.what_is_held_out_is_the_end_and_never_trained_on()


def test_masked_tokens_are_the_same_for_every_variant_and_only_they_are_asked_for() -> None:
    text = TokenText("t", IDS, 20, Around("masked", (1,), (2,), 3))
    held = text.held_out(4)
    hidden = held.tokens == 3
    assert (hidden.sum(1) == 3).all()
    assert torch.equal(hidden, held.targets != NO_LABEL)
    assert held.targets[hidden].min() >= 1000
    assert (held.tokens[:, 0] == 1).all()
    assert (held.tokens[:, -1] == 2).all()
    assert torch.equal(held.tokens, TokenText("t", IDS, 20, Around("masked", (1,), (2,), 3)).held_out(4).tokens)
    batches = [text.batch(0, step, 2).tokens for step in (0, 0, 1)]
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_nothing_is_asked_of_a_model_that_predicts_nothing() -> None:
    assert (TokenText("t", IDS, 10, Around("none")).held_out(2).targets == NO_LABEL).all()


def test_another_text_length_or_aim_has_another_digest() -> None:
    every = [TokenText("t", IDS, 10, Around("next")), TokenText("t", IDS[1:], 10, Around("next"))]
    every += [TokenText("t", IDS, 11, Around("next")), TokenText("t", IDS, 10, Around("none"))]
    assert len({text.digest for text in every}) == 4
    assert TokenText("u", IDS, 10, Around("next")).digest == every[0].digest


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="1000 tokens are too few for windows of 200"):
        TokenText("t", IDS, 200, Around("next"))
    with pytest.raises(UsageError, match="10 windows are held out, fewer than 11"):
        TokenText("t", IDS, 10, Around("next")).held_out(11)
    with pytest.raises(UsageError, match="no room beside the model's special tokens"):
        TokenText("t", IDS, 2, Around("masked", (1,), (2,), 3))


def test_without_a_file_the_text_is_one_that_python_brings(tmp_path: Path) -> None:
    name, words = words_of(None)
    assert name == "pydoc_data.topics"
    assert len(words) > 300_000
    (tmp_path / "t.txt").write_text("é")
    assert words_of(tmp_path / "t.txt") == (str(tmp_path / "t.txt"), "é")
    for name in ("none.txt", "long" * 100):
        with pytest.raises(UsageError, match="cannot be read as UTF-8"):
            words_of(tmp_path / name)


def test_a_text_that_is_a_pipe_or_a_device_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="not a file; give a file of text"):
            words_of(place)
