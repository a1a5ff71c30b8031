from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock
from matplotlib.figure import Figure

from attnbench.errors import CannotCreate, Exit, StoreError
from attnbench.figures.kit.style import save
from attnbench.figures.pictures.picture import Picture, write_numbers
from attnbench.files import OF_A_RUN, cache_folder, make_folder, replace_file, write_output
from attnbench.results.lock import held
from attnbench.results.store import ENVIRONMENT, FILES, OLD, SUITE, TABLE, RunFolder


def test_a_reader_sees_the_whole_old_text_or_the_whole_new_one(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    replace_file(path, "old")
    with path.open() as reader:
        replace_file(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]


def test_a_text_that_cannot_be_put_in_place_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.csv"
    replace_file(path, "old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]


def test_a_new_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from attnbench.files import replace_file; os.umask(0o027)"
    code += "; replace_file(Path(sys.argv[1]), 'x')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], check=True)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640


def test_what_the_user_asked_for_also_goes_to_a_pipe_but_not_through_a_link(tmp_path: Path) -> None:
    code = "from pathlib import Path; from attnbench.files import write_output"
    code += "; write_output(Path('/dev/stdout'), 'a,b\\n')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"a,b\n"
    (tmp_path / "kept").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    with (tmp_path / "read").open("wb") as read:  # /dev/stdout is then a link to a file
        subprocess.run([sys.executable, "-c", code], stdout=read, check=True)
    assert (tmp_path / "read").read_bytes() == b"a,b\n"
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for link in ("link", "dangling"):
        with pytest.raises(CannotCreate, match="is a link"):
            write_output(tmp_path / link, b"new")
    assert (tmp_path / "kept").read_text() == "old"
    assert not (tmp_path / "nowhere").exists()


def test_nothing_but_the_run_writes_the_files_of_a_run(tmp_path: Path) -> None:
    assert set(OF_A_RUN) == {*FILES, TABLE, ENVIRONMENT, SUITE, OLD, "swap.csv"}
    for mark in ("records.jsonl", "environment.json"):
        run = tmp_path / mark.partition(".")[0]
        run.mkdir()
        (run / mark).write_text("{}\n")
        for name in OF_A_RUN:
            with pytest.raises(CannotCreate, match=f"{name} belongs to the run in {run}"):
                write_output(run / name, "x")
        assert [file.name for file in run.iterdir()] == [mark]
        write_output(run / "report.html", "x")
    write_output(tmp_path / "results.csv", "x")  # in no run


def test_a_pipe_that_nobody_reads_is_refused_at_once_and_one_that_is_read_takes_much(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CannotCreate, match="nobody reads from this pipe"):
        write_output(pipe, "x")
    content = b"x" * 2**20  # more than a pipe holds
    with (tmp_path / "read").open("wb") as copy, subprocess.Popen(["cat", str(pipe)], stdout=copy) as reader:
        while True:
            try:
                write_output(pipe, content)
                break
            except CannotCreate:  # cat has not opened it yet
                assert reader.poll() is None
    assert (tmp_path / "read").read_bytes() == content


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CannotCreate, match=r"cannot write .*: No such file or directory"):
        write_output(tmp_path / "missing" / "table.csv", "")


def test_a_full_disk_has_one_code_whatever_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for of, does in ((Path, "replace"), (Path, "mkdir"), (FileLock, "acquire")):
        monkeypatch.setattr(of, does, _full)
    numbers = Picture(Figure(), pd.DataFrame({"n": [1]}))
    for write in (
        lambda path: write_output(path, "a report"),
        lambda path: save(Figure(), path),
        lambda path: write_numbers(numbers, path),
        make_folder,
        lambda path: RunFolder.create(path, environment={}, suite_text=""),
        lambda path: held(path.parent).__enter__(),
    ):
        with pytest.raises(StoreError, match="No space left on device; make room") as refused:
            write(tmp_path / "file")
        assert refused.value.exit_code == Exit.IO


def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure()
    (file,) = save(figure, tmp_path / "figure", ("svg",))
    old = file.read_bytes()
    monkeypatch.setattr(Figure, "savefig", lambda self, target, **options: target.write(b"half"))
    monkeypatch.setattr(Path, "replace", _full)
    with pytest.raises(StoreError, match=r"cannot write .*; make room"):
        save(figure, tmp_path / "figure", ("svg",))
    assert file.read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["figure.svg"]


def _full(*what: object, **how: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_is_kept_lies_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    for chosen, folder in (("/fast", "/fast"), ("", "/home/ann/.cache"), ("relative", "/home/ann/.cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
        assert cache_folder() == Path(folder, "attnbench")
