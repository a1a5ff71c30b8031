"""What docs/scores.md may say of the committed trainings, since they bear it out."""

from __future__ import annotations

import pytest

from attnbench.results.intervals import learnt
from tests.docs import score_rows
from tests.docs.making import run


@pytest.mark.parametrize("sweep", score_rows.TASKS)
def test_two_halves_of_the_seeds_agree_on_the_order_and_on_the_size_of_the_differences(sweep: str) -> None:
    found = score_rows.halves().loc[sweep]
    assert found["rank"] >= 0.85
    assert found["apart"] <= 0.1 * found["reach"]


@pytest.mark.parametrize("sweep", ["recall", "copy", "longer"])
def test_a_task_is_solved_by_softmax_and_not_without_mixing_or_its_rows_warn(sweep: str) -> None:
    problem, parts = score_rows.found(sweep)
    rows = run("score-cpu")
    warned = rows.loc[rows["sweep"] == sweep, "warnings"].str.contains("of the 0.95 that this task needs")
    assert warned.all() == warned.any() == (parts["softmax"].over_seeds.mean < 0.95)
    assert not learnt(parts["identity"], problem.chance)


def test_every_training_of_the_suite_has_a_score() -> None:
    trained = run("score-cpu")
    trained = trained[trained["sweep"].isin(score_rows.TASKS)]
    assert trained["score"].notna().all()
    assert len(trained) == 4 * 14 * 5


def test_the_chosen_rate_is_within_a_few_points_of_the_best_for_most() -> None:
    """As docs/scores.md says: for all but one variant on one task."""
    frame = run("score-rates")
    by_rate = frame.groupby(["task", "label", "learning_rate"])["val_score"].mean().unstack()
    lost = by_rate.max(axis=1) - by_rate[0.004]
    assert (lost > 0.06).sum() == 1
    assert lost.idxmax()[1] == "nystrom:landmarks=16"
