"""The index of the catalogue is that of the code, what reads it needs no torch, and without it all goes as before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnbench.contract import index
from attnbench.contract.registry import Registry
from attnbench.errors import UsageError
from tests.docs.index import facts, text

MAIN = "from attnbench.cli.app import main; sys.exit(main())"
WITHOUT_TORCH = f"import sys; sys.modules['torch'] = None; {MAIN}"
FROM_THE_CODE = f"import sys; from attnbench.contract import index; index.code = lambda: 'other'; {MAIN}"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "ATTNBENCH_PLUGINS": ""}


def test_the_index_is_that_of_the_code() -> None:
    assert index.FILE.read_text(encoding="utf-8") == text(facts()), "write it anew: python -m tests.docs.index"


def answered(words: str, code: str = WITHOUT_TORCH) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words.split()]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        "list",
        "list --json",
        "list inputs",
        "list tasks",
        "show performer",
        "show kda --json",
        "show listops",
        "show stack",
    ],
)
def test_what_is_read_from_the_index_is_what_the_code_says(words: str) -> None:
    fast, slow = answered(words), answered(words, FROM_THE_CODE)
    assert fast.returncode == 0, fast.stderr
    assert fast.stdout == slow.stdout != ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("show perfomer", "performer"),
        ("compare perfomer", "performer"),
        ("best --shape llama3-8b -v perfomer", "performer"),
        ("match perfomer --error 0.1", "performer"),
        ("check perfomer", "performer"),
        ("score perfomer", "performer"),
        ("run quik", "quick"),
    ],
)
def test_a_typo_is_answered_without_torch(words: str, meant: str) -> None:
    found = answered(words)
    assert found.returncode == 2
    assert f"did you mean {meant!r}?" in found.stderr


def test_an_index_of_other_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "installed", lambda: ())
    for digest, there in ((index.read()["code"]["digest"]["sha256"], True), ("of older code", False)):
        index.shipped.cache_clear()
        monkeypatch.setattr(index, "code", lambda digest=digest: digest)
        assert ("variant" in index.shipped()) is there
    index.shipped.cache_clear()


def test_a_name_that_only_a_plug_in_could_have_is_unknown_without_an_import() -> None:
    table = Registry[Any]("variant", home="attnbench.catalogue.attention")
    with pytest.raises(UsageError, match="did you mean 'softmax'"):
        table.get("sofmax")
    assert "stack" in table
    assert not table._entries
