"""Suites made to do harm end at once: one line, exit code 2, little memory, and nothing on the disk."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import attnbench.harness.plan  # imported here, so that the first test is not the one that waits for it
from attnbench.cli.app import main
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import AttnbenchError
from attnbench.results.read import read_results
from attnbench.results.store import RECORDS, SAMPLES, RunFolder
from attnbench.suite.load import load_suite

BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
NAMED = "name: {}\nsweeps: [{{name: w, matrix: {{variant: softmax, seq_len: 4}}}}]\n"
GRID = "name: x\nsweeps: [{{name: w, matrix: {{variant: softmax, {}}}}}]\n"


SECONDS = float(os.environ.get("ATTNBENCH_SECONDS", "4"))
"""Processor time that the whole command may take: 1 in make selfcheck, more if other programs fill the caches."""
MANY = "name: x\nsweeps:\n" + "- {name: w, matrix: {variant: a, seq_len: 1..9999+1, heads: 1..9999+1}}\n" * 400

SWEEP = "- {{name: w{}, matrix: {{variant: a, seq_len: 4}}}}\n"

LARGE = [
    (None, "s.yaml: larger than 256 KiB"),
    ("a: " + "[" * 2000, "s.yaml:1: nested more than 50 levels deep"),
    ("a: " + "{a: " * 2000, "s.yaml:1: nested more than 50 levels deep"),
    (BOMB, "s.yaml:1: anchor &a0 is not allowed"),
    ("a: !!python/object/apply:os.system [touch harm]", "s.yaml:1: tag tag:yaml.org,2002:python"),
    (GRID.format("seq_len: 1..1000+1, heads: 1..1000+1, batch: 1..1000+1"), "s.yaml:2: 1000000000 cells, at most"),
    (GRID.format("seq_len: 1..1000000000000+1"), "s.yaml:2: 'seq_len': 1000000000000 values on one axis"),
    (MANY, "s.yaml:8: more than 100000 values in one suite"),
    (
        NAMED.format("x") + "exclude:\n" + "- {seq_len: [" + "1..9999+1," * 900 + "]}\n",
        "s.yaml:4: more than 100000",
    ),
    (GRID.format("seq_len: " + "1" * 250_000 + "x"), "s.yaml:2: 'seq_len' must be whole numbers"),
    (NAMED.format("x" * 250_000), "s.yaml:1: 'name': 'xxxxx"),
    ("# " + "x" * 250_000 + "\n" + NAMED.format("con"), "s.yaml:2: 'name': 'con' is a device on Windows"),
    (
        "name: x\nsweeps:\n" + "".join(map(SWEEP.format, range(420))) + "include:\n" + "- {}\n" * 250,
        "s.yaml:82: 20001 cells, at most",
    ),
    ("name: x\nsweeps:\n" + "".join(map(SWEEP.format, range(1000))), "s.yaml:558: more than 5000 keys"),
    ("".join(f"a{i}:\n" for i in range(2_490)), "s.yaml:1: 'name' is missing"),
]
COSTLY = [LARGE[0], LARGE[3], LARGE[7], LARGE[12]]
"""A whole command for each: too long a file, one that grows by itself, most values, most cells."""
ODD = [
    (GRID.format("seq_len: .nan"), "s.yaml:2: .nan is not a finite number"),
    (GRID.format("seq_len: 010"), "s.yaml:2: 'seq_len'"),
    (GRID.format("seq_len: 12:30"), "s.yaml:2: 'seq_len'"),
    (GRID.format("seq_len: 8, causal: no"), "s.yaml:2: 'causal' cannot be 'no'; write true or false"),
    (NAMED.format("../harm"), "s.yaml:1: 'name': '../harm' is not a name"),
    (NAMED.format("/tmp/harm"), "s.yaml:1: 'name': '/tmp/harm' is not a name"),
    (NAMED.format(".."), "s.yaml:1: 'name': '..' is not a name"),
    (NAMED.format("'a\\b'"), "s.yaml:1: 'name': 'a\\\\b' is not a name"),
    (NAMED.format('"a\\0"'), "s.yaml:1: 'name': 'a\\x00' is not a name"),
    *(
        (NAMED.format(name), f"s.yaml:1: 'name': '{name}' is a device on Windows")
        for name in ("com1", "Aux.txt", "LPT9")
    ),
    (NAMED.format("'a '"), "s.yaml:1: 'name': 'a ' is not a name"),
    (NAMED.format("a."), "s.yaml:1: 'name': 'a.' ends in a dot, which Windows drops"),
    (GRID.replace("name: w", "name: nul").format("seq_len: 4"), "s.yaml:2: 'name': 'nul' is a device on Windows"),
    (GRID.format("seq_len: 4") + GRID.format("seq_len: 4")[8:], "s.yaml:3: key 'sweeps' is given twice"),
    (
        GRID.format("seq_len: 4").replace("]", ", {name: W, matrix: {variant: a, seq_len: 4}}]"),
        "s.yaml:2: two sweeps are",
    ),
]


def name(value: object) -> str:
    return value[:30] if isinstance(value, str) and value.startswith("s.yaml") else ""


def write(text: str | None) -> None:
    with Path("s.yaml").open("wb") as file:
        if text is None:
            file.truncate(2**30)
        else:
            file.write(text.encode())


@pytest.mark.parametrize(("text", "said"), LARGE + ODD, ids=name)
def test_a_hostile_suite_is_one_line_in_no_time(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(text)
    started = time.process_time()
    code = main(["run", "s.yaml", "--device", "cpu"])
    seconds = time.process_time() - started
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith(f"error: {said}"), err
    assert err.count("\n") == 1
    assert ";" in err  # the remedy
    assert seconds < 1
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


LAUNCHER = """
import json, os, subprocess, sys
process = subprocess.Popen([sys.executable, "-m", "attnbench", *sys.argv[1:]], stderr=subprocess.PIPE, text=True)
said = process.stderr.read()
_, status, used = os.wait4(process.pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), said, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime]))
"""
"""Asks the kernel what the command took. What starts a process counts for it at first, so this one is small."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss in KiB")
@pytest.mark.parametrize(
    ("text", "said"),
    [case if case in COSTLY else pytest.param(*case, marks=pytest.mark.slow) for case in LARGE],
    ids=name,
)
def test_the_whole_command_takes_less_than_200_mb_to_refuse_it(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(text)
    done = subprocess.run([sys.executable, "-c", LAUNCHER, "run", "s.yaml"], capture_output=True, text=True, check=True)
    code, err, taken, seconds = json.loads(done.stdout)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {said}")
    assert taken < 200e6
    assert seconds < SECONDS


def test_nothing_is_read_in_a_way_that_could_run_it() -> None:
    unsafe = re.compile(
        r"\b(c?pickle|read_pickle|marshal|shelve|dill|joblib)\b|torch\.load\b|np\.load\b"
        r"|yaml\.(load|unsafe_load)\b|(?<![.\w])(eval|exec)\("
    )
    sources = sorted(Path(attnbench.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    found = {str(path): unsafe.findall(path.read_text(encoding="utf-8")) for path in sources}
    assert {path: words for path, words in found.items() if words} == {}


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harm"),)


def test_a_pickle_is_refused_wherever_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"q": Bomb()}, "zipped")
    for content in (pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=0), Path("zipped").read_bytes()):
        for file in ("s.yaml", "results.csv", RECORDS, SAMPLES, "qkv.pt"):
            Path(file).write_bytes(content)
        for read in (
            lambda: load_suite("s.yaml"),
            lambda: read_results("results.csv"),
            lambda: RunFolder(tmp_path).records(),
            lambda: RunFolder(tmp_path).samples(),
            lambda: draw_qkv(Spec("file", (("path", "qkv.pt"),)), Shape(), 0),
        ):
            with pytest.raises(AttnbenchError):
                read()
    assert not Path("harm").exists()
    pickle.loads(pickle.dumps(Bomb()))
    assert Path("harm").exists()  # it would have worked
