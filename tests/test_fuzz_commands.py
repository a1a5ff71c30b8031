"""Whatever a suite, a word, a table or a stopped run holds: the command ends in data or in one line, with a known code,
and writes nowhere but into its results folder."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import attnbench.figures
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import CorruptResults, Exit
from attnbench.harness import runner
from attnbench.harness.outside.visit import HoldSetting, Verdict
from attnbench.harness.plan import Options, Plan, make_plan
from attnbench.measure.machine import id_of
from attnbench.measure.status import Status
from attnbench.results.audit import audit
from attnbench.results.record import HELD, Record
from attnbench.results.store import ENVIRONMENT, RECORDS, SAMPLES, SUITE, TABLE, RunFolder
from attnbench.results.table import read_table
from attnbench.suite.cell import Cell
from tests.instant import Instant

CASES = int(os.environ.get("ATTNBENCH_CASES", "40"))
"""20000 in make selfcheck."""

cases = settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=10_000)
some_cases = settings(cases, max_examples=max(CASES // 10, 12))
"""Reading a command line takes far longer than what is tried here."""

GOOD = """\
name: s
sweeps:
- {name: w, level: operator, measure: [time], matrix: {variant: [softmax, 'performer:features=8'], seq_len: 2..4}}
profiles: {cuda: {batch: 32}}
exclude: [{variant: softmax, seq_len: ">=4"}]
"""
PIECES = st.sampled_from(
    [b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"]", b": ", b"- ", b"&a ", b"*a", b"!!str ", b"NaN", b".nan", b"1e999",
     b"null", b"true", b"\x00", b"\x1b[2J", b"\xff", b",,", b"../", b"/", b"=1", b"1..9999999+1", b"con", b"performer"]
)  # fmt: skip
WORDS = ["softmax", "performer", "features", "kernel", "relu", "8", "2..4", "0", "1e-6", "010", "no", "12:30", ".nan"]
TEXTS = st.lists(st.sampled_from([*WORDS, *":,=[]+-. /\\\n\x1b'\"é"])).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"])
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    content = whole
    for _ in range(draw(st.integers(1, 3))):
        at, cut = draw(st.integers(0, len(content))), draw(st.integers(0, 30))
        content = content[:at] + draw(PIECES | st.binary(max_size=4)) + content[at + cut :]
    return content


class Worker(Instant):
    def start(self) -> dict[str, Any]:
        facts = {"torch": "2"}
        return super().start() | {"machine_id": id_of(facts), "environment": facts}


@pytest.fixture(autouse=True)
def _beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in with one beside it, no process that measures, no waiting for the disk."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(runner, "Worker", Worker)
    monkeypatch.setattr(HoldSetting, "ask", lambda *_, **__: Verdict(HELD))
    monkeypatch.setattr(runner, "load_warning", lambda: None)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused_or_done(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Exit:
    code = Exit(main(arguments))
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if code is not Exit.OK:
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert said[:-1].isprintable()
    return code


def nothing_selected(*more: str) -> list[str]:
    """A command that reads and checks all there is to a suite and then has nothing to do."""
    return ["run", "s.yaml", "--dry-run", "--device", "cpu", "-k", "no-such-cell", *more]


@some_cases
@given(damaged(GOOD.encode()))
def test_a_damaged_suite_ends_the_command_with_code_2(capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    Path("s.yaml").write_bytes(content)
    assert refused_or_done(nothing_selected(), capsys) is Exit.USAGE
    assert set(files(Path.cwd().parent)) == {"work/s.yaml"}


@some_cases
@given(st.sampled_from(["variant", "seq_len", "inputs", "causal", "seed"]), TEXTS)
@example("variant", "performer:" + ",".join(f"o{i}=[1,2,3,4,5,6,7,8,9]" for i in range(30)))
@example("variant", "performer:" + "," * 100_000)
@example("variant", "[" * 100_000)
@example("seq_len", "1" * 100_000 + "x")
@example("seq_len", "1..999999999999+1")
def test_any_value_of_an_axis_ends_the_command_with_code_2(
    capsys: pytest.CaptureFixture[str], axis: str, text: str
) -> None:
    Path("s.yaml").write_text(GOOD)
    assert refused_or_done(nothing_selected("--set", f"{axis}={text}"), capsys) is Exit.USAGE
    assert set(files(Path.cwd().parent)) == {"work/s.yaml"}


@some_cases
@given(TEXTS)
def test_any_name_of_a_suite_ends_the_command_with_code_2(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert (
        refused_or_done(["run", "--dry-run", "--device", "cpu", "-k", "no-such-cell", "--", text], capsys) is Exit.USAGE
    )
    assert files(Path.cwd().parent) == {}


def table() -> bytes:
    row = Record.of(Cell("s", "w", Spec("softmax"), Shape(seq_len=2)), Status.OK, time_median_s=0.1, cosine=-0.5)
    RunFolder(Path.cwd()).write_csv([row, row])
    return Path(TABLE).read_bytes()


@some_cases
@given(data=st.data())
def test_a_damaged_table_is_drawn_or_ends_the_command_in_one_line(
    data: st.DataObject, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attnbench.figures, "draw_all", lambda *args, **options: [])
    Path(TABLE).write_bytes(data.draw(damaged(table())))
    assert refused_or_done(["plot", TABLE], capsys) in (Exit.OK, Exit.USAGE)
    assert set(files(Path.cwd().parent)) == {f"work/{TABLE}"}


@some_cases
@given(data=st.data())
def test_a_damaged_table_is_reported_or_ends_the_command_in_one_line(
    data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(TABLE).write_bytes(data.draw(damaged(table())))
    code = refused_or_done(["report", TABLE, "--out", "report.html"], capsys)
    assert code in (Exit.OK, Exit.USAGE)
    assert set(files(Path.cwd().parent)) == {f"work/{TABLE}", *(["work/report.html"] if code == Exit.OK else [])}
    Path("report.html").unlink(missing_ok=True)


@dataclass
class Finished:
    """A run of which every file is known."""

    plan: Plan
    folder: Path
    files: dict[str, bytes]

    def restore(self) -> None:
        shutil.rmtree("out")
        self.folder.mkdir(parents=True)
        for name, content in self.files.items():
            (self.folder / name).write_bytes(content)


@pytest.fixture
def finished(_beside: None) -> Finished:
    Path("s.yaml").write_text(GOOD)
    plan = make_plan("s.yaml", Options(device="cpu", out=Path("out"), rounds=1, threads=1))
    folder, _ = runner.execute(plan)
    return Finished(plan, folder.path, files(folder.path))


@cases
@given(name=st.sampled_from([RECORDS, SAMPLES, ENVIRONMENT, SUITE, TABLE]), data=st.data())
def test_a_run_goes_on_from_any_damage_to_all_its_cells_or_leaves_it_as_it_is(
    finished: Finished, name: str, data: st.DataObject
) -> None:
    finished.restore()
    file = finished.folder / name
    content = data.draw(damaged(finished.files[name]))
    file.write_bytes(content)
    refused: CorruptResults | None = None
    try:
        again, rows = runner.execute(finished.plan)
    except CorruptResults as error:
        refused = error
    if refused:
        assert refused.exit_code is Exit.CORRUPT
        assert str(refused).startswith(f"{file}:")
        assert str(refused).isprintable()
        assert file.read_bytes() in (content, content[: content.rfind(b"\n") + 1])  # a torn last line may be gone
    else:
        assert [row.cell_id for row in rows] == [cell.cell_id for cell in finished.plan.cells]
        assert again.path.parent == finished.folder.parent
        assert len((again.path / TABLE).read_text(encoding="utf-8").splitlines()) == len(rows) + 1
    outside = [path for path in files(Path.cwd().parent) if not path.startswith("work/out/s/")]
    assert sorted(outside) == ["work/out/.lock", "work/s.yaml"]
    allowed = {RECORDS, SAMPLES, ENVIRONMENT, SUITE, TABLE, ".lock"}
    assert {path.name for path in Path("out").rglob("*") if path.is_file()} <= allowed


@cases
@given(name=st.sampled_from([RECORDS, SAMPLES, ENVIRONMENT, SUITE, TABLE]), data=st.data())
def test_verify_finds_any_damage_that_changes_what_a_file_says(
    finished: Finished, name: str, data: st.DataObject
) -> None:
    finished.restore()
    content = data.draw(damaged(finished.files[name]))
    (finished.folder / name).write_bytes(content)
    found = audit(finished.folder)
    assert all(line.isprintable() for line in found.findings)
    assert found.findings or says(name, content) == says(name, finished.files[name])
    finished.restore()
    assert audit(finished.folder).findings == []


def says(name: str, content: bytes) -> object:
    """What a file holds, whatever its line ends, quotes and indents."""
    if name in (RECORDS, SAMPLES):  # a seal covers what a line says and not how its JSON is written
        with suppress(ValueError):
            return [json.loads(line) for line in content.splitlines()]
        return content
    if name == ENVIRONMENT:
        return json.loads(content)
    return read_table(content.decode()) if name == TABLE else content
