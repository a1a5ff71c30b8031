"""The script that measures false alarms says what is so, on runs of which it is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnbench.answers.gate.decide import GateQuestion, read_runs
from attnbench.answers.gate.verdict import Tolerance
from tests.answers.fixture_runs import Row, write_run
from tests.benchmarks import gate_alarms
from tests.benchmarks.gate_alarms import share, slowed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs of forty cells that differ by chance alone; eight are of softmax."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [Row("softmax" if n <= 8 else "linear", n, drift=0.01, noise=0.02) for n in range(1, 41)]
    return [write_run(folder / str(seed), rows, seed=seed) for seed in range(3)]


def test_nothing_is_called_slower_and_everything_is_that_was_made_much_slower(runs: list[Path]) -> None:
    read = read_runs(runs)
    none = share(read, GateQuestion(), "time", "slower")
    all_ = share(read, GateQuestion(), "time", "slower", lambda run: slowed(run, 1.5))
    assert (none.of, all_.of) == (240, 240)
    assert none.found <= 2
    assert (all_.found, all_.pairs) == (240, 6)
    broken = share(read, GateQuestion(), "status", "broken", gate_alarms.crashed)
    assert (broken.found, broken.of) == (240, 240)


def test_a_loss_is_found_beside_the_variant_that_did_not_change_which_is_not_counted(runs: list[Path]) -> None:
    read, question = read_runs(runs), GateQuestion(relative_to="softmax")
    found = share(read, question, "time", "slower", lambda run: slowed(run, 1.5, but="softmax"))
    assert (found.found, found.of) == (192, 192)
    shared = share(read, question, "time", "slower", lambda run: slowed(run, 1.5))  # softmax as well: a slow machine
    assert shared.found == 0


def test_of_so_few_comparisons_without_an_alarm_a_share_above_zero_cannot_be_excluded() -> None:
    assert gate_alarms.Share(0, 288, 0.0, 0).most == pytest.approx(1 - 0.05 ** (1 / 288))
    assert gate_alarms.Share(288, 288, 1.0, 6).most == 1.0


def test_every_figure_is_printed_and_finds_grow_with_the_factor(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    gate_alarms.main([str(run) for run in runs])
    text = capsys.readouterr().out
    assert text.startswith("3 runs of the same programs, 6 ordered pairs, 40 timed cells each, 5 rounds; as a whole ")
    table = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in table} == {5}
    assert [row[0] for row in table] == [
        *("every cell made", "---", "no slower (false alarms)"),
        *(f"{factor} times as slow" for factor in ("1.05", "1.1", "1.15", "1.2", "1.3")),
    ]
    for column in (1, 3):
        shares = [float(row[column].partition("%")[0]) for row in table[2:]]
        assert shares == sorted(shares)
        assert shares[0] < 1
        assert shares[-1] == 100
    assert "- Of cells that were made to fail, called broken: 100.0% (240 of 240)." in text
    assert "- False alarms of more memory: 0.0% (0 of 240)." in text
    assert "more error" not in text  # which these runs do not have


def test_a_run_that_is_slower_as_a_whole_closes_a_gate_and_few_rounds_are_told(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [Row("softmax", n) for n in range(1, 6)], rounds=3)
    write_run(tmp_path / "b", [Row("softmax", n, seconds=1.2e-3) for n in range(1, 6)], seed=1, rounds=3)
    text = "\n".join(gate_alarms.report(read_runs([tmp_path / "a", tmp_path / "b"]), Tolerance(), None))
    assert text.startswith("**With fewer than 5 rounds these figures are not those of the gate.**")
    assert re.search(r"the runs differ by up to (19|20)\.\d%", text)
    assert "| no slower (false alarms) | 50.0% (5 of 10) | 100.0% |" in text
    assert "; 1 of 2 gates would close." in text
