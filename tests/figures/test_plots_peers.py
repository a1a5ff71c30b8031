from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.figure import Figure

from attnbench.errors import UsageError
from attnbench.figures.kit.page import NothingToDraw
from attnbench.figures.peers import draw_peers, left_out, pairs

Words = Callable[[Figure], str]
Rows = list[dict[str, Any]]


def both(run: Any, mine: float = 1.0, peer: float = 2.0, **columns: Any) -> Rows:
    at = {"suite": "peers", "floor_s": mine / 4, **columns}
    return [
        run.row("linear", time_median_s=mine, time_min_s=0.8 * mine, peak_bytes=10.0, **at),
        run.row("peer.linear.einsum", time_median_s=peer, time_min_s=peer, peak_bytes=40.0, **at),
    ]


def test_a_peer_stands_beside_the_variant_of_its_name(run: Any) -> None:
    (pair,) = pairs(run.table([*both(run), run.row("performer", suite="peers", time_median_s=1.0, peak_bytes=1.0)]))
    assert pair.names == ("linear", "peer.linear.einsum")
    assert (pair.time, pair.peak, pair.n, pair.pass_) == (0.5, 0.25, 1024, "forward")


@pytest.mark.parametrize(
    "other",
    [{"pass": "training"}, {"seq_len": 2048}, {"causal": True}, {"inputs": "banded"}, {"process": "as-shipped"}],
    ids=str,
)
def test_only_what_was_measured_alike_is_compared(run: Any, other: dict[str, Any]) -> None:
    mine, peer = both(run)
    assert not pairs(run.table([mine, {**peer, **other}]))


def test_the_interval_of_a_ratio_is_that_of_two_independent_numbers(run: Any) -> None:
    """Half-widths of logarithms 0.3 and 0.4 give 0.5."""
    at = {"time_ci_low_s": math.exp(-0.3), "time_ci_high_s": math.exp(0.3)}
    mine, peer = both(run, 1.0, 1.0, **at)
    peer |= {"time_ci_low_s": math.exp(-0.4), "time_ci_high_s": math.exp(0.4)}
    (pair,) = pairs(run.table([mine, peer]))
    assert (math.log(pair.low), math.log(pair.high)) == pytest.approx((-0.5, 0.5))


def test_each_end_of_the_interval_takes_the_nearer_end_of_one_side_and_the_other_of_the_other(run: Any) -> None:
    mine, peer = both(run, 1.0, 1.0, time_ci_low_s=1.0, time_ci_high_s=1.0)
    (pair,) = pairs(run.table([{**mine, "time_ci_high_s": 1.5}, peer]))
    assert (pair.low, pair.high) == pytest.approx((1.0, 1.5))
    (pair,) = pairs(run.table([mine, {**peer, "time_ci_high_s": 1.25}]))
    assert (pair.low, pair.high) == pytest.approx((0.8, 1.0))


def test_the_limit_is_what_the_machine_needs_over_what_the_package_takes(run: Any) -> None:
    (pair,) = pairs(run.table(both(run)))
    assert (pair.limit, pair.above_floor, pair.least) == (0.125, 4, 0.4)


def test_rows_of_before_have_no_limit(run: Any) -> None:
    rows = [{key: value for key, value in row.items() if key != "floor_s"} for row in both(run)]
    (pair,) = pairs(run.table(rows))
    assert pair.time == 0.5
    assert math.isnan(pair.limit)


def test_a_side_that_failed_leaves_no_number_and_its_reason(run: Any, words: Words) -> None:
    mine, _ = both(run)
    dead = run.failed("oom", "needs more than the limit", "peer.linear.einsum", suite="peers")
    frame = run.table([mine, dead, *both(run, seq_len=2048)])
    first, second = pairs(frame)
    assert math.isnan(first.time)
    assert math.isnan(first.low)
    assert math.isnan(first.peak)
    assert second.time == 0.5
    assert "oom: peer.linear.einsum (n = 1024)" in words(draw_peers(frame))


def test_sides_that_ran_in_different_processes_are_not_compared_and_it_is_said(run: Any, words: Words) -> None:
    mine, peer = both(run, seq_len=2048)
    apart = [{**mine, "process": "tuned"}, {**peer, "process": "as-shipped"}]
    frame = run.table([*both(run, seq_len=2048, causal=True), *apart])
    said = "linear and peer.linear.einsum (n = 2048, forward): measured in processes tuned and as-shipped"
    assert left_out(frame) == [f"Not comparable — {said}"]
    assert said in words(draw_peers(frame)).replace("\n", " ")


