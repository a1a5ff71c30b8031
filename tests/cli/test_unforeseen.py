"""An unforeseen error is one line and a file; what a library prints of itself is not shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.text import without_secrets


def test_an_error_that_nobody_foresaw_is_one_line_and_its_traceback_a_file_without_a_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken() -> None:
        raise RuntimeError(f"nobody thought of {tmp_path}/secret")

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("attnbench.cli.env._versions", broken)
    assert main(["env"]) == Exit.FAILED
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    found = re.search(r"unforeseen error: RuntimeError: .*; please send (\S+), its traceback", error)
    assert found
    written = Path(found[1])
    assert "in broken" in written.read_text()
    assert "thought of ~/secret" in written.read_text()
    assert str(tmp_path) not in written.read_text()
    written.unlink()


def test_an_address_space_that_is_large_enough_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ImportError("no such library")

    monkeypatch.setattr("attnbench.cli.env._versions", broken)
    for allowed, said in ((2**40, "unforeseen error: ImportError: no such library"), (2**30, "ulimit -v of 1.00 GiB")):
        monkeypatch.setattr("attnbench.harness.wire.process.allowed_address_space", lambda allowed=allowed: allowed)
        assert main(["env"]) != Exit.OK
        assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/ann/x", "~/x"),
        ("'/home/ann'", "'~'"),
        ("/home/anna/x", "/home/anna/x"),
        ("/home/ann.old", "/home/ann.old"),
        ("/home/ann-2/x:/home/ann/y", "/home/ann-2/x:~/y"),
        ("no http://ann:open@host/x", "no http://***@host/x"),
        ("api_key = abcdefgh, the next", "api_key = ***, the next"),
        ("the last token: 17", "the last token: 17"),
        ("a task-0123456789abc of hf_abcdefghijklmn", "a task-0123456789abc of ***"),
    ],
)
def test_homes_and_secrets_are_replaced_and_nothing_else(text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert without_secrets(text) == told


def test_no_setting_for_windows_and_no_home_without_rights_says_a_word_beside_a_figure(tmp_path: Path) -> None:
    # A file is no folder for anybody, root included.
    (tmp_path / "home").write_text("")
    variables = {**os.environ, "MPLBACKEND": "nonsense", "HOME": str(tmp_path / "home")}
    variables = {name: text for name, text in variables.items() if name not in ("MPLCONFIGDIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-m", "attnbench", "plot", "weights", "softmax", "--n", "8", "--out", str(tmp_path / "f")],
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (Exit.OK, "")
