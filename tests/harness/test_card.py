"""What a card tells, in rows, in ``environment.json`` and in tables; the measuring process is made up."""

from __future__ import annotations

from dataclasses import asdict
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import pytest

from attnbench.answers.report.provenance import environment_of
from attnbench.cli import env
from attnbench.cli import run as run_command
from attnbench.cli.screen import console
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.harness.compare import compare
from attnbench.harness.compare.length import Length
from attnbench.harness.inside import pairs
from attnbench.harness.inside.pairs import Pairs, take_turns
from attnbench.harness.outside.isolation import CellFailed, Settings, Worker
from attnbench.harness.plan import Options, make_plan
from attnbench.harness.runner import execute
from attnbench.harness.wire.protocol import TakeTurns
from attnbench.measure import card, machine
from attnbench.measure.card import Clocked
from attnbench.measure.status import Status
from attnbench.measure.stopwatch import WallClock
from attnbench.measure.time import EVERY, Sample, Sampler, TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.harness.samplers import takes

CELL = Cell("s", "w", Spec("sdpa"), Shape(seq_len=64), device="cuda")
POWER_CAP = 0x4


class Paces:
    """A card that throttled at some of the readings."""

    apart = EVERY

    def begin(self, call: object, calls: int) -> None:
        pass

    def __init__(self, *throttled: int) -> None:
        self.told = chain(throttled, repeat(0))

    def read(self, since: float) -> Clocked:
        return Clocked(1980, next(self.told))


