"""``check`` goes on, and says what happened, whatever a variant of somebody else does to its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.forked import forks

PLUGIN = """
import ctypes, os, sys, time, warnings
import torch
from torch import nn
from attnbench import register
from attnbench.contract.variant import Traits

def variant(name, deed, at="forward"):
    class Evil(nn.Module):
        \"\"\"Does its deed when it is built or called.\"\"\"

        def __init__(self, shape):
            super().__init__()
            if at == "init":
                deed()

        def forward(self, q, k, v, *, key_mask=None):
            if at == "forward":
                deed()
            return v

    claims = Traits(target="other", cross=False, key_padding=False, rows_sum_to_one=False)
    register(name, family="kernel", source="", formula="", cost="", traits=claims)(Evil)

def fail():
    raise RuntimeError("no such thing\\nand more")

def eat():
    kept = []
    while True:
        kept.append(torch.ones(50_000_000))

def wait():
    while not os.path.exists(__file__ + ".go"):
        time.sleep(0.01)

def warn():
    warnings.warn("a word of torch")
    print("printed")
    os.write(2, b"USDT: a word of a library\\n")

variant("leaves", lambda: os._exit(0))
variant("leaves-early", lambda: os._exit(0), "init")
variant("ends", sys.exit)
variant("ends-early", lambda: sys.exit("bye"), "init")
variant("fails-early", fail, "init")
variant("hangs", lambda: time.sleep(1e6))
variant("eats", eat)
variant("dies", lambda: ctypes.string_at(0))
variant("talks", warn)
variant("waits", wait)
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugin") / "evil.py"
    path.write_text(PLUGIN)
    return path


def command(plugin: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "attnbench", "check", *arguments, "--plugin", str(plugin), "--threads", "1"]


def check(plugin: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with forks():
        return subprocess.run(
            command(plugin, *arguments), capture_output=True, encoding="utf-8", check=False, cwd=plugin.parent
        )


@pytest.mark.parametrize(
    ("name", "law", "reason"),
    [
        ("leaves", "shape and type", "exited with code 0"),
        ("leaves-early", "build", "exited with code 0"),
        ("ends-early", "build", "SystemExit: bye"),
        ("fails-early", "build", "RuntimeError: no such thing"),
        ("eats", "shape and type", "out of memory: needs another 191 MiB"),
        ("dies", "shape and type", "was killed by SIGSEGV"),
        ("hangs", "shape and type", "no answer within 1 s"),
    ],
)
def test_what_ends_or_stops_the_process_is_a_broken_law_with_its_reason(
    plugin: Path, name: str, law: str, reason: str
) -> None:
    done = check(plugin, name, "--no-time", "--memory-limit", "1GiB", "--timeout", "1" if name == "hangs" else "60")
    assert done.returncode == 1
    assert f"{name} breaks '{law}'" in done.stdout
    assert reason in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr == ""
    assert f"{name} is not what it says it is: 1 of " in done.stdout


def test_the_others_are_checked_all_the_same(plugin: Path) -> None:
    done = check(plugin, "leaves", "ends", "softmax", "--law", "formula", "--law", "batch", "--json")
    assert done.returncode == 1
    reports = {report["variant"]: report for report in json.loads(done.stdout)}
    assert [reports[name]["held"] for name in ("leaves", "ends", "softmax")] == [False, False, True]
    assert {finding["fault"] for finding in reports["ends"]["findings"]} == {"SystemExit"}


def test_what_was_found_of_a_variant_is_written_before_the_next_one_is_asked(plugin: Path) -> None:
    asked = command(plugin, "softmax", "waits", "--law", "batch", "--json", "--timeout", "30")
    with subprocess.Popen(asked, stdout=subprocess.PIPE, encoding="utf-8", cwd=plugin.parent) as process:
        assert process.stdout is not None
        written = ""
        while not written.endswith("\n  }") and (one := process.stdout.read(1)):
            written += one
        assert json.loads(written + "]")[0]["variant"] == "softmax"
        Path(f"{plugin}.go").touch()  # only now the second one goes on; without it its law is broken after 30 s
        whole = written + process.stdout.read()
    assert [(one["variant"], one["held"]) for one in json.loads(whole)] == [("softmax", True), ("waits", True)]
    assert whole == json.dumps(json.loads(whole), indent=2, ensure_ascii=False) + "\n"


def test_what_a_variant_or_a_library_says_is_not_shown(plugin: Path) -> None:
    done = check(plugin, "talks", "--law", "batch", "--law", "memory")
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert "printed" not in done.stdout


def test_ctrl_c_ends_it_at_once(plugin: Path) -> None:
    process = subprocess.Popen(
        command(plugin, "hangs"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=plugin.parent
    )
    deadline = time.monotonic() + 60
    while not (children := _children(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in out + err
    deadline = time.monotonic() + 30  # the last of them ends after the command, and a busy machine takes its time
    while any(Path("/proc", child, "cmdline").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _children(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        pytest.skip("the system does not list the children of a process")


@pytest.mark.usefixtures("forks")
def test_in_a_test_of_ones_own_a_variant_that_ends_python_is_a_fault(plugin: Path) -> None:
    code = (
        f"from attnbench.contract.plugins.discovery import load; load({os.fspath(plugin)!r})\n"
        "from attnbench.laws import check_variant\n"
        "report = check_variant('ends', laws=['formula', 'batch'])\n"
        "print(report.held, {finding.fault for finding in report.faults})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split(maxsplit=1) == ["False", "{'SystemExit'}\n"]
