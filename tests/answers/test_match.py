"""The search of ``match``, held to variants whose error and cost are known: nothing is measured here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.answers.match.budget import Budget, MeasuredSetting, Target, budget_of
from attnbench.answers.match.match import ReadyMatch, one_length
from attnbench.answers.match.result import Match
from attnbench.answers.match.search import FoundSetting, Ladder, boundary, entrants_of, knob_of, ladder_of, search
from attnbench.answers.match.search import most_tries as most_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.traits import Knob
from attnbench.errors import UsageError
from attnbench.harness.outside.isolation import Settings, Worker
from attnbench.harness.wire.protocol import Outcome, VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

Measure = Callable[[int], MeasuredSetting]
cases = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def ladder(text: str = "performer", n: int = 4096, most: int | None = None) -> Ladder:
    spec = parse_spec(text)
    knob = knob_of(spec)
    assert knob is not None
    return ladder_of(spec, knob, n, most=most)


def error(value: float, spread: float = 0.0) -> MeasuredSetting:
    return MeasuredSetting(
        "x", error=value, error_low=value * (1 - spread), error_high=value * (1 + spread), error_kind="approximation"
    )


def most_tries(ladder: Ladder) -> int:
    return max(1, 2 * math.ceil(math.log2(len(ladder.values))))


# An error of sigma / sqrt(m) needs m = (sigma / target)²


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.3, 5.0])
def test_an_error_that_falls_as_one_over_the_root_needs_its_square(sigma: float) -> None:
    rungs = ladder()
    found = search(rungs, Budget("error", 0.1), lambda m: error(sigma / math.sqrt(m)))
    needed = (sigma / 0.1) ** 2
    assert found.chosen is not None
    assert found.chosen.value == math.ceil(needed / 8 - 1e-9) * 8
    assert len(found.tries) <= most_tries(rungs)


def test_keys_that_hold_a_known_share_of_the_weight_give_the_setting_at_which_the_rest_is_the_target() -> None:
    """With weights 2^-j, what t keys leave out is 2^-t: an error of 2^-20 needs 20 keys, 24 on the grid of eights."""
    found = search(ladder("oracle-topk", 256), Budget("error", 2.0**-20), lambda t: error(2.0**-t))
    assert found.chosen is not None
    assert (found.chosen.value, found.knob) == (24, "keys")


@pytest.mark.parametrize(("limit", "largest"), [(64, 64), (64.5, 64), (71, 64), (72, 72), (1e9, 4096)])
def test_of_a_budget_of_memory_as_much_as_fits_is_used(limit: float, largest: int) -> None:
    found = search(ladder(), Budget("memory", limit), lambda m: MeasuredSetting("x", memory=m))
    assert found.chosen is not None
    assert found.chosen.value == largest
    assert found.at_end == (largest == 4096)


def test_the_knob_of_a_compression_is_turned_down_and_its_cost_doubles_from_try_to_try() -> None:
    rungs = ladder("memory-compressed", 64)
    tried: list[int] = []

    def measure(compression: int) -> MeasuredSetting:
        tried.append(compression)
        return error(0.01 * compression)

    found = search(rungs, Budget("error", 0.055), measure)
    assert found.chosen is not None
    assert found.chosen.value == 5
    assert tried[:5] == [64, 32, 16, 8, 4]


# Tries


@cases
@given(st.integers(1, 5000), st.data())
def test_every_boundary_is_found_with_at_most_twice_log2_tries_none_of_them_twice(n: int, data: st.DataObject) -> None:
    spec = Spec("own")
    rungs = Ladder(spec, Knob("m", step=1), range(1, n + 1))
    at = data.draw(st.integers(0, n))
    asked: list[int] = []

    def below(place: int) -> bool:
        asked.append(place)
        return place < at

    assert boundary(n, rungs.climb(), below) == at
    assert len(asked) == len(set(asked)) <= most_of(rungs.climb()) <= max(1, 2 * math.ceil(math.log2(n)))


@cases
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_noise_that_breaks_the_order_gives_a_setting_that_was_measured_and_meets_the_budget(
    seed: int, size: float
) -> None:
    draw, rungs = random.Random(seed), ladder()
    found = search(rungs, Budget("error", 0.1), lambda m: error(2.0 / math.sqrt(m) * math.exp(draw.gauss(0, size))))
    assert len(found.tries) <= most_tries(rungs)
    if found.chosen is not None:
        assert found.chosen in found.tries
        assert found.chosen.error is not None
        assert found.chosen.error <= 0.1
    else:
        assert not any(point.within(Budget("error", 0.1)) for point in found.tries)


def test_an_interval_that_straddles_the_target_takes_the_next_larger_setting() -> None:
    plain = search(ladder(), Budget("error", 0.1), lambda m: error(8 / m))
    wide = search(ladder(), Budget("error", 0.1), lambda m: error(8 / m, spread=0.05))
    assert plain.chosen is not None
    assert wide.chosen is not None
    assert (plain.chosen.value, wide.chosen.value) == (80, 88)


def score(value: float, spread: float = 0.0) -> MeasuredSetting:
    return MeasuredSetting("x", score=value, score_low=value - spread, score_high=value + spread)


def test_of_a_score_the_cheapest_setting_is_sought_whose_whole_interval_reaches_it() -> None:
    budget = Budget("score", 0.9)
    plain = search(ladder(), budget, lambda m: score(1 - 10 / m))
    wide = search(ladder(), budget, lambda m: score(1 - 10 / m, spread=0.01))
    assert plain.chosen is not None
    assert wide.chosen is not None
    assert (plain.chosen.value, wide.chosen.value) == (104, 112)  # 100 and 111.1 are needed
    (line,) = Match(budget, [wide]).sentences()
    assert line == "x reaches score 0.9: 0.911 (0.901 to 0.921)"


# What is not reached


def test_a_budget_met_by_the_smallest_setting_takes_one_try_and_says_so() -> None:
    found = search(ladder(), Budget("error", 0.1), lambda m: error(0.01))
    assert len(found.tries) == 1
    (line,) = Match(Budget("error", 0.1), [found]).sentences()
    assert line == "x reaches error 0.1: 0.01; already at the smallest features that is tried"


def test_a_target_that_is_never_reached_names_the_best_and_where_it_was() -> None:
    found = search(ladder(n=8192), Budget("error", 0.1), lambda m: error(0.31 + 1 / m, spread=0.1))
    assert found.chosen is None
    (line,) = Match(Budget("error", 0.1), [found]).sentences()
    assert line == "performer does not reach error 0.1: best 0.31 (0.279 to 0.341) at features=8192"


def test_a_score_that_is_never_reached_names_the_best_and_where_it_was() -> None:
    found = search(ladder(n=512), Budget("score", 0.9), lambda m: score(0.61 - 1 / m, spread=0.04))
    assert found.chosen is None
    (line,) = Match(Budget("score", 0.9), [found]).sentences()
    assert line == "performer does not reach score 0.9: best 0.608 (0.568 to 0.648) at features=512"


@pytest.mark.parametrize(
    ("budget", "point", "said"),
    [
        (Budget("error", 0.1), error(0.0609, spread=2.6), "error 0.1: best 0.0609 (-0.0974 to 0.219)"),
        (Budget("score", 0.9), score(0.95, spread=0.1), "score 0.9: best 0.95 (0.85 to 1.05)"),
    ],
)
def test_what_may_reach_a_target_is_not_said_to_miss_it(budget: Budget, point: MeasuredSetting, said: str) -> None:
    found = search(ladder(), budget, lambda m: point)
    assert found.chosen is None
    (line,) = Match(budget, [found]).sentences()
    assert line.startswith(f"performer may reach, but is not shown to reach, {said} at features=")


def test_what_runs_out_of_memory_is_a_bound_beyond_which_nothing_is_tried() -> None:
    tried: list[int] = []

    def measure(m: int) -> MeasuredSetting:
        tried.append(m)
        return (
            MeasuredSetting("x", status=Status.OOM, reason="needs another 9 GiB")
            if m >= 1000
            else error(10 / math.sqrt(m))
        )

    found = search(ladder(), Budget("error", 0.1), measure)
    assert found.chosen is None
    assert 992 in tried
    assert sum(m >= 1000 for m in tried) <= 1 + math.log2(64)
    assert max(tried) == 1024
    (line,) = Match(Budget("error", 0.1), [found]).sentences()
    assert line.startswith("performer does not reach error 0.1: best 0.318 at features=992; features=1000: oom, needs")


def test_a_setting_below_the_bound_of_memory_is_found() -> None:
    def measure(m: int) -> MeasuredSetting:
        return MeasuredSetting("x", status=Status.OOM) if m >= 1000 else error(3 / math.sqrt(m))

    found = search(ladder(), Budget("error", 0.1), measure)
    assert found.chosen is not None
    assert found.chosen.value == 904  # 900 are needed


@pytest.mark.parametrize(
    ("target", "status"), [("error", "ok"), ("memory", "ok"), ("score", "ok"), ("time", "disturbed")]
)
def test_a_lost_time_is_a_bound_of_a_budget_of_time_alone(
    target: Target, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("match", "match", parse_spec("performer"), Shape(seq_len=64))
    busy = Record.of(cell, Status.DISTURBED, "its threads waited for a core")
    monkeypatch.setattr(VisitCell, "ask", lambda *_, **__: Outcome(busy))
    asked = ReadyMatch(Budget(target, 0.5), [], cell, Settings(), TimingRules(), 60.0, "")
    found = asked._look(Worker(Settings()), cell)
    assert (str(found.status), found.reason) == (status, "its threads waited for a core")


def test_a_variant_that_does_not_run_at_all_is_tried_once_and_gives_its_reason() -> None:
    failed = MeasuredSetting("x", status=Status.UNSUPPORTED, reason="causal: it sees the future")
    found = search(ladder(), Budget("memory", 1e9), lambda m: failed)
    assert len(found.tries) == 1
    (line,) = Match(Budget("memory", 1e9), [found]).sentences()
    assert line.endswith("features=8: unsupported, causal: it sees the future")


def test_an_output_that_is_not_finite_is_no_bound_of_an_error() -> None:
    def measure(m: int) -> MeasuredSetting:
        return MeasuredSetting("x", status=Status.NONFINITE) if m < 100 else error(0.05)

    found = search(ladder(), Budget("error", 0.1), measure)
    assert found.chosen is not None
    assert found.chosen.value == 104


def test_where_nothing_fits_the_smallest_is_named_with_what_it_takes() -> None:
    found = search(ladder(), Budget("memory", 2**20), lambda m: MeasuredSetting("x", memory=2**21))
    (line,) = Match(Budget("memory", 2**20), [found]).sentences()
    assert line == "performer does not fit into memory 1.00 MiB: best 2.00 MiB at features=8"


# Entrants


def test_exact_variants_and_given_knobs_take_part_as_they_stand() -> None:
    budget = Budget("error", 0.1)
    entrants = entrants_of(["performer", "softmax", "performer:features=256", "topk:16"], budget, 4096)
    assert [(one.spec.label, bool(one.ladder), one.note) for one in entrants] == [
        ("performer", True, ""),
        ("softmax", False, "it has no knob"),
        ("performer:features=256", False, "its features is given"),
        ("topk:keys=16", False, "its keys is given"),
    ]


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ([], "match needs a variant"),
        (["softmax"], r"there is no knob to turn \(softmax: it has no knob\)"),
        (["softmax", "performer:features=8"], "there is no knob to turn"),
        (["performer", "performer:kernel=positive"], "performer is given twice"),
        (["performr"], "did you mean 'performer'"),
        (["linformer"], "linformer: its error means nothing before it is fitted; give --memory or --time"),
        (["gmlp"], "gmlp: a mixer has no q, k and v, and so no error; give --memory or --time with --level layer"),
    ],
)
def test_variants_that_make_no_question_are_refused(variants: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        entrants_of(variants, Budget("error", 0.1), 4096)


def test_a_variant_that_must_be_fitted_has_a_setting_for_a_budget_of_memory() -> None:
    (one,) = entrants_of(["linformer"], Budget("memory", 1e6), 4096)
    assert one.ladder is not None
    assert not one.hopeless


# Budgets


@pytest.mark.parametrize(
    ("given", "budget", "text"),
    [
        ({"error": 0.1}, Budget("error", 0.1), "error 0.1"),
        ({"memory": "64MiB"}, Budget("memory", 2**26), "memory 64.0 MiB"),
        ({"memory": 1000}, Budget("memory", 1000), "memory 1000 B"),
        ({"time": "10ms"}, Budget("time", 0.01), "time 10.0 ms"),
        ({"time": 0.5}, Budget("time", 0.5), "time 500 ms"),
        ({"score": 0.9}, Budget("score", 0.9), "score 0.9"),
        ({"score": "0.95"}, Budget("score", 0.95), "score 0.95"),
    ],
)
def test_a_budget_has_a_unit_or_is_in_bytes_and_seconds(
    given: dict[str, float | str], budget: Budget, text: str
) -> None:
    assert budget_of(**given) == budget  # type: ignore[arg-type]
    assert str(budget) == text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "match needs a budget; give --error 0.1, --memory 64MiB, --time 10ms or --score 0.9"),
        ({"error": 0.1, "time": "1ms"}, "match takes one budget, not error and time; give"),
        ({"error": 0.0}, "--error: 0.0 is not a relative error above 0"),
        ({"error": math.nan}, "--error: nan is not a relative error above 0"),
        ({"memory": "64 parsecs"}, "--memory: '64 parsecs' is not a size such as 8GiB"),
        ({"memory": -1}, "--memory: -1 is not a number of bytes above 0"),
        ({"time": "10"}, "--time: '10' is not a time such as 10ms, 250us or 1.5s"),
        ({"time": "0ms"}, "--time: '0ms' is not a time"),
        ({"time": math.inf}, "--time: inf is not a number of seconds above 0"),
        ({"score": 1.0}, "--score: 1.0 is not a score between 0 and 1 such as 0.9"),
        ({"score": 0.0}, "--score: 0.0 is not a score between 0 and 1"),
        ({"score": math.nan}, "--score: nan is not a score between 0 and 1"),
        ({"score": "high"}, "--score: 'high' is not a score between 0 and 1"),
        ({"score": 0.9, "error": 0.1}, "match takes one budget, not error and score; give"),
    ],
)
def test_a_budget_that_is_none_is_refused_in_one_line_with_a_remedy(given: dict[str, float | str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        budget_of(**given)  # type: ignore[arg-type]
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(("written", "said"), [("0", "at least 1"), ("1k,2k", "takes one length"), ("x", "'x'")])
def test_one_length_is_wanted(written: str, said: str) -> None:
    assert one_length("4k") == 4096
    with pytest.raises(UsageError, match=said):
        one_length(written)


# Answers


def found(
    label: str, error: float, low: float, high: float, kind: str = "approximation", memory: float = 1e6
) -> FoundSetting:
    point = MeasuredSetting(label, 8, error=error, error_low=low, error_high=high, error_kind=kind, memory=memory)
    return FoundSetting(label.partition(":")[0], "m", (point,), point)


def test_the_smaller_error_is_named_where_the_intervals_are_apart_and_no_distance_is_ranked() -> None:
    budget = Budget("memory", 2e6)
    a, b, c = found("a:m=8", 0.1, 0.09, 0.11), found("b:m=8", 0.2, 0.19, 0.21), found("c:m=8", 0.01, 0, 0, "distance")
    assert "smallest error within memory 1.91 MiB: a:m=8, 0.1 (0.09 to 0.11)" in Match(budget, [a, b, c]).sentences()
    near = found("b:m=8", 0.105, 0.095, 0.115)
    assert any("cannot be told, a:m=8 and b:m=8 overlap" in line for line in Match(budget, [a, near]).sentences())


def test_within_an_error_the_least_memory_is_named() -> None:
    small, large = found("a:m=8", 0.1, 0.1, 0.1, memory=2**20), found("b:m=8", 0.1, 0.1, 0.1, memory=2**21)
    assert "least memory within error 0.1: a:m=8, 1.00 MiB" in Match(Budget("error", 0.1), [large, small]).sentences()
    equals = [found(f"{name}:m=8", 0.1, 0.1, 0.1, memory=2**20) for name in "cdef"]
    said = Match(Budget("error", 0.1), [large, small, *equals[:1]]).sentences()
    assert "least memory within error 0.1: a:m=8, c:m=8, 1.00 MiB" in said
    said = Match(Budget("error", 0.1), [large, *equals]).sentences()
    assert "least memory within error 0.1: c:m=8, d:m=8, e:m=8 and 1 more, 1.00 MiB" in said


def test_every_try_is_a_row_and_the_chosen_one_is_marked() -> None:
    rungs = ladder()
    budget = Budget("error", 0.1)
    one = search(rungs, budget, lambda m: error(2 / math.sqrt(m)))
    found = [one, FoundSetting("linformer", "rank", (), None, "not fitted")]
    rows = Match(budget, found, same={"seq_len": 4096}).to_rows()
    assert len(rows) == len(one.tries) + 1
    assert [row["value"] for row in rows if row["chosen"]] == [400]
    assert rows[-1]["reason"] == "not fitted"
    assert {row["seq_len"] for row in rows} == {4096}


def test_a_setting_whose_turns_take_longer_is_not_within_the_budget() -> None:
    budget, slow = Budget("time", 1e-3), found("a:m=8", 0.1, 0.09, 0.11)
    assert slow.chosen is not None
    late = replace(slow.chosen, time=2e-3)
    a, b = replace(slow, tries=(late,), chosen=late), found("b:m=8", 0.2, 0.19, 0.21)
    in_time = replace(b.tries[0], time=5e-4)
    b = replace(b, tries=(in_time,), chosen=in_time)
    as_it_stands = replace(a, knob="", note="it has no knob")
    assert Match(budget, [as_it_stands]).sentences()[0].endswith("2.00 ms, not within time 1.00 ms")
    assert not any(line.startswith(("least memory", "smallest error")) for line in Match(budget, [a, b]).sentences())
    assert Match(budget, [a, b]).headline() == "b:m=8 fits into time 1.00 ms: 500 µs"
    assert Match(budget, [a]).headline() == "Nothing is within time 1.00 ms"


def test_the_headline_ranks_what_the_sentences_rank() -> None:
    budget = Budget("memory", 2e6)
    a, near = found("a:m=8", 0.1, 0.09, 0.11), found("b:m=8", 0.105, 0.095, 0.115)
    assert Match(budget, [a, near]).headline() == (
        "Smallest error within memory 1.91 MiB: cannot be told, a:m=8 and b:m=8 overlap"
    )
