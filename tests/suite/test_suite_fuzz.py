"""Whatever stands in a suite file, loading it ends quickly in a suite or in one line."""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnbench.errors import AttnbenchError, SuiteError
from attnbench.suite.axes import AXES
from attnbench.suite.document import NotASuite, read_document, write_document
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.load import load_suite
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

pytestmark = pytest.mark.usefixtures("small_registry")

CASES = int(os.environ.get("ATTNBENCH_CASES", "40"))
"""20000 in make selfcheck."""

same_fixtures = settings(
    max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=10_000
)

GOOD = """\
name: small
sweeps:
  - name: speed
    level: operator
    measure: [time, error]
    matrix:
      variant: [softmax, 'performer:features=[64,512]', {name: performer, beta: 1e-6}]
      seq_len: 512..2048
profiles: {cuda: {batch: 32}}
exclude: [{variant: softmax, seq_len: ">=2048"}]
include: [{variant: sdpa}]
"""

PIECES = st.sampled_from(
    ["- ", ": ", "\n", "  ", "{", "}", "[", "]", ",", "&a ", "*a", "!!str ", "? ", "|\n", ">", "'", '"', "#", "%",
     "\t", "---\n", "...\n", "<<", "1e999", ".nan", "-1", "null", "\\U", "512..16", "0..1", ">=", "performer:",
     "4k", "1k..2k", "\x85", "\u2028"]
)  # fmt: skip


def loads_or_one_line(path: Path) -> None:
    try:
        expand(load_suite(path))
    except AttnbenchError as error:
        message = str(error)
    else:
        return
    assert message.startswith(f"{path}:")
    assert message.isprintable()
    assert len(message) < 1000
    assert ";" in message


@same_fixtures
@given(st.data())
def test_a_damaged_suite_is_refused_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(PIECES | st.text(max_size=3)) + text[at + cut :]
    path = tmp_path / "s.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    loads_or_one_line(path)


@same_fixtures
@given(st.binary() | st.lists(PIECES).map(lambda pieces: "".join(pieces).encode()))
def test_any_file_is_a_suite_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(content)
    loads_or_one_line(path)


SCALARS = st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.sampled_from(
    ["softmax", "radial", "performer", "performer:features=3", "time", "s", "1..8", ">=4", "float32", "", "no"]
)
VALUES = st.recursive(
    SCALARS | WORDS | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*AXES, "name", "features", "sweep", "cuda", "layers"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["name", "level", "pass", "measure", "model", "error_draws", "matrix", "profiles", "x"])


@same_fixtures
@given(
    st.dictionaries(KEYS, VALUES, max_size=4),
    st.dictionaries(st.sampled_from([*AXES]), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["profiles", "exclude", "include", "description", "y"]), VALUES, max_size=3),
)
def test_any_data_is_a_suite_or_refused(sweep: dict[str, Any], axes: dict[str, Any], rest: dict[str, Any]) -> None:
    matrix = {"variant": "softmax", "seq_len": 4, **axes}
    data = {"name": "x", "sweeps": [{"name": "s", "matrix": matrix, **sweep}], **rest}
    try:
        suite = Suite.of(data, Origin("x.yaml"))
        cells = expand(suite)
    except AttnbenchError as error:
        message = str(error)
    else:
        again = read_document(suite.to_yaml())[0]
        assert again == data
        assert expand(Suite.of(again, Origin())) == cells
        return
    assert message.isprintable()


@same_fixtures
@given(st.sampled_from([*AXES]), st.text(st.sampled_from(string.ascii_lowercase + "0123456789=:,.[]+ ")) | WORDS)
def test_any_text_for_an_axis_is_taken_or_refused(axis: str, text: str) -> None:
    suite = Suite.of({"name": "x", "sweeps": [{"name": "s", "matrix": {"variant": "softmax", "seq_len": 4}}]}, Origin())
    try:
        message = str(len(expand(apply_overrides(suite, {axis: text}))))
    except AttnbenchError as error:
        message = str(error)
    assert "\n" not in message


@given(st.dictionaries(st.text(max_size=5), VALUES | st.text(), max_size=4))
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    text = write_document(data)
    try:
        again = read_document(text)[0]
    except NotASuite:
        again = {} if not data else None
    assert again == data


def test_a_long_file_of_anything_ends_soon(tmp_path: Path) -> None:
    for unit in ("a: b\n", "[", "? ", "a, "):
        path = tmp_path / "s.yaml"
        path.write_text((unit * 2**18)[: 2**18])
        with pytest.raises(SuiteError):
            load_suite(path)
