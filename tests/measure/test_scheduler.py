"""What the kernel's scheduler tells of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.measure import standstill


@pytest.mark.parametrize(
    ("text", "delays"),
    [
        ("100 2500000000 3", {"7": 2.5}),
        ("0 0 0", {}),  # a kernel that counts nothing
        ("7", {}),
        ("7 x 3", {}),
        (None, {}),
    ],
)
def test_the_run_delay_of_a_thread_is_the_second_number_of_the_scheduler(
    text: str | None, delays: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "42/task/7").mkdir(parents=True)
    if text is not None:
        (tmp_path / "42/task/7/schedstat").write_text(text)
    monkeypatch.setattr(standstill, "_PROCESSES", tmp_path)
    assert standstill.run_delays(42) == delays
    assert standstill.run_delays() == {}


RANKED = """
import os
from attnbench.harness.inside.worker import ask_for_cores
{before}
ask_for_cores()
print(os.getpriority(os.PRIO_PROCESS, 0), *open("/proc/self/autogroup").read().split()[-1:])
"""
WITHOUT_THE_RIGHT = """
import resource
resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
os.setuid(65534)
"""


def ranked(*, session: bool, before: str = "") -> str:
    run = [sys.executable, "-c", RANKED.format(before=before)]
    done = subprocess.run(run, start_new_session=session, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


needs_sessions = pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="needs Linux's autogroups")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root")
@needs_sessions
def test_root_measures_before_other_programs_in_a_session_of_its_own() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1)
    except OSError:
        pytest.skip("needs the right to raise a priority")
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + 1)
    assert ranked(session=True) == "-20 -20"
    with_others = Path("/proc/self/autogroup").read_text().split()[-1:]  # a container's first session has none
    assert ranked(session=False) == " ".join(["-20", *with_others])  # the shell that started it keeps its place


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to give it up")
@needs_sessions
def test_without_the_right_nothing_changes_and_nothing_fails() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert ranked(session=True, before=WITHOUT_THE_RIGHT) == f"{own} 0"
