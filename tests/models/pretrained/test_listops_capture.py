from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.catalogue.tasks.listops import ListOps, evaluate
from attnbench.models.pretrained.listops import captured as capture
from attnbench.models.pretrained.listops.captured import Stage, accuracy, logit_statistics, make, train

TINY = (Stage(ListOps(4, 8), batch=8, steps=2), Stage(ListOps(8, 16), batch=4, steps=1))


@pytest.fixture
def small_encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("LAYERS", 2), ("HEADS", 3), ("HEAD_DIM", 8)):
        monkeypatch.setattr(capture, name, value)
    monkeypatch.setattr(capture, "WARM_UP_STEPS", 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("small_encoder")
def test_the_same_seed_makes_the_same_file_to_the_byte(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file, seed in zip(files, (5, 5, 6), strict=True):
        make(file, TINY, seed=seed, length=20, test_trees=2)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other


@pytest.mark.usefixtures("small_encoder")
def test_the_file_holds_every_weight_and_says_how_it_was_made(tmp_path: Path) -> None:
    make(tmp_path / "x.safetensors", TINY, seed=0, length=20, test_trees=2)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as stored:
        model = ListOpsEncoder(vocab=16, classes=10, layers=2, heads=3, head_dim=8)
        weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # not a dict
        about = json.loads(stored.metadata()["attnbench"])
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert sorted({name.rpartition(".")[0] for name in missing}) == [
        "blocks.1.feed.0",
        "blocks.1.feed.1",
        "blocks.1.feed.3",
        "blocks.1.merge",
        "classify",
        "norm",
    ]
    assert about["seed"] == 0
    assert [stage["steps"] for stage in about["curriculum"]] == [2, 1]
    assert about["versions"]["torch"] == torch.__version__
    assert len(about["tokens"]) == 20
    assert evaluate(about["tokens"]) in range(10)
    assert about["test"]["trees"] == 2


@pytest.mark.usefixtures("small_encoder")
def test_training_learns_a_single_level() -> None:
    pairs = ListOps(4, 4, max_depth=2, max_args=2)
    after = accuracy(train([Stage(pairs, 64, 60)], seed=0), pairs, 100, seed=9)
    assert after.answers > after.answers_majority + 0.1


def test_accuracy_is_that_of_the_answers_given() -> None:
    class Always(ListOpsEncoder):
        def forward(self, tokens: torch.Tensor, key_mask: torch.Tensor | None = None) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full_like(tokens, 9), 10).float()

    model = Always(vocab=16, classes=10, layers=1, heads=1, head_dim=4)
    trees = ListOps(4, 30)
    roots = [int(batch.labels[0, -1]) for batch, _ in zip(trees.batches(1, seed=4), range(50), strict=False)]
    score = accuracy(model, trees, 50, seed=4)
    assert score.answers == pytest.approx(roots.count(9) / 50, abs=1e-4)
    assert score.answers_majority == pytest.approx(max(roots.count(value) for value in range(10)) / 50, abs=1e-4)
    assert score.brackets <= score.brackets_majority


def test_uniform_attention_attends_to_every_key_and_a_copy_to_one() -> None:
    std, keys = logit_statistics(torch.zeros(2, 3, 8, 4), torch.randn(2, 3, 8, 4))
    assert std.shape == keys.shape == (2, 3)
    torch.testing.assert_close(std, torch.zeros(2, 3))
    torch.testing.assert_close(keys, torch.full((2, 3), 8.0))
    one_hot = 100 * torch.eye(8).expand(1, 1, 8, 8)
    torch.testing.assert_close(logit_statistics(one_hot, one_hot)[1], torch.ones(1, 1))


def test_logit_spread_is_that_of_the_scaled_products() -> None:
    q, k = torch.randn(1, 1, 200, 64) * 2, torch.randn(1, 1, 200, 64)
    assert logit_statistics(q, k)[0].item() == pytest.approx(2.0, rel=0.1)


def test_the_curriculum_ends_with_the_trees_of_the_long_range_arena() -> None:
    assert capture.CURRICULUM[-1].trees == ListOps()
