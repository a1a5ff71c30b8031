"""What a report takes from ``attnbench check --json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attnbench.answers.report.check_findings import read_laws, unchecked
from attnbench.errors import UsageError
from tests.answers.report.reading import Read, page_of, rows_of


def finding(law: str, *, held: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "law": law,
        "case": "defaults",
        "held": held,
        "number": 0.1,
        "bound": 1.0,
        "fault": "",
        "skipped": "",
        **more,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "laws.json"
    faults = [finding("formula", held=False, case=f"window={k}", fault="</script>no") for k in range(5)]
    path.write_text(
        json.dumps(
            [
                {"variant": "local", "held": False, "findings": [*faults, finding("causality")]},
                {"variant": "linear", "held": True, "findings": [finding("formula"), finding("rate", skipped="exact")]},
                {"variant": "fla", "unsupported": "needs a GPU"},
            ]
        )
    )
    return path


def test_laws_are_counted_without_those_that_were_skipped_and_faults_are_named(file: Path) -> None:
    local, linear, fla = read_laws(file)
    assert (local.laws, len(local.broken)) == (2, 1)
    assert (len(local.broken[0].faults), local.broken[0].more) == (3, 2)
    assert (linear.laws, linear.broken) == (1, ())
    assert fla.unsupported == "needs a GPU"
    assert unchecked([local, linear], ["local", "performer", "linear"]) == ["performer"]


def test_the_report_shows_them_and_which_variants_were_not_checked(file: Path) -> None:
    found = Read(page_of(rows_of("lra-cpu").head(30), laws=read_laws(file)))
    assert "window=0: </script>no" in found.text
    assert "1 of 2" in found.text
    assert "Not checked: softmax, sdpa, " in found.text
    untouched = Read(page_of(rows_of("lra-cpu").head(2).assign(variant=["none", "sdpa"]), laws=read_laws(file)))
    assert "Not checked: sdpa." in untouched.text


@pytest.mark.parametrize(
    "content",
    ["", "{", "1", "[1]", '[{"variant": 1}]', '[{"variant": "a"}]', '[{"variant": "a", "findings": [{"law": "b"}]}]',
     '[{"variant": "a", "findings": {"x": 1}}]', "[" * 100_000, '{"environment": {}, "rows": []}'],
    ids=range(10),
)  # fmt: skip
def test_any_other_file_is_one_line_with_the_command(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="not what attnbench check --json prints; write it with: attnbench check all"):
        read_laws(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--check .*: No such file or directory; write it with"):
        read_laws(tmp_path / "none.json")
