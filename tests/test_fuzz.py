"""Whatever stands in a results folder or on a command line, reading it ends in data or in one line."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attnbench.contract.inputs import INPUTS
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_specs
from attnbench.contract.variant import VARIANTS
from attnbench.errors import AttnbenchError, CorruptResults, UsageError
from attnbench.measure.status import Status
from attnbench.results.journal import Journal
from attnbench.results.manifest import SEAL, digest
from attnbench.results.read import read_results
from attnbench.results.record import COLUMNS, Record
from attnbench.results.store import ENVIRONMENT, RECORDS, SAMPLES, RunFolder
from attnbench.suite.cell import Cell
from attnbench.suite.ranges import parse_range
from attnbench.text import printable

CASES = int(os.environ.get("ATTNBENCH_CASES", "60"))
"""20000 in make selfcheck."""

cases = settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=10_000)

ROWS = [
    Record.of(Cell("s", "w", Spec("softmax"), Shape(seq_len=n)), Status.OK, time_median_s=0.1 * n, time_rounds=1)
    for n in (2, 4, 8)
]
LINES = "".join(json.dumps(row.to_json() | {"schema_version": 1}) + "\n" for row in ROWS).encode()
"""As the first schema has them, without seals."""
TAKEN = "".join(
    json.dumps({"cell_id": row.cell_id, "round": 0, "samples": [{"seconds": 0.1, "calls": 2, "switches": 0}]}) + "\n"
    for row in ROWS
).encode()


def sealed(name: str, lines: bytes) -> bytes:
    """The same rows as a run appends them today."""
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder, name))
        journal.append(
            [json.loads(line) | ({"schema_version": 3} if name == RECORDS else {}) for line in lines.split(b"\n")[:-1]]
        )
        journal.close()
        return Path(folder, name).read_bytes()


WITHOUT_SEALS = "{}"
_FACTS = {"schema_version": 3}
WITH_SEALS = json.dumps({**_FACTS, SEAL: digest(json.dumps(_FACTS))})

BYTES = st.sampled_from([b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"NaN", b"1e999", b"null", b"\x00", b"\xff", b",,"])


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    content = whole
    for _ in range(draw(st.integers(1, 3))):
        at, cut = draw(st.integers(0, len(content))), draw(st.integers(0, 40))
        content = content[:at] + draw(BYTES | st.binary(max_size=4)) + content[at + cut :]
    return content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content


def resumed(folder: Path, name: str, content: bytes, facts: str) -> None:
    """Read as a run that goes on reads."""
    file = folder / name
    file.write_bytes(content)
    (folder / ENVIRONMENT).write_text(facts)
    run = RunFolder(folder)
    try:
        rows = run.records() if name == RECORDS else run.samples()
    except CorruptResults as error:
        message = str(error)
        assert message.startswith(f"{file}:")
        assert message.isprintable()
        assert len(message) < 1000
    else:
        assert len(rows) <= content.count(b"\n")
        whole = [json.loads(line) for line in sealed(name, LINES if name == RECORDS else TAKEN).splitlines()]
        assert facts == WITHOUT_SEALS or all(row in whole for row in RunFolder(folder).rows(name))
        assert len(run.repairs) == (not content.endswith(b"\n") and bool(content))
    assert file.read_bytes() == content  # who reads mends nothing
    assert {path.name for path in folder.iterdir()} == {name, ENVIRONMENT}


@cases
@given(damaged(LINES) | damaged(sealed(RECORDS, LINES)), st.sampled_from([WITHOUT_SEALS, WITH_SEALS]))
@example(LINES, WITHOUT_SEALS)
@example(sealed(RECORDS, LINES), WITH_SEALS)
@example(b"[" * 100_000 + b"\n", WITHOUT_SEALS)
@example(LINES.replace(b'"suite"', b'"\x7fsuite"', 1), WITHOUT_SEALS)
@example(LINES.replace(b'"seq_len": 2', b'"seq_len": true', 1), WITHOUT_SEALS)
@example(LINES.replace(b'"cell_id": ', b'"cell_id": [], "x": ', 1), WITHOUT_SEALS)
def test_a_run_goes_on_from_any_rows_or_refuses_them_in_one_line(tmp_path: Path, content: bytes, facts: str) -> None:
    resumed(tmp_path, RECORDS, content, facts)


@cases
@given(damaged(TAKEN) | damaged(sealed(SAMPLES, TAKEN)), st.sampled_from([WITHOUT_SEALS, WITH_SEALS]))
@example(TAKEN, WITHOUT_SEALS)
@example(sealed(SAMPLES, TAKEN), WITH_SEALS)
@example(TAKEN.replace(b'"round": 0', b'"round": "0"', 1), WITHOUT_SEALS)
@example(TAKEN.replace(b'"calls": 2', b'"call": 2', 1), WITHOUT_SEALS)
def test_a_run_goes_on_from_any_samples_or_refuses_them_in_one_line(tmp_path: Path, content: bytes, facts: str) -> None:
    resumed(tmp_path, SAMPLES, content, facts)


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != SEAL])
def test_a_value_of_another_type_is_refused_with_the_name_of_its_column(tmp_path: Path, name: str) -> None:
    row = ROWS[0].to_json()
    (tmp_path / ENVIRONMENT).write_text(WITHOUT_SEALS)
    (tmp_path / RECORDS).write_text(json.dumps(row | {name: 1 if isinstance(row[name], bool) else True}) + "\n")
    with pytest.raises(CorruptResults, match=rf"records\.jsonl:1: not a record of this version: .*(?i:{name})"):
        RunFolder(tmp_path).records()


def table() -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([["" if v is None else str(v) for v in [*row.to_json().values(), ""]] for row in ROWS])
    return text.getvalue().encode()


@cases
@given(damaged(table()) | st.binary(max_size=200))
@example(table().replace(b"softmax", b"softmax,softmax", 1))
@example(table() + b"," * 5000 + b"\n")
def test_any_table_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.csv"
    path.write_bytes(content)
    try:
        frame = read_results(path)
    except AttnbenchError as error:
        message = str(error)
        assert message.startswith(f"{path}:")
        assert "\n" not in message
    else:
        assert tuple(frame.columns) == COLUMNS
        assert set(frame["status"]) <= set(Status)


STRANGE = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["'", "''", "=1", "'=1", "-", "@a"]
)


@settings(cases, max_examples=max(CASES // 10, 12))  # reading a whole table takes long
@given(STRANGE, st.floats(allow_nan=False, allow_infinity=False))
@example("'=1+1", -1e-300)
@example("''=1", -0.0)
def test_no_text_of_a_table_starts_a_formula_and_every_text_and_number_comes_back(
    tmp_path: Path, text: str, number: float
) -> None:
    row = Record.of(Cell("s", "w", Spec("softmax"), Shape(seq_len=2)), Status.ERROR, loss_delta=number)
    row.reason = text.replace("\0", "").replace("\r", " ")
    RunFolder(tmp_path).write_csv([row])
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        (cells,) = csv.DictReader(file)
    assert cells["reason"][:1] not in ("=", "+", "-", "@", "\t", "\r") or not cells["reason"]
    frame = read_results(tmp_path / "results.csv")
    assert frame["reason"].tolist() == [printable(row.reason)]
    assert frame["loss_delta"].tolist() == [number]


PIECES = st.sampled_from(
    [
        *("softmax", "performer", "local", "file", "per-head", ":", ",", "=", "[", "]", "features", "kernel"),
        *("window", "relu", "8", "-1", "1e-6", "010", "no", ".nan", "null", " ", "..", "/", "\n", "é"),
    ]
)


@cases
@given(st.text() | st.lists(PIECES).map("".join) | st.lists(PIECES).map(lambda rest: "performer:" + "".join(rest)))
def test_any_text_is_a_variant_with_options_or_refused_in_one_line(text: str) -> None:
    message = ""
    try:
        for spec in parse_specs(text):
            assert "/" not in spec.name
            assert spec.name not in (".", "..")
            table = INPUTS if spec.name in INPUTS else VARIANTS
            normal = table.get(spec.name).normalise(spec)
            assert table.get(spec.name).normalise(normal) == normal
    except UsageError as error:
        message = str(error)
    assert "\n" not in message


@cases
@given(st.text(st.sampled_from("0123456789.,+-k ")) | st.text())
def test_any_text_is_a_list_of_numbers_or_refused_at_once(text: str) -> None:
    try:
        numbers = parse_range(text)
    except UsageError as error:
        message, numbers = str(error), [1]
    else:
        message = ""
    assert "\n" not in message
    assert 0 < len(numbers) <= 10_000
    assert all(type(number) is int for number in numbers)


def test_a_number_that_is_no_number_is_refused_in_a_row(tmp_path: Path) -> None:
    (tmp_path / ENVIRONMENT).write_text(WITHOUT_SEALS)
    (tmp_path / RECORDS).write_bytes(LINES.replace(b'"time_median_s": 0.2', b'"time_median_s": NaN', 1))
    with pytest.raises(CorruptResults, match=r"records\.jsonl:1: damaged line: NaN is not a number"):
        RunFolder(tmp_path).records()