def test_only_what_has_a_package_is_missed(run: Any) -> None:
    frame = run.table([*both(run), run.failed("oom", "too large", "softmax", suite="peers")])
    assert left_out(frame) == []


def test_quick_rows_have_a_ratio_and_no_interval(run: Any) -> None:
    rows = [{**row, "time_ci_low_s": None, "time_ci_high_s": None} for row in both(run)]
    (pair,) = pairs(run.table(rows))
    assert pair.time == 0.5
    assert math.isnan(pair.low)
    assert draw_peers(run.table(rows))


def test_bars_end_at_the_ratio_and_say_by_colour_who_takes_less(run: Any) -> None:
    rows = both(run) + both(run, 6.0, 2.0, seq_len=2048)
    time, peak = draw_peers(run.table(rows)).axes
    assert [ax.get_title(loc="left") for ax in (time, peak)] == ["time\nforward", "peak memory\nforward"]
    ends = [bar.get_x() + bar.get_width() for bar in time.patches]
    assert ends == pytest.approx([0.5, 3.0])
    assert len({bar.get_facecolor()[:3] for bar in time.patches}) == 2
    assert [bar.get_x() + bar.get_width() for bar in peak.patches] == pytest.approx([0.25, 0.25])


def test_each_pass_has_a_panel_and_each_pair_a_line(run: Any, words: Words) -> None:
    rows = both(run) + both(run, **{"pass": "training"}) + both(run, causal=True)
    figure = draw_peers(run.table(rows))
    assert len(figure.axes) == 4
    said = words(figure).splitlines()
    assert said.count("linear") == 1
    assert said.count("linear, causal") == 1


def test_one_length_can_be_chosen_and_must_be_there(run: Any) -> None:
    frame = run.table(both(run) + both(run, seq_len=2048))
    assert len(draw_peers(frame, n=2048).axes[0].patches) == 1
    with pytest.raises(UsageError, match=r"no pair at n = 99; there are: 1024, 2048"):
        draw_peers(frame, n=99)


def test_without_a_peer_there_is_nothing_to_draw_and_it_says_what_is_needed(lra: Any) -> None:
    with pytest.raises(NothingToDraw, match="make peers"):
        draw_peers(lra)


def test_pairs_that_differ_in_more_than_causality_have_lines_of_their_own_that_say_how(run: Any, words: Words) -> None:
    rows = both(run) + both(run, 1.0, 4.0, dtype="bfloat16") + both(run, dtype="bfloat16", seq_len=2048)
    found = pairs(run.table(rows))
    assert [(pair.names[0], pair.time) for pair in found] == [
        ("linear, float32", 0.5),
        ("linear, bfloat16", 0.25),
        ("linear, bfloat16", 0.5),
    ]
    assert {"linear, float32", "linear, bfloat16"} <= set(words(draw_peers(run.table(rows))).splitlines())


def test_the_terminal_shows_each_measured_pair_once_for_each_length(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbench.cli.plot import _print_pairs
    from attnbench.cli.screen import console

    shown: list[Any] = []
    notes: list[str] = []
    monkeypatch.setattr(console, "note", notes.append)
    monkeypatch.setattr(
        console, "table", lambda columns, rows, **how: shown.extend([how["title"].strip(), columns, *rows])
    )
    failed = run.failed("unsupported", "no GPU", "peer.linear.fla", suite="peers")
    _print_pairs(run.table([*both(run, **{"pass": "training"}), *both(run), *both(run, seq_len=2048), failed]))
    columns = ["variant / package", "n", "time", "95 %", "least", "limit", "peak", "×floor"]
    ratios = ["0.5", "±5%", "0.4", "0.12", "0.25", "4"]
    assert shown == [
        *("variant over package, forward", columns),
        *(["linear / peer.linear.einsum", "1024", *ratios], ["", "2048", *ratios]),
        *("variant over package, training step", columns, ["linear / peer.linear.einsum", "1024", *ratios]),
    ]
    assert notes[1:] == ["Not measured — unsupported: peer.linear.fla (n = 1024) — no GPU"]


def test_what_is_drawn_is_not_said_to_be_unmeasured(run: Any) -> None:
    mine, peer = both(run)
    frame = run.table([{**mine, "status": "unsupported", "reason": "measured with an option that is gone"}, peer])
    assert [pair.time for pair in pairs(frame)] == [0.5]
    assert left_out(frame) == []
