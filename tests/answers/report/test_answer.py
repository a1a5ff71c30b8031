"""The sentences say what the rows hold, and no more."""

from __future__ import annotations

import pandas as pd
import pytest

from attnbench.answers.report.answer import answer, beside_softmax, share
from attnbench.answers.report.figures import MOST, draw_whole
from attnbench.answers.report.html_page import make_page
from attnbench.answers.report.table_rows import marked
from attnbench.answers.report.views import found_in, views
from attnbench.figures.kit.inline import SharedStyles
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.swap import draw_swap
from attnbench.results.frame import agreement, contenders
from attnbench.results.frame.relative import FEW_CLEAN, Relation, relative
from attnbench.results.frame.settings import settings, timed
from attnbench.results.read import read_results
from tests.answers.report.reading import REFERENCE, Read, rows_of


def said(frame: pd.DataFrame) -> list[str]:
    rows = marked(frame.reset_index(drop=True))
    every = views(rows)
    beside = relative([view.setting for view in every])
    return ["".join(text for text, _ in one) for one in answer(rows, every, found_in(rows), beside)]


@pytest.fixture
def lra() -> pd.DataFrame:
    """The committed run, with times at its longest length that this test knows, and intervals of 2 % to either side."""
    frame = rows_of("lra-cpu")
    for label, seconds in {"softmax": 1.0, "sdpa": 1.5, "performer": 0.25}.items():
        frame = timings(frame, label, 4096, time_median_s=seconds)
    at, median = frame["seq_len"] == 4096, frame["time_median_s"]
    ends = {"time_ci_low_s": 0.98 * median, "time_ci_high_s": 1.02 * median}
    return frame.assign(**{name: frame[name].mask(at, value) for name, value in ends.items()})


def timings(frame: pd.DataFrame, label: str, n: int, **columns: float) -> pd.DataFrame:
    """The frame with other numbers in the timed row of a label."""
    at = (frame["label"] == label) & (frame["seq_len"] == n) & (frame["level"] == "model")
    assert at.sum() == 1
    return frame.assign(**{name: frame[name].mask(at, value) for name, value in columns.items()})


def test_the_fastest_exact_attention_is_named_with_its_time_at_the_longest_length(lra: pd.DataFrame) -> None:
    first, *_ = said(lra)
    assert first.startswith(
        "At n = 4096, softmax is the fastest exact attention: 1.00 s for a training step of the whole"
    )
    quick = timings(lra, "sdpa", 4096, time_median_s=0.4, time_ci_low_s=0.39, time_ci_high_s=0.41)
    first, *_ = said(quick)
    assert "sdpa is the fastest exact attention: 400 ms" in first
    assert "2.5 times as fast as softmax (2.4 to 2.6)" in first  # the far ends of both


def test_a_speed_on_a_gpu_says_whose_time_is_the_host(lra: pd.DataFrame) -> None:
    frame = lra.assign(launched="graph", host_share=0.05)
    at = (lra["variant"] == "performer") | (lra["label"] == "performer:features=256")
    frame = frame.assign(launched=frame["launched"].mask(at, "eager"), host_share=frame["host_share"].mask(at, 0.88))
    near = frame.assign(rel_error=lra["rel_error"].mask(at, 0.05))
    (found,) = [one for one in said(near) if "performer, error 0.05" in one]
    assert "; eager: 88 % of performer's time is the host" in found
    assert not any("the host" in one for one in said(lra))


def test_times_whose_intervals_overlap_are_not_told_apart(lra: pd.DataFrame) -> None:
    same = timings(lra, "sdpa", 4096, time_median_s=1.05, time_ci_low_s=0.95, time_ci_high_s=1.2)
    assert "sdpa cannot be told apart from it" in said(same)[0]


