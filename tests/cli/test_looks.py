"""What the terminal, the locale and the reader of a command decide: how it looks, and nothing else."""

from __future__ import annotations

import gc
import hashlib
import importlib
import io
import json
import locale
import os
import pty
import re
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from attnbench.cli.app import main
from attnbench.cli.screen import console
from attnbench.cli.show import as_data
from attnbench.contract.variant import VARIANTS
from attnbench.figures import figure_kinds
from attnbench.harness import runner
from attnbench.harness.compare import compare
from attnbench.harness.outside import isolation
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.laws import Finding
from attnbench.results.record import HELD
from attnbench.suite.cell import Cell
from tests.forked import load
from tests.instant import Instant, timed

pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")


class Worker(Instant):
    def __init__(self, settings: object, python: object = None) -> None:
        told = {"process_notes": ["a warning — with a dash"], "noise_floor": 0.0}
        self.state = super().start() | told

    def seconds_used(self) -> float:
        return 0.0

    def start(self) -> dict[str, Any]:
        return self.state

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"].endswith("HoldToLaw"):
            fault = "é — the output is not that of the formula" * (request["variant"] == "twice")
            return {"found": [asdict(Finding(request["law"], "n = 23", not fault, 0.5, 1.0, fault))]}
        if request["do"].endswith("TakeTurns"):
            cells = [Cell.from_json(cell) for cell in request["cells"]]
            times = [cell.shape.N * 1e-6 * (1 + i) for i, cell in enumerate(cells)]
            counts = {"disturbed": 0, "taken": 20, "stopped": 0, "others": None}
            return {"ran": list(range(len(cells))), "blocks": [times] * 20, "left_out": [], **counts}
        columns = {"time_ci_low_s": 1e-6, "time_ci_high_s": 3e-6, "examples_per_s": 5e5, "peak_bytes": 1024}
        return timed(Cell.from_json(request["cell"]), 0, (1e-6, 2e-6, 3e-6), **columns)


@dataclass
class Ended:
    code: int
    out: bytes
    err: bytes


@dataclass(frozen=True)
class Around:
    """How a command is called."""

    environment: tuple[tuple[str, str], ...] = ()
    encoding: str = "utf-8"
    terminal: bool = False
    locale: str = ""

    def call(self, arguments: list[str], folder: Path, *, reader: bool = True) -> Ended:
        """The command in a child process, which takes milliseconds where a new one would import torch."""
        said = folder / "stderr"
        reads, writes = pty.openpty() if self.terminal else os.pipe()
        pid = os.fork()
        if not pid:
            code = 99
            try:
                os.close(reads)
                os.dup2(writes, 1)
                os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
                code = self._child(arguments)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        os.close(writes)
        out = b""
        while reader:
            try:
                chunk = os.read(reads, 65536)
            except OSError:  # how a terminal says that it is over
                break
            if not chunk:
                break
            out += chunk
        os.close(reads)
        return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out, said.read_bytes())

    def _child(self, arguments: list[str]) -> int:
        for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
            os.environ.pop(name, None)
        os.environ |= {"COLUMNS": "80", "TERM": "xterm-256color", **dict(self.environment)}
        locale.setlocale(locale.LC_ALL, self.locale or None)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(number, "wb"), encoding=self.encoding, errors="strict") for number in (1, 2)
        )
        importlib.reload(console)
        code = main(arguments)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # as the interpreter does before it ends
        return code


