"""Ctrl-C in check keeps what was found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attnbench.cli.app import _Interrupted, main
from attnbench.errors import Exit
from attnbench.harness.outside.law_requests import HoldToLaw
from attnbench.laws import Finding, laws_named


def stop_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(self: HoldToLaw, *_: Any) -> list[Finding]:
        asked.append(self.law)
        if len(asked) == number:
            raise _Interrupted
        return [Finding(self.law, "everywhere", True, number=0.125, bound=1.0)]

    monkeypatch.setattr(HoldToLaw, "ask", ask)


@pytest.mark.parametrize(
    ("variants", "number", "said"),
    [
        (["softmax"], 3, ["0.125", "stopped: the laws after these were not tried"]),
        (["softmax", "linear", "performer"], 120, ["softmax", "linear"]),
    ],
)
def test_what_was_found_before_a_stop_is_printed(
    variants: list[str],
    number: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop_at(number, monkeypatch)
    assert main(["check", *variants]) == Exit.INTERRUPTED
    out = capsys.readouterr()
    for words in said:
        assert words in out.out
    assert "is what it says it is" not in out.out
    assert (f"of {len(variants)} variants were looked at" in out.err) == (len(variants) > 1)


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_stop_after_the_last_law_leaves_the_whole_report_once(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*_: object) -> None:
        raise _Interrupted

    stop_at(0, monkeypatch)
    monkeypatch.setattr("attnbench.cli.check._own_errors", pressed)
    assert main(["check", "softmax", *["--json"] * (form == "json")]) == Exit.INTERRUPTED
    out = capsys.readouterr().out
    if form == "json":
        (report,) = json.loads(out)
        assert report["held"]
        return
    assert out.count("softmax, in 1 setting") == 1
    assert "softmax is what it says it is" in out
    assert "were not tried" not in out


def test_a_stop_at_a_variant_with_options_keeps_what_was_found_of_its_growth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    laws = laws_named(None)
    monkeypatch.setattr("attnbench.laws.laws_named", lambda names, *, time: [*laws, "formula"])
    stop_at(len(laws) + 1, monkeypatch)
    assert main(["check", "performer:features=8"]) == Exit.INTERRUPTED
    assert "claimed: time n^1" in capsys.readouterr().out


def test_a_stop_before_anything_was_found_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(1, monkeypatch)
    assert main(["check", "softmax"]) == Exit.INTERRUPTED
    assert capsys.readouterr().out == ""
