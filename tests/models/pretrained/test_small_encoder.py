from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from attnbench.catalogue.tasks.listops import ListOps
from attnbench.models.pretrained.listops import small_encoder
from attnbench.models.pretrained.listops.captured import Stage
from attnbench.models.pretrained.listops.small_encoder import WEIGHTS, make, trained_encoder

TINY = (Stage(ListOps(4, 8), batch=4, steps=2),)


def test_the_same_seed_makes_the_same_weights_which_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, seed in zip(files, (5, 5, 6), strict=True):
        about = make(file, TINY, seed=seed, test_trees=2)
        assert about["seed"] == seed
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other
    monkeypatch.setattr(small_encoder, "WEIGHTS", files[0])
    state = torch.get_rng_state()
    model = trained_encoder()
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert next(model.parameters()).dtype is torch.float32


def test_the_shipped_file_was_made_by_the_committed_command() -> None:
    with safe_open(WEIGHTS, framework="pt") as stored:
        about = json.loads(stored.metadata()["attnbench"])
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {torch.float16}  # noqa: SIM118
    assert [stage["steps"] for stage in about["curriculum"]] == [stage.steps for stage in small_encoder.CURRICULUM]
    assert about["test"]["brackets"] > 2 * about["test"]["brackets_majority"]
