"""What a plug-in does when it is imported is met in a process of its own first, whatever the command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.contract.plugins.foreign import module_name
from attnbench.errors import Exit, UsageError
from attnbench.harness import trial
from attnbench.measure.standstill import run_delays

MODULE = "import torch\nclass Mine(torch.nn.Module):\n    def forward(self, x):\n        return x\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time\ntime.sleep(1000)", "s passed before it was imported; make its import short"),
        (
            "import atexit, time\natexit.register(time.sleep, 1000)",
            "s passed before Python ended after it was imported",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "Python ended by SIGSEGV while it was imported"),
        ("import ctypes\nctypes.string_at(0)", "Python ended by SIGSEGV while it was imported"),
        ("import ctypes\nctypes.CDLL(None)._exit(0)", "Python ended with code 0 while it was imported"),
        ("1 / 0", ":1: ZeroDivisionError: division by zero"),
        ("input()", ":1: EOFError"),
    ],
)
def test_what_hangs_or_ends_python_is_one_line(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    monkeypatch.setattr(trial, "LIMIT", 25.0 if "1000" in source else 100.0)
    start = time.monotonic()
    with pytest.raises(UsageError) as refused:
        trial.load_all([f"{file}:Mine"])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"plug-in {file}")
    assert module_name(file) not in sys.modules
    assert time.monotonic() - start < 60


def test_what_it_starts_and_leaves_behind_is_ended(tmp_path: Path) -> None:
    file, sign = tmp_path / "mine.py", tmp_path / "alive"
    file.write_text(
        f"import subprocess, sys\nif 'attnbench.harness.trial' in sys.orig_argv:\n"
        f"    subprocess.Popen(['sh', '-c', 'sleep 3; touch {sign}'])\n"
    )
    trial.load_all([str(file)])
    time.sleep(5)
    assert not sign.exists()


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "{}:Mine", "mean-value", "--level", "layer"],
        ["score", "{}:Mine"],
        ["check", "mine", "--plugin", "{}"],
        ["swap", "listops", "--variant", "mine", "--plugin", "{}"],
        ["match", "mine", "--plugin", "{}", "--error", "0.1"],
        ["run", "quick", "--plugin", "{}"],
        ["list", "--plugin", "{}"],
        ["show", "mine", "--plugin", "{}"],
    ],
)
def test_every_command_asks_a_process_of_its_own_first(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MODULE + "import os\nos.kill(os.getpid(), 11)\n")
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("{}", str(file)) for word in command]) == Exit.USAGE
    error = capsys.readouterr().err
    assert "Python ended by SIGSEGV while it was imported" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not run_delays(), reason="the kernel does not count the time without a core")
def test_time_without_a_core_counts_against_no_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cores = tmp_path / "mine.py", os.sched_getaffinity(0)
    file.write_text("import time\nwhile time.thread_time() < 2: pass\n")
    monkeypatch.setattr(trial, "LIMIT", 6.0)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(6)]
    try:
        for pid in (0, *(one.pid for one in busy)):
            os.sched_setaffinity(pid, [min(cores)])
        start = time.monotonic()
        trial.load_all([str(file)])
        assert time.monotonic() - start > trial.LIMIT, "nothing was to be seen"
    finally:
        os.sched_setaffinity(0, cores)
        for one in busy:
            one.kill()
            one.wait()
