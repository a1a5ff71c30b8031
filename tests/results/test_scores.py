"""Which trainings count, and what their scores allow to say: by planted cases, and by simulation of known truths."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.measure.status import Status
from attnbench.results.intervals import (
    Summary,
    comparisons,
    difference,
    floor_of,
    interval,
    learnt,
    over_tasks,
    summary,
)
from attnbench.results.key import key_of
from attnbench.results.record import Record
from attnbench.results.trainings import choose, trained
from attnbench.suite.cell import Cell, ModelSize, Training
from tests.benchmarks import error_rates

ROUNDS = 2000


def row(
    label: str,
    score: float | None = None,
    *,
    seed: int = 0,
    rate: float = 2e-3,
    protocol: Any = "sweep",
    task: str = "recall",
    layers: int = 2,
    guide: float = 0.0,
    status: Status = Status.OK,
    reason: str = "",
    **columns: Any,
) -> Record:
    cell = Cell(
        "score", "train", parse_spec(label), Shape(seq_len=64, heads=2, head_dim=32, batch=32),
        level="model", pass_="training", measure=("score",), model=ModelSize(layers, 128), task=parse_spec(task),
        training=Training(steps=400, learning_rate=rate, protocol=protocol, guide=guide), seed=seed,
    )  # fmt: skip
    if score is not None:
        columns = {"val_score": score, "score_low": score - 0.02, "score_high": score + 0.02, **columns}
    return Record.of(cell, status, reason, score=score, **columns)


def of(label: str, scores: Sequence[float], **columns: Any) -> Summary:
    """A summary of one label with seeds 0, 1 and so on."""
    rows = [row(label, score, seed=seed, protocol="fixed", **columns) for seed, score in enumerate(scores)]
    (choice,) = choose(trained(rows))
    found = summary(choice)
    assert found is not None
    return found


def test_the_rate_with_the_best_validation_score_counts_although_another_tests_better() -> None:
    rows = [row("linear", 0.90, seed=seed, rate=2e-3, val_score=0.50) for seed in (0, 1)]
    rows += [row("linear", 0.55, seed=seed, rate=8e-3, val_score=0.60) for seed in (0, 1)]
    (choice,) = choose(trained(rows))
    assert choice.rate == 8e-3
    assert [one.score for one in choice.rows] == [0.55, 0.55]


def test_no_test_score_changes_a_choice() -> None:
    rng = random.Random(1)
    rows = [row("linear", 0.5, seed=s, rate=r, val_score=rng.random()) for r in (1e-3, 2e-3, 4e-3) for s in range(3)]
    rates = set()
    for _ in range(20):
        again = [replace(one, score=rng.random()) for one in rows]
        rates |= {choice.rate for choice in choose(trained(again))}
    assert len(rates) == 1


def test_one_lucky_seed_chooses_no_rate() -> None:
    rows = [row("linear", val, seed=seed, rate=2e-3) for seed, val in enumerate((0.50, 0.52))]
    rows += [row("linear", val, seed=seed, rate=8e-3) for seed, val in enumerate((0.80, 0.12))]
    (choice,) = choose(trained(rows))
    assert choice.rate == 2e-3
    assert choice.notes == ("at 0.008 unstable: 0.12 to 0.80 over seeds",)


def test_seeds_of_the_best_rate_alone_count_in_the_score_and_not_in_the_choice() -> None:
    rows = [row("linear", val, seed=seed, rate=2e-3) for seed, val in enumerate((0.50, 0.50, 0.10, 0.10))]
    rows += [row("linear", val, seed=seed, rate=8e-3) for seed, val in enumerate((0.40, 0.40))]
    (choice,) = choose(trained(rows))
    assert choice.rate == 2e-3
    assert len(choice.rows) == 4


def test_a_rate_at_which_a_training_failed_stands_behind_and_is_named() -> None:
    rows = [row("linear", 0.5, seed=seed, rate=2e-3) for seed in (0, 1)]
    rows += [row("linear", 0.9, seed=0, rate=8e-3)]
    rows += [row("linear", seed=1, rate=8e-3, status=Status.NONFINITE, reason="loss is NaN at step 12")]
    (choice,) = choose(trained(rows))
    assert choice.rate == 2e-3
    assert choice.notes == ("at 0.008 nonfinite: loss is NaN at step 12",)


def test_rates_without_a_common_seed_are_not_compared() -> None:
    rows = [row("linear", 0.5, seed=0, rate=2e-3), row("linear", 0.9, seed=1, rate=8e-3)]
    (choice,) = choose(trained(rows))
    assert (choice.rate, choice.rows) == (None, ())
    assert choice.notes == ("no rate chosen: no seed was trained at every rate",)
    assert summary(choice) is None


def test_rates_that_were_fixed_are_settings_apart_and_none_is_chosen() -> None:
    rows = [row("linear", 0.5, rate=rate, protocol="fixed") for rate in (2e-3, 8e-3)]
    choices = choose(trained(rows))
    assert [choice.rate for choice in choices] == [2e-3, 8e-3]
    assert len({choice.problem for choice in choices}) == 2


def test_a_variant_without_any_score_has_no_summary_and_keeps_its_reason() -> None:
    (choice,) = choose(trained([row("linformer", status=Status.UNSUPPORTED, reason="no key mask")]))
    assert summary(choice) is None
    assert choice.rows[0].reason == "no key mask"


def test_models_and_tasks_are_never_put_together() -> None:
    rows = [row("linear", 0.5), row("linear", 0.6, layers=4), row("linear", 0.7, task="copy")]
    assert len(choose(trained(rows))) == 3


def test_a_training_that_was_guided_is_apart_from_one_that_was_not() -> None:
    plain = row("linear", 0.5)
    guided = row("linear", 0.6, guide=1.0)
    assert plain.guide is None
    assert {choice.rows[0].score for choice in choose(trained([plain, guided]))} == {0.5, 0.6}
    assert key_of(plain) != key_of(guided)


def test_of_a_training_that_was_repeated_the_newest_that_is_ok_counts() -> None:
    times = {"started_at": "2026-11-20"}, {"started_at": "2026-11-21"}, {"started_at": "2026-11-22"}
    rows = [row("linear", 0.5, **times[0]), row("linear", 0.6, **times[1])]
    rows += [row("linear", status=Status.TIMEOUT, **times[2])]
    for order in (rows, rows[::-1]):
        (one,) = trained(order)
        assert one.score == 0.6


def test_rows_that_trained_nothing_are_left_alone() -> None:
    assert trained([Record.of(Cell("s", "w", parse_spec("softmax"), Shape(seq_len=64)), Status.OK)]) == []


def test_a_row_read_from_a_table_says_the_same_as_its_record() -> None:
    records = [row("linear", 0.5, seed=seed) for seed in (0, 1)]
    tables = [{k: math.nan if v is None else v for k, v in one.to_json().items()} for one in records]
    assert trained(records) == trained(tables)


def test_the_factors_of_the_interval_are_those_of_the_protocol() -> None:
    # Half width over the standard deviation: t(0.975, n - 1) / sqrt(n).
    for n, factor in ((3, 2.484), (5, 1.242)):
        values = [0.5 + 0.01 * (i - (n - 1) / 2) for i in range(n)]
        found = interval(values)
        assert found.low is not None
        assert (0.5 - found.low) / float(np.std(values, ddof=1)) == pytest.approx(factor, abs=2e-3)


def test_one_seed_has_no_interval_over_seeds_but_that_over_test_examples() -> None:
    one = of("linear", [0.5])
    assert (one.over_seeds.low, one.over_seeds.high) == (None, None)
    assert one.ends == (0.48, 0.52)
    assert of("linear", [0.5, 0.6]).of_test is None


def test_an_interval_stays_within_what_a_score_can_be() -> None:
    found = of("softmax", [0.9, 1.0]).ends
    assert found is not None
    assert found[1] == 1.0
    assert interval([0.0, 0.3]).low == 0.0


def test_the_order_of_the_seeds_changes_no_digit() -> None:
    rng = random.Random(2)
    values = [rng.random() for _ in range(7)]
    rows = [row("linear", value, seed=seed) for seed, value in enumerate(values)]
    first = summary(choose(trained(rows))[0])
    for _ in range(20):
        rng.shuffle(values)
        rng.shuffle(rows)
        assert interval(values) == first.over_seeds  # type: ignore[union-attr]
        assert summary(choose(trained(rows))[0]) == first


def simulated(rng: np.random.Generator, seeds: int, mean: float, spread: float) -> list[float]:
    return [float(value) for value in rng.normal(mean, spread, seeds)]


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_nineteen_of_twenty_intervals_hold_the_true_mean(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    held = 0
    for _ in range(ROUNDS):
        found = interval(simulated(rng, seeds, 0.5, 0.01))
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.5 <= found.high
    # Four standard errors of a share of 0.95.
    assert held / ROUNDS == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / ROUNDS))


def pairs(rng: np.random.Generator, seeds: int, apart: float, examples: int) -> Iterable[tuple[Summary, Summary]]:
    """Two labels whose scores share what a seed brings, counted on so many test examples."""
    one, other = of("linear", [0.5] * seeds), of("softmax", [0.5] * seeds)
    for _ in range(ROUNDS):
        shared = rng.normal(0.5, 0.05, seeds)
        sides = []
        for side, mean in ((one, apart), (other, 0.0)):
            scores = np.round((shared + mean + rng.normal(0, 0.008, seeds)) * examples) / examples
            sides.append(replace(side, by_seed=dict(enumerate(map(float, scores))), grain=1 / examples))
        yield sides[0], sides[1]


@pytest.mark.parametrize(("seeds", "examples"), [(2, 100), (2, 497), (3, 497), (5, 2000)])
def test_of_equals_one_is_called_better_or_worse_in_at_most_a_twentieth(seeds: int, examples: int) -> None:
    rng = np.random.default_rng(examples + seeds)
    said = [difference(one, other).verdict for one, other in pairs(rng, seeds, 0.0, examples)]
    claims = sum(verdict != "no difference found" for verdict in said) / ROUNDS
    assert claims <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / ROUNDS)


@pytest.mark.parametrize("tasks", [1, 4])
def test_a_table_of_equals_and_a_suite_hold_a_false_verdict_in_at_most_a_twentieth(tasks: int) -> None:
    """Softmax and twelve equals on each task; each for itself, two tables in five would hold one."""
    alarms, apart = error_rates.scores(np.random.default_rng(tasks), tasks=tasks, seeds=5, times=200)
    assert alarms <= 0.05 * 200 + 3 * math.sqrt(0.05 * 0.95 * 200)
    assert apart > 2 * alarms


def test_a_table_counts_its_differences_and_those_of_the_mean_over_tasks() -> None:
    parts = [of("softmax", [0.5] * 3), of("linear", [0.5] * 3), of("local", [0.5])]
    assert comparisons([(parts, parts[0])]) == 1  # one seed has no interval
    mean = [one for part in parts[:2] if (one := over_tasks([part] * 4))]
    assert comparisons([*[(parts[:2], parts[0])] * 4, (mean, mean[0])]) == 4 + 1
    assert comparisons([(parts, None)]) == 0
    alone, among = (difference(parts[1], of("softmax", [0.4, 0.5, 0.7]), family).of for family in (1, 12))
    assert alone is not None
    assert among is not None
    assert among.mean == alone.mean
    assert (among.high or 0) - (among.low or 0) > 2 * ((alone.high or 0) - (alone.low or 0))


def test_a_real_difference_is_found_with_five_seeds_and_has_its_sign() -> None:
    rng = np.random.default_rng(3)
    said = [difference(one, other).verdict for one, other in pairs(rng, 5, 0.05, 2000)]
    assert said.count("better") / ROUNDS > 0.95
    assert "worse" not in said


def test_pairs_by_seed_find_what_the_intervals_of_the_two_would_hide() -> None:
    hard = [0.30, 0.50, 0.70]  # what a seed brings is the same for both
    one, other = of("linear", [s + d for s, d in zip(hard, (0.05, 0.06, 0.05), strict=True)]), of("softmax", hard)
    assert difference(one, other).verdict == "better"
    assert difference(other, one).verdict == "worse"
    assert one.ends is not None
    assert other.ends is not None
    assert one.ends[0] < other.ends[1]


def test_only_common_seeds_are_compared_and_one_is_too_few() -> None:
    one, other = of("linear", [0.5, 0.6, 0.7]), of("softmax", [0.4])
    found = difference(one, other)
    assert found.seeds == (0,)
    assert found.verdict == "withheld"
    away = replace(other, by_seed={7: 0.4})
    assert (difference(one, away).of, difference(one, away).verdict) == (None, "withheld")


def test_two_seeds_that_agree_to_the_last_example_do_not_prove_a_difference_of_one_example() -> None:
    one = of("linear", [0.502, 0.502], test_examples=500, score_kind="accuracy")
    other = of("softmax", [0.5, 0.5], test_examples=500, score_kind="accuracy")
    assert one.grain == 1 / 500
    assert difference(one, other).verdict == "no difference found"


def test_labels_of_two_problems_have_no_difference() -> None:
    with pytest.raises(ValueError, match="not trained alike"):
        difference(of("linear", [0.5, 0.6]), of("softmax", [0.5, 0.6], layers=4))


def test_who_is_not_above_identity_has_learnt_nothing_from_other_tokens() -> None:
    still = of("identity", [0.37, 0.38, 0.38], chance_score=0.1)
    same, more = of("local", [0.38, 0.37, 0.39]), of("softmax", [0.87, 0.88, 0.89])
    floor = floor_of([still, same, more])
    assert floor is not None
    assert floor > 0.38
    assert [learnt(one, floor) for one in (still, same, more)] == [False, False, True]


def test_chance_is_the_floor_where_nobody_trained_identity() -> None:
    one = of("linear", [0.20, 0.21, 0.22], chance_score=0.15)
    assert floor_of([one]) == 0.15
    assert learnt(one, 0.15)
    assert not learnt(of("local", [0.14, 0.15, 0.16], chance_score=0.15), 0.15)


def test_with_one_seed_the_interval_over_test_examples_decides() -> None:
    assert learnt(of("linear", [0.50]), 0.47)
    assert not learnt(of("linear", [0.50]), 0.49)


def test_the_mean_over_tasks_is_taken_within_each_seed() -> None:
    # The tasks move against each other from seed to seed: their mean does not move at all.
    one, other = of("linear", [0.2, 0.4, 0.6]), of("linear", [0.8, 0.6, 0.4], task="copy")
    found = over_tasks([one, other])
    assert found is not None
    assert found.over_seeds.mean == pytest.approx(0.5)
    assert found.over_seeds.high == pytest.approx(0.5)


def test_tasks_with_other_seeds_have_no_mean() -> None:
    assert over_tasks([of("linear", [0.2, 0.4, 0.6]), of("linear", [0.8, 0.6], task="copy")]) is None
