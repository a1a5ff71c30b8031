"""The public packages that ``check`` is asked about: each has a right answer, and a wrong one shows."""

from __future__ import annotations

import inspect
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import packages

Said = Callable[..., None]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    def says(stdout: str = "", stderr: str = "", **parts: Any) -> None:
        out = stdout or json.dumps({"broken": [], "answers": {}, **parts})
        done = subprocess.CompletedProcess[str]([], 0, out, stderr)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    monkeypatch.setattr(packages, "version", lambda package: "1.0")
    monkeypatch.setattr(packages, "FILE", tmp_path / "packages.csv")
    return says


def test_every_module_has_a_right_answer() -> None:
    made = {
        name
        for name, one in vars(packages).items()
        if inspect.isfunction(one) and "nn.Module" in str(one.__annotations__.get("return"))
    }
    assert made == set(packages.EXPECTED)
    assert len(made) >= 28
    assert all(one.answers for one in packages.EXPECTED.values())


def test_what_is_right_and_what_is_not(said: Said) -> None:
    right = {"attention": "none: a recurrence", "between tokens": "about 64 numbers", "cost": "its cost grows as n"}
    right["reads"] = "each output depends on its token and all earlier ones"
    said(answers=right)
    assert packages.asked("min_gru").right == "yes"
    said(answers=right | {"cost": "its cost grows as n²: memory"})
    assert packages.asked("min_gru").right == "cost: its cost grows as n²: memory"
    said(answers=right, broken=["it is said to be softmax; nothing grows as n²"])
    assert packages.asked("min_gru").right == "it is accused: it is said to be softmax; nothing grows as n²"
    said(stdout="no json", stderr="warning\nerror: it raises ValueError")
    assert packages.asked("min_gru").right.startswith("error: it raises ValueError; attention: no answer")


def test_a_row_takes_the_place_of_the_one_before(said: Said) -> None:
    said(answers={"attention": "before"})
    packages.write([packages.asked("min_gru"), packages.asked("performer_pytorch")])
    said(answers={"attention": "after"})
    packages.write([packages.asked("min_gru")])
    assert [(one.name, one.attention) for one in packages.read()] == [
        ("performer_pytorch", "before"),
        ("min_gru", "after"),
    ]


def test_the_committed_rows_are_of_these_packages_and_accuse_none() -> None:
    rows = packages.read()
    assert {one.name for one in rows} <= set(packages.EXPECTED)
    assert [one.name for one in rows if "accused" in one.right] == []