def test_exact_ones_whose_visits_agree_by_chance_are_not_told_apart_either(lra: pd.DataFrame) -> None:
    """Their own intervals do not overlap; those of the rows beside them say how visits differ here."""
    at, median = lra["seq_len"] == 4096, lra["time_median_s"]
    wide = lra.assign(time_ci_low_s=lra["time_ci_low_s"].mask(at, 0.8 * median))
    wide = wide.assign(time_ci_high_s=wide["time_ci_high_s"].mask(at, 1.25 * median))
    for label, seconds in (("softmax", 1.0), ("sdpa", 1.05)):
        own = {"time_ci_low_s": 0.999 * seconds, "time_ci_high_s": 1.001 * seconds}
        lra = timings(lra, label, 4096, time_median_s=seconds, **own)
        wide = timings(wide, label, 4096, time_median_s=seconds, **own)
    assert "cannot be told apart" not in said(lra)[0]
    assert "; sdpa cannot be told apart from it" in said(wide)[0]


def test_within_an_error_counts_the_error_and_not_the_speed(lra: pd.DataFrame) -> None:
    far = lra.assign(rel_error=lra["rel_error"].mask(lra["rel_error"] > 1e-3, 0.5))
    assert any(one.startswith("No approximation comes within an error of 0.1 on listops") for one in said(far))
    at = (lra["label"] == "performer:features=256") | (lra["variant"] == "performer")
    near = far.assign(rel_error=far["rel_error"].mask(at, 0.05))
    (found,) = [one for one in said(near) if one.startswith("Within an error of 0.1")]
    assert "performer, error 0.05, 4.0 times as fast as softmax (3.8 to 4.2)" in found


def test_an_approximation_is_called_slower_or_the_fastest_only_beyond_doubt(lra: pd.DataFrame) -> None:
    """Medians alone order times whose intervals overlap, or that have none."""
    far = lra.assign(rel_error=lra["rel_error"].mask(lra["rel_error"] > 1e-3, 0.5))
    near = far.assign(rel_error=far["rel_error"].mask(far["label"].isin(["performer", "bigbird"]), 0.05))

    def sentence(seconds: float, half: float) -> str:
        frame = near
        for label, median in {"performer": seconds, "bigbird": seconds * 1.01}.items():
            ends = {"time_ci_low_s": median * (1 - half), "time_ci_high_s": median * (1 + half)}
            frame = timings(frame, label, 4096, time_median_s=median, **ends)
        (found,) = [one for one in said(frame) if "the fastest approximation is performer" in one]
        return found

    assert sentence(2.0, 0.02).endswith(", slower than softmax; bigbird cannot be told apart from it.")
    for half in (0.02, float("nan")):
        assert "slower than" not in sentence(1.01, half)
        assert sentence(1.01, half).endswith("; bigbird cannot be told apart from it.")


def test_the_best_scores_stand_beside_speed() -> None:
    found = said(rows_of("headline-cpu"))
    assert any(one.startswith("Best on recall: ") and "times softmax's speed" in one for one in found)


def test_of_several_conditions_the_one_that_was_learnt_best_is_told() -> None:
    (found,) = said(rows_of("positions-cpu"))
    assert found.startswith(
        "Best on copy · trained-sinusoid positions, not guided: location with 1.000, softmax with 0.999"
    )


def test_scores_at_chance_are_not_called_best() -> None:
    frame = rows_of("positions-cpu")
    guided = frame[frame["sweep"] == "guided"].reset_index(drop=True)
    (found,) = said(guided)
    assert found.startswith("Nothing was seen to learn copy: linear with 0.063")
    assert found.endswith("; chance is 0.065.")


def test_times_without_a_speed_are_not_denied(lra: pd.DataFrame) -> None:
    timed_only = lra.assign(examples_per_s=float("nan"), tokens_per_s=float("nan"))
    assert said(timed_only) == ["No row of this run has a speed in examples per second; its times stand in the table."]
    nothing = timed_only.assign(time_median_s=float("nan"))
    assert said(nothing) == ["No row of this run has a time: it holds errors, or how its cells failed."]


