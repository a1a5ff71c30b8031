"""``attnbench check FILE.py:Class`` as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("forks")
MODULES = ROOT / "tests/laws/modules.py"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnbench", "check", *arguments, "--threads", "1"]
    environment = {"COLUMNS": "80", "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def plain(printed: list[str]) -> str:
    """Without the figures in brackets, which tell how far a machine looked."""
    return re.sub(r"\([^()]*\)", "", " ".join(" ".join(printed).split()))


@pytest.mark.parametrize(
    ("page", "module", "call", "label", "fault"),
    [
        ("check-linformer", "LinformerAttention", "x", "linformer", "linformer, which costs O(n·R·d)"),
        pytest.param(
            "check-lstm",
            "AttentionLSTM",
            "tokens",
            "softmax",
            "softmax; between tokens a recurrence of 32 numbers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "check-performer",
            "PerformerLM",
            "tokens",
            "performer",
            "performer, which costs O(n·R·d)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_module_that_is_not_what_it_is_said_to_be_is_exit_code_1_and_the_page_shows_why(
    page: str, module: str, call: str, label: str, fault: str
) -> None:
    asked = f"{module} --call {call} --as {label}"
    done = check(*f"tests/laws/modules.py:{asked}".split())
    assert done.returncode == 1, done.stderr
    assert f"it is said to be {fault}" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr
    command, *printed = (ROOT / f"docs/printed/{page}.txt").read_text(encoding="utf-8").splitlines()
    assert command == f"$ attnbench check tests/laws/modules.py:{asked}"
    assert plain(done.stdout.splitlines()) == plain(printed)


def test_a_name_is_a_question_and_no_claim() -> None:
    done = check(f"{MODULES}:PerformerLM", "--call", "tokens")
    assert done.returncode == 0, done.stderr
    assert "its cost grows as n²" in done.stdout
    assert "a name claims nothing; --as performer holds it to performer" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("module", "call"), [("LanguageModel", "tokens"), ("Pooled", "x")])
def test_how_to_call_it_is_found_out_and_said(module: str, call: str) -> None:
    done = check(f"{MODULES}:{module}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{MODULES}:{module}, called with {call}\n")


def test_json_holds_every_answer() -> None:
    done = check(f"{MODULES}:Pooled", "--call", "x", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["held"]
    assert data["answers"]["attention"].startswith("pooling")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((f"{MODULES}:Crossed",), "it is called with tokens or x alone, and its forward also needs memory"),
        ((f"{MODULES}:Pooled", "softmax", "--call", "x"), "one FILE.py:Class at a time"),
        (("softmax", "--call", "x"), "--call belongs to a module of a file"),
        ((f"{MODULES}:Pooled", "--call", "x", "--as", "perfomer"), "unknown variant 'perfomer'; did you mean"),
        ((f"{MODULES}:Pooled", "--call", "x", "--as", "local:windw=3"), "local: unknown option 'windw'; did you mean"),
        ((f"{MODULES}:Nothing", "--call", "x"), "no class 'Nothing'"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
