"""What the kernel's scheduler tells of threads, and is asked for."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnbench.measure import scheduler


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
    (tmp_path / "7").mkdir()
    if text is not None:
        (tmp_path / "7/schedstat").write_text(text)
    monkeypatch.setattr(scheduler, "_THREADS", tmp_path)
    assert scheduler.run_delays() == delays
    monkeypatch.setattr(scheduler, "_THREADS", tmp_path / "none")
    assert scheduler.run_delays() == {}


SLICES = """
import threading
from attnbench.measure import scheduler as s

granted, seen = s.ask_for_short_slices(), []

def look():
    told = s.ctypes.create_string_buffer(s._ATTRIBUTES.size)
    s.ctypes.CDLL(None).syscall(s._CALLS[s.platform.machine()][1], 0, told, s._ATTRIBUTES.size, 0)
    seen.append(s._ATTRIBUTES.unpack(told.raw)[5])

thread = threading.Thread(target=look)
thread.start()
thread.join()
print(granted, seen[0] == s._SLICE)
"""


@pytest.mark.skipif(platform.machine() not in scheduler._CALLS, reason="the numbers of the calls are unknown")
@pytest.mark.skipif(sys.platform != "linux", reason="another kernel")
def test_threads_that_are_started_later_have_short_slices_as_well_if_linux_grants_them() -> None:
    done = subprocess.run([sys.executable, "-c", SLICES], capture_output=True, text=True, check=True)
    assert done.stdout.split() in (["True", "True"], ["False", "False"])
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    assert done.stdout.startswith("True") or release < (6, 12)


@pytest.mark.parametrize("facts", [{"system": "Darwin"}, {"machine": "sparc"}])
def test_elsewhere_nothing_is_asked(facts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in facts.items():
        monkeypatch.setattr(platform, name, lambda value=value: value)
    monkeypatch.setattr(scheduler, "ctypes", SimpleNamespace())
    assert not scheduler.ask_for_short_slices()
