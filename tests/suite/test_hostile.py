"""Suites made to do harm end at once: one line, exit code 2, little memory, and nothing on the disk."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import pytest

import attnbench.attention
import attnbench.inputs
import attnbench.run.plan  # imported here, so that the first test is not the one that waits for it
from attnbench.cli.app import main

BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
NAMED = "name: {}\nsweeps: [{{name: w, matrix: {{variant: softmax, seq_len: 4}}}}]\n"
GRID = "name: x\nsweeps: [{{name: w, matrix: {{variant: softmax, {}}}}}]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "s.yaml:1: larger than 1 MiB"),
        ("a: " + "[" * 2000, "s.yaml:1: nested more than 50 levels deep"),
        ("a: " + "{a: " * 2000, "s.yaml:1: nested more than 50 levels deep"),
        (BOMB, "s.yaml:1: anchor &a0 is not allowed"),
        ("a: !!python/object/apply:os.system [touch harm]", "s.yaml:1: tag tag:yaml.org,2002:python"),
        (GRID.format("seq_len: 1..1000+1, heads: 1..1000+1, batch: 1..1000+1"), "s.yaml:2: 1000000000 cells, at most"),
        (GRID.format("seq_len: 1..1000000000000+1"), "s.yaml:2: 'seq_len': 1000000000000 values on one axis"),
        (GRID.format("seq_len: .nan"), "s.yaml:2: .nan is not a finite number"),
        (GRID.format("seq_len: 010"), "s.yaml:2: 'seq_len'"),
        (GRID.format("seq_len: 12:30"), "s.yaml:2: 'seq_len'"),
        (GRID.format("seq_len: 8, causal: no"), "s.yaml:2: 'causal' must be true or false, got 'no'"),
        (NAMED.format("../harm"), "s.yaml:1: 'name': '../harm' is not a name"),
        (NAMED.format("/tmp/harm"), "s.yaml:1: 'name': '/tmp/harm' is not a name"),
        (NAMED.format(".."), "s.yaml:1: 'name': '..' is not a name"),
        (NAMED.format("'a\\b'"), "s.yaml:1: 'name': 'a\\\\b' is not a name"),
        (NAMED.format('"a\\0"'), "s.yaml:1: 'name': 'a\\x00' is not a name"),
        (NAMED.format("com1"), "s.yaml:1: 'name': 'com1' is a device on Windows"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) and value.startswith("s.yaml") else "",
)
def test_a_hostile_suite_is_one_line_in_no_time(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("s.yaml").open("wb") as file:
        if text is None:
            file.truncate(2**30)
        else:
            file.write(text.encode())
    started = time.process_time()
    code = main(["run", "s.yaml", "--device", "cpu"])
    seconds = time.process_time() - started
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith(f"error: {said}"), err
    assert err.count("\n") == 1
    assert ";" in err  # the remedy
    assert seconds < 1
    tracemalloc.start()  # not above, for it takes ten times as long
    main(["run", "s.yaml", "--device", "cpu"])
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_nothing_is_read_in_a_way_that_could_run_it() -> None:
    unsafe = re.compile(
        r"\b(c?pickle|marshal|shelve|dill|joblib)\b|torch\.load\b|np\.load\b|yaml\.(load|unsafe_load)\b"
    )
    sources = sorted(Path(attnbench.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    found = {str(path): unsafe.findall(path.read_text(encoding="utf-8")) for path in sources}
    assert {path: words for path, words in found.items() if words} == {}
