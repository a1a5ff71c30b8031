"""``attnbench compare`` is stopped while it measures: the command, with a cell that started a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

PLUGIN = """
import os, subprocess, time
from pathlib import Path
from torch import nn
from attnbench import register

@register("waiting", family="reference", source="-", formula="-", cost="-")
class Waiting(nn.Module):
    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(__file__).with_name("being written").write_text(f"{os.getpid()} {started.pid}")
        Path(__file__).with_name("being written").rename(Path(__file__).with_name("processes"))
        time.sleep(1000)
"""


def is_alive(process: str) -> bool:
    try:
        return "Z" not in Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_until_gone(processes: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("sign", "code", "twice"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
)
def test_a_stopped_comparison_says_so_in_one_line_and_leaves_no_process(
    tmp_path: Path, sign: int, code: int, twice: bool
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    command = ["compare", "waiting", "mean-value", "--n", "8", "--heads", "1", "--threads", "1", "--device", "cpu"]
    reads, writes = os.pipe()
    if twice:  # nobody reads, so that the line about the first signal is never finished
        os.set_blocking(writes, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writes, b" " * 1024)
        os.set_blocking(writes, True)
    with subprocess.Popen(
        [sys.executable, "-m", "attnbench", *command, "--plugin", str(plugin)], stdout=subprocess.PIPE, stderr=writes
    ) as process:
        os.close(writes)
        try:
            while not (tmp_path / "processes").exists():
                assert process.poll() is None
                time.sleep(0.02)
            processes = (tmp_path / "processes").read_text().split()
            process.send_signal(sign)
            wait_until_gone(processes, 2)
            if twice:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                process.send_signal(sign)
            assert process.wait(timeout=5 if twice else 20) == code
        finally:
            process.kill()
        with os.fdopen(reads) as said:
            (line,) = said.read().strip().splitlines() or [""]
        assert twice or line == "stopped; no length was finished"
        assert process.stdout is not None
        assert process.stdout.read() == b""
