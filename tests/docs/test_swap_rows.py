"""What docs/swap.md may say of the committed swaps, since they bear it out."""

from __future__ import annotations

import pytest
from scipy.stats import spearmanr

from attnbench.pretrained.question import EXACT, MEAN_VALUE
from tests.docs import swap_rows
from tests.docs.making import RUNS


@pytest.mark.parametrize("name", swap_rows.swaps())
def test_a_committed_swap_is_whole_and_softmax_attention_changed_nothing(name: str) -> None:
    rows = swap_rows.stored(name)
    assert {row.model for row in rows} == {rows[0].model}
    (exact,) = [row for row in rows if row.label == EXACT]
    moved = exact.hidden_error if exact.loss is None else abs(exact.loss - exact.loss_base)
    assert moved <= 1e-4
    assert len({row.label for row in rows if row.layers == "all"} - {EXACT, MEAN_VALUE}) == 8
    assert all(row.ok or (row.status == "unsupported" and row.reason) for row in rows)
    assert (RUNS / name / "plots/swap.png").is_file()


def test_the_language_model_keeps_most_with_its_largest_logits_and_nearly_nothing_with_random_features() -> None:
    found = {one.label: one for one in swap_rows.together("swap-smollm2")}
    assert found["topk:keys=16"].kl < found["local:window=64"].kl / 5 < found["performer"].kl / 10
    assert found["performer"].accuracy < 0.2
    for name in ("performer", "favor-plus-plus", "linear", "reformer"):
        assert found[name].attention_error > 1, "farther from the exact answer than zero is"


def test_the_error_of_a_layer_says_most_of_what_the_encoder_loses() -> None:
    found = swap_rows.together("swap-minilm")
    damage, error = ([getattr(one, name) for one in found] for name in ("hidden_error", "attention_error"))
    assert spearmanr(damage, error).statistic > 0.9
    order = [one.label for one in found]
    assert order[-3:] == ["linear", MEAN_VALUE, "reformer"]


def test_random_features_fail_in_the_encoders_sharpest_layer_and_a_window_does_best_there() -> None:
    error = {
        label: [of[layer].attention_error for layer in (0, 3, 5)]
        for label, of in swap_rows.alone("swap-minilm").items()
    }
    for name in ("performer", "favor-plus-plus"):
        worse = [a > b for a, b in zip(error[name], error[MEAN_VALUE], strict=True)]
        assert worse == [True, False, False]
    assert min(error["local:window=64"]) == error["local:window=64"][0]