@pytest.mark.parametrize(("throttled", "left"), [(9, 31), (25, 40)])
def test_blocks_of_turns_that_a_card_slowed_are_left_out_unless_they_are_most(
    throttled: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Takes(Sampler):
        def take(self, calls: int) -> Sample:
            return Sample(0.01, calls, waited=0.0)

    monkeypatch.setattr(pairs, "Sampler", Takes)
    pace = Paces(*[POWER_CAP] * throttled)
    both = takes(WallClock(), [lambda: None] * 2)
    turns = take_turns(both, TimingRules(max_samples=40), seed=0, fewest=4, clock=lambda: 0.0, pace=pace)
    assert (len(turns.blocks), turns.disturbed, turns.taken) == (left, 40 - left, 40)
    assert turns.slowed.startswith("the card throttled: power cap (")
    assert ("left out" in turns.slowed) == (left < 40)


def test_an_answer_about_turns_says_of_the_card_what_is_text() -> None:
    good = Pairs([0], [[0.1]], [], 0, 1, 0, None, [], "the card throttled")
    request = TakeTurns([CELL], TimingRules(), 1)
    assert request.answered(asdict(good)) == good
    with pytest.raises(ValueError, match="slowed"):
        request.answered({**asdict(good), "slowed": 3})


def told(answers: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker(Settings())
    worker.state = {"card": {"driver": "1", "before": {"temperature_c": 30}}}  # type: ignore[typeddict-item]  # enough

    class Process:
        pid = 0

    monkeypatch.setattr(worker, "start", lambda: worker.state)
    monkeypatch.setattr(worker, "stop", lambda: None)
    monkeypatch.setattr(worker, "_process", Process())
    monkeypatch.setattr(worker, "_exchange", lambda *given: answers.pop(0))
    monkeypatch.setattr("attnbench.harness.outside.isolation.end_left_behind", lambda pid: 0)
    return worker


def test_a_look_with_each_answer_becomes_the_facts_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [{"temperature_c": 40, "throttled": ""}, {"temperature_c": 61, "throttled": "heat"}, {"temperature_c": 50}]
    worker = told([{"record": {}, "card": one} for one in looks], monkeypatch)
    for _ in looks[:]:
        assert worker.ask({}, 1.0) == {"record": {}}
    known = worker.state["card"]
    assert known["during"] == {"temperature_c": [40, 61], "throttled": "heat"}
    assert (known["before"], known["after"]) == ({"temperature_c": 30}, {"temperature_c": 50})
    assert environment_of({"card": known}) == [
        ("card", "driver 1"),
        ("card before", "temperature 30 °C"),
        ("card during", "temperature 40 to 61 °C, throttled heat"),
        ("card after", "temperature 50 °C"),
    ]
    assert environment_of({"card": 3}) == []


@pytest.mark.parametrize("look", [3, [1], {"temperature_c": {}}])
def test_a_look_that_makes_no_sense_is_garbage(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = told([{"card": {"temperature_c": 1}}, {"card": look}], monkeypatch)
    worker.ask({}, 1.0)
    with pytest.raises(CellFailed, match="garbage"):
        worker.ask({}, 1.0)


@pytest.mark.usefixtures("forks")
def test_how_a_card_ran_stands_in_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temperatures = count(40)
    exchange = Worker._exchange

    def with_a_card(worker: Worker, request: dict[str, Any], *given: Any) -> dict[str, Any]:
        answer = exchange(worker, request, *given)
        known = request.get("known")
        if known is None:
            return {**answer, "card": {"temperature_c": next(temperatures), "throttled": ""}}
        return {**answer, "card": known.get("card", {"driver": "1", "before": {"temperature_c": 30}})}

    monkeypatch.setattr(Worker, "_exchange", with_a_card)
    shape = "variant: [identity, mean-value], seq_len: 8, heads: 1, head_dim: 4"
    suite = tmp_path / "s.yaml"
    suite.write_text(f"name: s\nsweeps:\n  - name: w\n    measure: [time]\n    matrix: {{{shape}}}\n")
    options = Options(device="cpu", out=tmp_path / "results", min_time=0.001, threads=1, rounds=2, unchecked=True)
    folder, rows = execute(make_plan(suite, options))
    told = folder.environment["card"]
    assert (told["driver"], told["before"], {row.status for row in rows}) == ("1", {"temperature_c": 30}, {"ok"})
    first, last = told["during"]["temperature_c"]
    assert (first, last - first, told["after"]["temperature_c"]) == (40, 3, last)  # two cells, each in two processes
    assert folder.doubts() == []


def test_the_command_env_has_a_line_for_each_state_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"driver": "1", "power_limit_w": 700.0, "before": {"temperature_c": 30}}
    monkeypatch.setattr(machine, "describe", lambda device: {"gpu": "H", "cudnn": 91002, "triton": "3.6"})
    monkeypatch.setattr(card, "facts", lambda device: told)
    of_one = env._card("cuda:0")
    assert env._rows({"cards": {"cuda:0": of_one}}) == [
        ("cuda:0", "cudnn 91002, triton 3.6, driver 1, power limit 700.0 W"),
        ("cuda:0 before", "temperature 30 °C"),
    ]
    monkeypatch.setattr(card, "facts", lambda device: {})
    monkeypatch.setattr(card, "warning", lambda device: card.NOT_TOLD)
    assert env._rows({"cards": {"cuda:0": env._card("cuda:0")}})[0][1].endswith(f"not told {card.NOT_TOLD}")


def timed(**columns: Any) -> Record:
    found = {"time_median_s": 0.5, "matmul_flops": 10**14, "moved_bytes": 10**10}
    return Record.of(CELL, Status.OK, **{**found, **columns})


def test_times_of_turns_are_held_to_the_rates_of_the_machine() -> None:
    machine = {"matmul_rate": {"float32": 1e15}, "exp_rate": {}, "copy_rates": [[1 << 30, 2e12]]}
    visit = Length({0: timed(time_median_s=None)}, times=[{0: [0.25, 0.5, 0.75]}])
    side = compare._side(visit, 0, None, machine)
    assert console.reached(side.record) == ["200", "20", "20%"]
    assert side.record.time_median_s is None
    assert console.reached(compare._side(visit, 0, None).record) == ["-", "-", "-"]
    comparison = compare.Comparison(
        ["sdpa"], {("sdpa", "sdpa"): [compare.CompareRow(64, side, side, None)]}, rated=True
    )
    (row,) = comparison.to_rows()
    assert (row["a_flops_per_s"], row["a_bytes_per_s"], row["a_peak_fraction"]) == (2e14, 2e10, 0.2)
    comparison.rated = False
    assert not any("peak_fraction" in name for name in comparison.to_rows()[0])


@pytest.mark.parametrize("columns", [20, 30, 45, 60, 80])
def test_rates_stand_whole_in_the_tables_of_a_run_that_asks_for_them(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    console._out.cache_clear()
    row = timed(flops_per_s=2e14, bytes_per_s=2.345e12, peak_fraction=0.631, examples_per_s=2.0)
    run_command._print_records([row], rates=True)
    shown = capsys.readouterr().out
    assert {"TFLOP/s", "200", "GB/s", "2345", "63%"} <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= columns
    run_command._print_records([row])
    assert "TFLOP" not in capsys.readouterr().out
