"""The script that measures false alarms says what is so, on runs of which it is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnbench.decision.decide import Question, read_runs
from tests.benchmarks import gate_alarms
from tests.decision.fixture_runs import Row, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs of forty cells that differ by chance alone."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [Row(n=n, drift=0.01, noise=0.02) for n in range(1, 41)]
    return [write_run(folder / str(seed), rows, seed=seed) for seed in range(3)]


def test_nothing_is_called_slower_and_everything_is_that_was_made_much_slower(runs: list[Path]) -> None:
    read = read_runs(runs)
    none = gate_alarms.share(read, Question(), "time", "slower")
    all_ = gate_alarms.share(read, Question(), "time", "slower", lambda run: gate_alarms.slowed(run, 1.5))
    assert (none.of, all_.of) == (240, 240)
    assert none.found <= 2
    assert all_.found == 240
    broken = gate_alarms.share(read, Question(), "status", "broken", gate_alarms.crashed)
    assert (broken.found, broken.of) == (240, 240)


def test_every_figure_is_printed_and_finds_grow_with_the_factor(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    gate_alarms.main([str(run) for run in runs])
    text = capsys.readouterr().out
    assert "false alarms at 1.05: 0.0" in text
    assert "broken found: 1.000 (240 of 240; worst pair 1.000)" in text
    shares = [float(one) for one in re.findall(r"found at x[\d.]+: ([\d.]+) ", text)]
    assert len(shares) == 5
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_run_that_is_slower_as_a_whole_is_counted(tmp_path: Path) -> None:
    rows = [Row("softmax", n) for n in range(1, 6)]
    write_run(tmp_path / "a", rows)
    write_run(tmp_path / "b", [Row("softmax", n, seconds=1.2e-3) for n in range(1, 6)], seed=1)
    lines = gate_alarms.report(read_runs([tmp_path / "a", tmp_path / "b"]), Question())
    assert "runs as a whole differ by up to 20" in lines[1] or "runs as a whole differ by up to 19" in lines[1]
    assert "false alarms at 1.05: 0.500 (5 of 10; worst pair 1.000); 1 of 2 gates closed" in lines[2]
