"""``attnbench init`` writes a suite that runs, and ``attnbench schema`` says what may stand in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from attnbench.cli.app import main
from attnbench.errors import Exit
from attnbench.harness.plan import Options, make_plan
from attnbench.suite.axes import AXES
from attnbench.suite.document import read_document
from attnbench.suite.load import load_suite, shipped_suites, suite_path
from attnbench.suite.schema import Suite


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_suite_loads_and_has_cells_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "wrote mine.yaml\n"
    suite = load_suite("mine.yaml")
    assert suite.name == "mine"
    cells = make_plan(suite, Options(device="cpu")).cells
    assert {cell.variant.name for cell in cells} == {"softmax", "sdpa", "local", "performer"}
    assert {cell.shape.N for cell in cells} == {512, 1024, 2048}


@pytest.mark.usefixtures("forks")
def test_one_cell_of_it_is_measured() -> None:
    assert main(["init"]) == 0
    small = ["-k", "softmax", "--set", "seq_len=16", "--quick", "--device", "cpu"]
    assert main(["run", "suite.yaml", *small]) == 0


def test_what_it_leaves_out_is_legal_without_the_marks() -> None:
    assert main(["init"]) == 0
    text = Path("suite.yaml").read_text(encoding="utf-8")
    above, mark, below = text.partition("# min_time")
    Path("all.yaml").write_text(above + (mark + below).replace("# ", "", 1).replace("\n# ", "\n"), encoding="utf-8")
    suite = load_suite("all.yaml")
    assert {"min_time", "rounds", "profiles", "exclude"} <= set(suite.data)
    assert suite.data["min_time"] == Suite.model_fields["min_time"].default
    assert suite.data["rounds"] == Suite.model_fields["rounds"].default


def test_a_file_that_is_there_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("name: precious", encoding="utf-8")
    assert main(["init", "mine.yaml"]) == Exit.CANNOT_CREATE
    assert capsys.readouterr().err == "error: mine.yaml exists already and stays as it is; choose another name\n"
    assert Path("mine.yaml").read_text(encoding="utf-8") == "name: precious"


def test_a_link_that_leads_nowhere_is_not_followed() -> None:
    Path("mine.yaml").symlink_to("elsewhere.yaml")
    assert main(["init", "mine.yaml"]) == Exit.CANNOT_CREATE
    assert not Path("elsewhere.yaml").exists()


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [
        ("mine.txt", Exit.USAGE, "error: mine.txt does not end in .yaml; write attnbench init mine.txt.yaml"),
        ("no/such/folder/mine.yaml", Exit.CANNOT_CREATE, "error: cannot write no/such/folder/mine.yaml"),
    ],
)
def test_a_place_that_cannot_be_is_one_line(
    file: str, code: Exit, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", file]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


@pytest.mark.parametrize("stem", ["my suite", "con", "ends.", "-dash"])
def test_a_file_whose_name_no_suite_may_have_holds_another_name(stem: str) -> None:
    assert main(["init", "--", f"{stem}.yaml"]) == 0
    assert load_suite(Path(f"{stem}.yaml")).name == "mine"


@pytest.mark.parametrize("stem", ["2024", "1e3", "true", "null"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(stem: str) -> None:
    assert main(["init", f"{stem}.yaml"]) == 0
    assert load_suite(f"{stem}.yaml").name == stem


def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["schema"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_the_schema_has_every_key_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    found = schema(capsys)
    definitions = found["$defs"]
    assert isinstance(definitions, dict)
    assert set(definitions["Matrix"]["properties"]) == {*AXES, "shape"}
    for model in (found, *definitions.values()):
        lacking = [key for key, value in model["properties"].items() if not value.get("description")]
        assert lacking == []


@pytest.mark.parametrize("name", [*shipped_suites(), "init"])
def test_an_editor_finds_nothing_wrong_with_a_suite_that_is_right(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("suite.yaml") if name == "init" else suite_path(name)
    if name == "init":
        assert main(["init"]) == 0
        capsys.readouterr()
    data, _ = read_document(path.read_text(encoding="utf-8"))
    assert [error.message for error in Draft202012Validator(schema(capsys)).iter_errors(data)] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"},
        {"rounds": 0},
        {"sweeps": []},
        {"colour": "blue"},
        {"sweeps": [{"name": "s", "matrix": {"variant": "softmax"}}]},
        {"sweeps": [{"name": "s", "measure": "tiem", "matrix": {"variant": "softmax", "seq_len": 8}}]},
        {"sweeps": [{"name": "s", "matrix": {"variant": "softmax", "seq_len": 8, "dtype": "float23"}}]},
    ],
)
def test_an_editor_finds_what_is_wrong(wrong: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    right = {"name": "s", "sweeps": [{"name": "s", "matrix": {"variant": "softmax", "seq_len": 8}}]}
    validator = Draft202012Validator(schema(capsys))
    assert validator.is_valid(right)
    assert not validator.is_valid(right | wrong)
