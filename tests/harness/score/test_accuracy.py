from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

from attnbench.contract.task import NO_LABEL, Examples
from attnbench.harness.score import accuracy
from attnbench.harness.score.accuracy import Answers, answer, chance


def counted(tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Logits that answer with the token itself."""
    return torch.nn.functional.one_hot(tokens, 3).float() * 9


def test_only_answers_that_are_asked_for_count() -> None:
    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    labels = torch.tensor([[0, NO_LABEL, 1], [NO_LABEL, 1, NO_LABEL]])
    found = answer(counted, [Examples(tokens, labels)], "cpu")
    assert found.right.tolist() == [1, 1]
    assert found.asked.tolist() == [2, 1]
    assert found.accuracy == pytest.approx(2 / 3)
    logits = counted(tokens).log_softmax(-1)
    wanted = -(logits[0, 0, 0] + logits[0, 2, 1] + logits[1, 1, 1]) / 3
    assert found.loss == pytest.approx(float(wanted))


def test_chance_is_the_most_frequent_label_of_those_asked_for() -> None:
    labels = torch.tensor([[0, 1, 1], [NO_LABEL, NO_LABEL, 1]])
    assert chance([Examples(labels, labels)]) == pytest.approx(3 / 4)


def test_the_interval_of_sequences_is_wilsons() -> None:
    right = np.array([1] * 8 + [0] * 2)
    low, high = Answers(right, np.ones(10, dtype=int), 0.0, per_token=False).interval()
    z, p, n = 1.959963984540054, 0.8, 10
    middle, half = (
        (p + z * z / 2 / n) / (1 + z * z / n),
        z / (1 + z * z / n) * (p * (1 - p) / n + z * z / 4 / n**2) ** 0.5,
    )
    assert (low, high) == pytest.approx((middle - half, middle + half))


def test_tokens_that_are_right_together_widen_the_interval() -> None:
    asked = np.full(64, 8)
    together = Answers(np.array([8, 0] * 32), asked, 0.0, per_token=True)
    apart = Answers(np.full(64, 4), asked, 0.0, per_token=True)
    assert together.accuracy == apart.accuracy == 0.5
    low, high = together.interval()
    assert low < 0.42 < 0.58 < high
    low, high = apart.interval()
    assert 0.455 < low < 0.46 < 0.54 < high < 0.545  # Wilson's of 512 answers


@pytest.mark.parametrize("share", [0, 1])
def test_answers_that_are_all_right_or_all_wrong_leave_a_doubt(share: int) -> None:
    asked = np.full(64, 8)
    low, high = Answers(asked * share, asked, 0.0, per_token=True).interval()
    assert low <= share <= high
    assert high - low == pytest.approx(1.96**2 / (512 + 1.96**2), rel=1e-3)
    one_wrong = Answers(np.abs(asked * share - (np.arange(64) == 0)), asked, 0.0, per_token=True).interval()
    assert one_wrong[1] - one_wrong[0] > high - low


def test_a_long_test_takes_no_more_memory_for_its_resamples_than_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_RESAMPLES", 50)
    answers = Answers(np.arange(100_000) % 9, np.full(100_000, 8), 0.0, per_token=True)
    tracemalloc.start()
    try:
        low, high = answers.interval()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert low < answers.accuracy < high
    assert most < 10 * answers.right.nbytes


def test_intervals_over_sequences_cover_the_truth_as_often_as_they_say() -> None:
    random, covered = np.random.default_rng(1), 0
    for _ in range(200):
        ease = random.beta(2, 2, size=128)  # sequences differ: the truth is 1/2
        low, high = Answers(random.binomial(8, ease), np.full(128, 8), 0.0, per_token=True).interval()
        covered += low <= 0.5 <= high
    assert 0.90 <= covered / 200 <= 0.99
