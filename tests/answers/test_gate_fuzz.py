"""Whatever became of a run's files, the gate ends in a decision or in one line, and changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.results.store import ENVIRONMENT, RECORDS, SAMPLES, SUITE, TABLE
from tests.answers.fixture_runs import Row, write_run

PIECES = [b"\n", b'"', b"{", b"}", b"[", b": ", b"NaN", b"1e999", b"null", b"true", b"\x00", b"\xff", b"5", b"-"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "old", [Row(error=0.5), Row(n=128)], samples=2)
    write_run(folder / "new", [Row(error=0.5), Row(n=128)], samples=2, seed=1)
    shutil.copytree(folder / "new", folder / "whole")
    return folder


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(name=st.sampled_from([RECORDS, SAMPLES, ENVIRONMENT, SUITE, TABLE]), data=st.data())
def test_a_damaged_run_is_decided_on_or_refused_in_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], name: str, data: st.DataObject
) -> None:
    content = (runs / "whole" / name).read_bytes()
    at, cut = data.draw(st.integers(0, len(content))), data.draw(st.integers(0, 30))
    damaged = content[:at] + data.draw(st.sampled_from(PIECES) | st.binary(max_size=4)) + content[at + cut :]
    (runs / "new" / name).write_bytes(damaged)
    try:
        code = Exit(main(["gate", str(runs / "new"), "--against", str(runs / "old")]))
        told = capsys.readouterr()
        assert code in (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.CORRUPT)
        assert "Traceback" not in told.err
        if code in (Exit.USAGE, Exit.CORRUPT):
            assert told.out == ""
            assert told.err.splitlines()[-1].startswith("error: ")
        assert (runs / "new" / name).read_bytes() == damaged
    finally:
        (runs / "new" / name).write_bytes(content)