@pytest.mark.parametrize("run", ["swap-smollm2", "swap-minilm"])
def test_a_swap_is_told_by_its_least_damage(run: str) -> None:
    frame = rows_of(run)
    (told,) = said(frame)
    together = frame[(frame["replaced"] == "all") & (frame["sweep"] != "exact") & (frame["attention_error"] > 1e-4)]
    column = "loss_delta" if together["loss_delta"].notna().any() else "hidden_error"
    best = together[together["variant"] != "mean-value"].groupby("label")[column].median().sort_values()
    number = f"({best.iloc[0]:+.2f} over" if column == "loss_delta" else f"error of {best.iloc[0]:.2g} in"
    assert told.startswith(f"Least damage with all layers replaced, without training: {best.index[0]} with a")
    assert number in told
    saw_all = frame.assign(attention_error=frame["attention_error"].mask(frame["label"] == best.index[0], 1e-9))
    assert best.index[1] in said(saw_all)[0]


def test_a_swap_whose_interval_meets_the_best_one_s_is_named_beside_it() -> None:
    untrained, *_ = said(rows_of("swap-listops"))
    assert ": topk:keys=16 with a loss of 1.613 nats (+0.03 over the untouched model, -0.01 to +0.07); " in untrained
    assert untrained.endswith("; local:window=64 cannot be told apart from it.")


def test_swaps_of_two_models_are_told_and_drawn_apart() -> None:
    one, other = rows_of("swap-listops"), rows_of("swap-smollm2")
    both = pd.concat([one, other.assign(machine_id=one["machine_id"].iloc[0])], ignore_index=True)
    apart = [told for frame in (one, other) for told in said(frame)]
    assert [sentence.partition(": ")[2] for sentence in said(both)] == apart
    with pytest.raises(NothingToDraw, match="2 trained models or texts have no common axis"):
        draw_swap(both)
    assert len(draw_whole(["swap"], both, SharedStyles())) == 2


def test_a_length_that_softmax_did_not_reach_is_told_apart(lra: pd.DataFrame) -> None:
    at = (lra["label"] == "softmax") & (lra["seq_len"] == 4096) & (lra["level"] == "model")
    numbers = [name for name in lra if name.startswith(("time_", "peak_", "examples_", "tokens_"))]
    stopped = lra.assign(status=lra["status"].mask(at, "oom"), **{name: lra[name].mask(at) for name in numbers})
    found = said(stopped)
    assert found[0].startswith("At n = 3072, ")
    assert "At n = 4096, where softmax was not measured (oom at n = 4096), the fastest is " in found[-1]


def test_the_ratio_takes_at_least_the_far_ends_of_both_intervals(lra: pd.DataFrame) -> None:
    setting = settings(timed(lra))[0]
    rows = setting.rows[setting.rows["seq_len"] == 4096].set_index("label")
    index = setting.rows.index[(setting.rows["label"] == "linear") & (setting.rows["seq_len"] == 4096)][0]
    base, mine = rows.loc["softmax"], rows.loc["linear"]
    one = relative([setting])[index]
    assert one.low is not None
    assert one.high is not None
    assert one.speed == base["time_median_s"] / mine["time_median_s"]
    assert one.high / one.low >= 0.999 * (base["time_ci_high_s"] / base["time_ci_low_s"]) * (
        mine["time_ci_high_s"] / mine["time_ci_low_s"]
    )
    assert one.memory == mine["peak_bytes"] / base["peak_bytes"]


def test_a_row_beside_exact_ones_of_which_one_has_no_interval_has_none_either(lra: pd.DataFrame) -> None:
    least = {name: lra[name].mask(lra["label"] == "sdpa") for name in ("time_ci_low_s", "time_ci_high_s")}
    longest = timed(lra.assign(**least)[lra["seq_len"] == 4096])
    found = relative(settings(longest)[:1], bases=("softmax", "sdpa"))
    assert found
    assert {(one.low, one.high, one.family) for one in found.values()} == {(None, None, 0)}


