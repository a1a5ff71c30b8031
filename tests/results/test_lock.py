from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnbench.errors import CannotCreate, Locked
from attnbench.results.lock import held


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path: Path) -> None:
    root = os.geteuid() == 0
    tmp_path.chmod(0)
    if root:  # who may enter any
        os.seteuid(65534)
    try:
        with pytest.raises(CannotCreate, match=r"cannot write .*: Permission denied"), held(tmp_path):
            pass
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_who_holds_it_is_named_and_what_a_killed_process_left_does_not_count(tmp_path: Path) -> None:
    (tmp_path / ".writer").write_text("process 1, since long ago\n")
    with held(tmp_path):
        with pytest.raises(Locked, match=rf"another attnbench run \(process {os.getpid()}, since 20"), held(tmp_path):
            pass
        with held(tmp_path, ".other."):
            pass
    with held(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".other.lock"]


def test_a_link_is_refused_and_not_written_through(tmp_path: Path) -> None:
    for name in (".lock", ".writer"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
        with pytest.raises(CannotCreate), held(tmp_path):
            pass
        (tmp_path / name).unlink()
    assert not (tmp_path / "mine").exists()