PLAIN = Around()
OTHERS = {
    "no colour": Around((("NO_COLOR", "1"),)),
    "dumb": Around((("TERM", "dumb"),), terminal=True),
    "terminal": Around(terminal=True),
    "terminal without colour": Around((("NO_COLOR", "1"),), terminal=True),
    "C": Around((("LC_ALL", "C"),), encoding="ascii", locale="C"),
    "cp1252": Around(encoding="cp1252"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load()  # once, and not in every child, as what follows
    for entry in VARIANTS:
        as_data(entry)
    assert figure_kinds()  # whose modules are imported with it
    gc.freeze()  # else each child that measures looks for garbage in all that was imported
    path = tmp_path_factory.mktemp("looks")
    (path / "s.yaml").write_text(
        "name: s\ndescription: √n, é\nsweeps: [{name: w, matrix: {variant: [softmax, linear], seq_len: [64, 128]}}]\n",
        encoding="utf-8",
    )
    (path / "wrong.py").write_text(WRONG, encoding="utf-8")
    return path


WRONG = '''
import torch
from attnbench import register
from attnbench.contract.variant import Traits


@register("twice", family="reference", source="é", formula="mean(V)", cost="O(n·d)", traits=Traits(target="other"))
class Twice(torch.nn.Module):
    """Twice the mean — which is not what it says."""

    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        return 2 * v.mean(2, keepdim=True).expand_as(q)

    def dense(self, q, k, v, *, key_mask=None):
        return v.mean(2, keepdim=True).expand_as(q)
'''


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for module in (runner, isolation, compare):
        monkeypatch.setattr(module, "Worker", Worker)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    monkeypatch.setattr(runner, "load_warning", lambda: None)
    monkeypatch.chdir(folder)
    if not Path("results").exists():  # all that follow find the same
        assert PLAIN.call(COMMANDS["run"], folder).code == 0


COMMANDS = {
    "run": ["run", "s.yaml", "--device", "cpu", "--rounds", "1", "--memory-limit", "8GiB"],
    "plot": ["plot", "results", "--figure", "scaling", "--format", "svg"],
    "compare": ["compare", "softmax", "linear", "--n", "64..256", "--device", "cpu", "--csv", "compared.csv"],
    "check": ["check", "mean-value", "--law", "formula"],
    "list": ["list"],
    "show": ["show", "softmax"],
    "broken law": ["check", "twice", "--plugin", "wrong.py", "--law", "formula"],
    "mistake": ["run", "lar"],
}
CODES = {"broken law": 1, "mistake": 2}
AS_JSON = {
    "broken law": [*COMMANDS["broken law"], "--json"],
    "show": ["show", "softmax", "--json"],
    "list": ["list", "--json"],
    "compare": [*COMMANDS["compare"], "--json"],
}


def written(folder: Path) -> dict[str, str]:
    """What stands in the files that commands write; a lock is none."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("stderr", ".lock")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def text(ended: bytes, around: Around) -> str:
    """Without colours and a terminal's line ends."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ended.decode(around.encoding)).replace("\r\n", "\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_environment_and_terminal_change_nothing_but_the_looks(command: str, folder: Path) -> None:
    plain = PLAIN.call(COMMANDS[command], folder)
    assert plain.code == CODES.get(command, 0), plain.err.decode()
    files = written(folder)
    assert (b"\x1b" in plain.out + plain.err) is False
    for name, around in OTHERS.items():
        seen = around.call(COMMANDS[command], folder)
        assert seen.code == plain.code, (name, seen.err)
        for mine, theirs in ((seen.out, plain.out), (seen.err, plain.err)):
            shown = theirs.decode().encode(around.encoding, "replace").decode(around.encoding)
            assert text(mine, around) == shown, name
        if "NO_COLOR" in dict(around.environment) or not around.terminal:
            assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", seen.out + seen.err), name
        assert written(folder) == files, name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_who_has_gone_changes_neither_the_code_nor_the_files(command: str, folder: Path) -> None:
    plain = PLAIN.call(COMMANDS[command], folder)
    files = written(folder)
    alone = PLAIN.call(COMMANDS[command], folder, reader=False)
    assert (alone.code, alone.err) == (plain.code, plain.err)
    assert written(folder) == files


@pytest.mark.parametrize("command", AS_JSON)
def test_json_holds_the_same_in_every_encoding_and_a_reader_who_has_gone_is_no_error(
    command: str, folder: Path
) -> None:
    plain = PLAIN.call(AS_JSON[command], folder)
    for name, around in OTHERS.items():
        seen = around.call(AS_JSON[command], folder)
        assert json.loads(seen.out.decode(around.encoding)) == json.loads(plain.out), name
    alone = PLAIN.call(AS_JSON[command], folder, reader=False)
    assert (alone.code, alone.err) == (plain.code, plain.err)