def test_a_report_of_more_rows_has_wider_intervals_and_says_how_many_share_them() -> None:
    frame = rows_of("decoding-cpu")
    few = relative(settings(timed(frame))[:1])
    all_ = relative(settings(timed(frame)))
    assert len(all_) > len(few)
    assert all(all_[row].low <= one.low < one.high <= all_[row].high for row, one in few.items())  # type: ignore[operator]
    assert any(all_[row].low < one.low for row, one in few.items())  # type: ignore[operator]
    assert f"Ratios: joint 95 % over {len(all_)} comparisons" in make_page(frame)


def test_rows_of_a_busy_machine_get_a_marked_verdict_or_none(lra: pd.DataFrame) -> None:
    busy = lra.assign(warnings=f"3 of 9 samples disturbed by other processes (kept, {FEW_CLEAN}); close them")
    assert any("4.0 times as fast as softmax (3.8 to 4.2, busy machine)" in one for one in said(busy))
    alike = timings(busy, "sdpa", 4096, time_median_s=0.999, time_ci_low_s=0.99, time_ci_high_s=1.01)
    found = " ".join(said(alike))
    assert "not held against softmax: the machine was busy (too few clean ones)" in found


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Relation(3.61, 3.3, 3.9, 0.158), "3.6 times as fast as softmax (3.3 to 3.9), with 16 % of its peak memory"),
        (
            Relation(0.9, 0.85, 0.95, 1.31),
            "0.90 times as fast as softmax (0.85 to 0.95), with 1.3 times its peak memory",
        ),
        (
            Relation(3.61, 3.3, 3.9, 0.158, decodes=True),
            "3.6 times as fast as softmax (3.3 to 3.9), with 16 % of its cache or state",
        ),
        (Relation(1.02, 0.97, 1.05, None), "not told apart from softmax (0.97 to 1.05 times as fast)"),
        (Relation(1.006, 1.004, 1.008, None), "not told apart from softmax (1.00 to 1.01 times as fast)"),
        (Relation(140.2, None, None, None), "140 times as fast as softmax (without an interval)"),
        (
            Relation(1.4, None, None, None, rounds=2),
            "1.4 times as fast as softmax (without an interval: too few rounds, 2; --rounds 5 gives one)",
        ),
    ],
)
def test_a_verdict_needs_the_whole_interval(one: Relation, words: str) -> None:
    assert beside_softmax(one) == words


def test_a_share_of_memory_is_in_per_cent_until_it_is_more() -> None:
    assert [share(one) for one in (0.004, 0.16, 1.0, 1.5, 12)] == [
        "0.40 % of",
        "16 % of",
        "100 % of",
        "1.5 times",
        "12 times",
    ]


def test_the_answer_names_what_was_measured_how_a_decoder_does_and_that_the_machine_was_busy() -> None:
    said = Read(make_page(read_results(REFERENCE / "generate-cpu"))).text
    assert "(float32, 32 heads × 128, batch 1, causal, 32 new tokens, 8 heads of keys and values, 2 threads" in said
    assert "259 ms to the first token, 975 µs per token, 16.2 MiB of cache or state" in said
    assert "The machine was busy: 10 of 11 rows here are of disturbed samples" in said


def test_the_rows_of_a_table_are_looked_through_once_however_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = read_results(REFERENCE / "long-cpu")
    first = frame[frame["status"] == "ok"].drop_duplicates("label").head(3)
    every = pd.concat([first.assign(seq_len=n, kv_len=n, cell_id=f"{n}") for n in range(64, 104)], ignore_index=True)
    looked = []
    compared = agreement.compared
    monkeypatch.setattr(agreement, "compared", lambda *given: looked.append(1) or compared(*given))
    made = []
    agreeing = contenders._agreeing
    monkeypatch.setattr(contenders, "_agreeing", lambda *given: made.append(1) or agreeing(*given))
    make_page(every)
    assert 1 <= len(looked) <= 3
    assert 1 <= len(made) <= MOST + 2, "points are made of the lengths that are shown or told alone"
