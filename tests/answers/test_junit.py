"""``--format junit`` is XML that those who read JUnit's accept: it is held to their schema, junit.xsd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.measure.status import Status
from tests.answers.fixture_runs import Row, environment, write_run

HOSTILE = 'a | b <script>alert("x")</script> & ]]> \x1b[2J \x00 \uffff \U0001f600'


@cache
def schema() -> Any:
    import xmlschema

    return xmlschema.XMLSchema10(Path(__file__).with_name("junit.xsd"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old run, and a new one in which cells are slower, broken, unsure, missing, new and the same."""
    folder = tmp_path_factory.mktemp("runs")
    old = [Row(n=n, error=0.5, error_std=0.01) for n in (64, 128, 256, 512)] + [Row("linear"), Row("linear", n=128)]
    new = [
        Row(n=64, seconds=1.3e-3, error=0.8, error_std=0.01),
        Row(n=128, status=Status.CRASH, reason=HOSTILE),
        old[2],
        replace(old[3], noise=0.2, drift=0.1),
        Row("linear"),
        Row("linear", n=1024),
    ]
    write_run(folder / "old", old)
    write_run(folder / "new", new, seed=1)
    write_run(folder / "elsewhere", old, about=environment(processor="Other"))
    return folder


@pytest.fixture
def printed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, Exit], str]:
    """What a command prints as JUnit's XML."""
    monkeypatch.chdir(runs)

    def xml(command: str, code: Exit) -> str:
        assert main([*command.split(), "--format", "junit"]) == code
        return capsys.readouterr().out

    return xml


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("gate new --against old", Exit.FAILED),
        ("gate new --against old --strict --missing fail", Exit.FAILED),
        ("gate new --against old -k linear --missing ignore", Exit.OK),
        ("gate elsewhere --against old --other-machine ratios", Exit.OK),
        ("diff old new", Exit.OK),
    ],
)
def test_what_is_printed_is_valid(command: str, code: Exit, printed: Callable[[str, Exit], str]) -> None:
    schema().validate(printed(command, code))


def _suite(root: Element) -> Element:
    (suite,) = root
    return suite


def _case(root: Element, inside: str) -> Element:
    return next(case for case in root.iter("testcase") if case.find(inside) is not None)


FAULTS: dict[str, Callable[[Element], object]] = {
    "a case without a name": lambda root: _case(root, "failure").attrib.pop("name"),
    "a case with an empty name": lambda root: _case(root, "failure").set("name", ""),
    "a case without a class": lambda root: _case(root, "failure").attrib.pop("classname"),
    "a case with an attribute that nobody reads": lambda root: _case(root, "failure").set("ratio", "1.3"),
    "a suite without a count": lambda root: _suite(root).attrib.pop("failures"),
    "a suite without a name": lambda root: _suite(root).attrib.pop("name"),
    "a count that is none": lambda root: _suite(root).set("skipped", "-1"),
    "a case that failed and was skipped": lambda root: _case(root, "failure").append(Element("skipped")),
    "a failure outside of any case": lambda root: _suite(root).append(Element("failure")),
    "two cases of one name": lambda root: _suite(root).append(_case(root, "failure")),
    "a case outside of any suite": lambda root: root.append(_case(root, "failure")),
    "another root": lambda root: setattr(root, "tag", "tests"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_schema_refuses(fault: str, printed: Callable[[str, Exit], str]) -> None:
    root = ElementTree.fromstring(printed("gate new --against old", Exit.FAILED))
    assert schema().is_valid(root)
    FAULTS[fault](root)
    assert not schema().is_valid(root)
