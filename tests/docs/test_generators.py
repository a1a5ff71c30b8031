"""The generated pages of the documentation say what the code says: nothing that a user meets is left out."""

from __future__ import annotations

import importlib
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from attnbench.answers.claims.assessment import judge_all_rows
from attnbench.answers.claims.claims import claims
from attnbench.answers.claims.evidence import read_rows
from attnbench.cli.app import main
from attnbench.cli.usage import COMMANDS
from attnbench.contract.inputs import INPUTS
from attnbench.contract.task import TASKS
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Exit
from attnbench.laws import LAWS
from attnbench.results.record import COLUMNS, FIELDS
from attnbench.suite.schema import Axes, Exclude, Include, Matrix, Profiles, Rules, Size, Suite, Sweep
from tests.docs.conftest import PagesOf
from tests.docs.making import GENERATED, HERE, RUNS

SHIPPED = [entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.")]


@pytest.fixture(autouse=True)
def _docs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "docs"))


def generator(name: str) -> ModuleType:
    return importlib.import_module(f"generators.{name}")


def test_what_is_generated_is_ignored_by_git_and_left_out_of_the_package() -> None:
    folders = importlib.import_module("generators").FOLDERS
    assert set(GENERATED) == set(folders)
    ignored = (HERE / ".gitignore").read_text(encoding="utf-8").splitlines()
    pruned = (HERE / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    assert all(f"/docs/{folder}/" in ignored and f"prune docs/{folder}" in pruned for folder in folders)


def test_every_variant_has_a_formula_that_is_drawn_whole() -> None:
    formulas = generator("catalogue").FORMULAS
    assert set(formulas) == set(SHIPPED)
    for latex in formulas.values():
        drawn = generator("markdown").formula(latex, "plain")
        lines = latex.split(r", \quad ")
        assert drawn.count("<div>") == len(lines)
        assert ["".join(generator("markdown").pieces(one)).replace(" ", "") for one in lines] == [
            one.replace(" ", "") for one in lines
        ]
        assert "\\" not in drawn  # a command that was not understood
        assert "merror" not in drawn


@pytest.mark.parametrize("name", SHIPPED)
def test_a_variant_has_a_page_with_all_that_is_known_of_it_and_its_pattern(name: str, pages_of: PagesOf) -> None:
    entry = VARIANTS.get(name)
    page = pages_of("catalogue")[f"catalogue/{name}.md"]
    shown = re.sub(r"\\([*_<>|$~\[\]])", r"\1", page)
    assert shown.startswith(f"# {name}")
    assert entry.summary in shown
    assert entry.cost in shown
    assert all(f"| `{option}` |" in page for option in entry.options)
    reasons = (entry.traits.causal, entry.traits.cross, entry.traits.key_padding, entry.traits.bias)
    assert all(" ".join(str(one).split()) in shown for one in reasons if not one and str(one) != "False")
    assert "## Laws that it is held to" in page
    assert "| [build](../reference/laws.md#build) |" in page
    assert page.count("<svg") == 1 + bool(entry.traits.causal)  # of its pattern
    assert 'd="M' in page


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_is_its_help(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    assert generator("commands").help_of(name) == capsys.readouterr().out


def test_every_law_stands_on_its_page_with_a_variant_that_breaks_it(pages_of: PagesOf) -> None:
    page = pages_of("laws")["reference/laws.md"]
    for name, law in LAWS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert generator("markdown").text(law.sentence) in section
        assert re.search(r"^\| `\w+` \|", section, re.MULTILINE), f"no wrong variant stands at {name}"


def test_every_wrong_variant_is_read_from_the_tests() -> None:
    laws = generator("laws")
    assert {one[0] for one in laws.faults()} <= set(laws.wrong())
    assert {one[2] for one in laws.faults()} == set(LAWS)


def test_every_column_has_a_meaning_and_what_ends_in_a_unit_has_one() -> None:
    columns = generator("columns")
    assert [column for column, said in columns.meanings().items() if not said] == []
    assert list(columns.meanings()) == list(COLUMNS)
    assert [one for one in FIELDS if one.endswith(("_s", "_bytes", "_j")) and not FIELDS[one].unit] == []


def test_every_exit_code_has_a_meaning(pages_of: PagesOf) -> None:
    page = pages_of("columns")["reference/exit-codes.md"]
    said = dict(re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE))
    assert {int(code) for code in said} == {int(code) for code in Exit}
    assert all(len(meaning) > 10 for meaning in said.values())


@pytest.mark.parametrize("model", [Suite, Sweep, Matrix, Size, Rules, Profiles, Exclude, Include])
def test_every_key_of_a_suite_has_a_meaning(model: type) -> None:
    schema = Suite.model_json_schema()
    rows = list(generator("suites")._keys(model, schema))
    own = {info.alias or name for name, info in model.model_fields.items()}  # type: ignore[attr-defined]
    assert {row[0].strip("`") for row in rows} == (own - set(Axes.model_fields) if model is Include else own)
    assert [row[0] for row in rows if not row[3] or not row[1]] == []


def test_tasks_and_inputs_stand_on_their_pages(pages_of: PagesOf) -> None:
    found = pages_of("tables")
    tasks = [one.name for one in TASKS if one.make.__module__.startswith("attnbench.")]
    inputs = [one.name for one in INPUTS if one.make.__module__.startswith("attnbench.")]
    assert all(f"\n## {name}\n" in found["reference/tasks.md"] for name in tasks)
    assert all(f"\n## {name}\n" in found["reference/inputs.md"] for name in inputs)


def test_every_committed_run_has_a_section_with_the_command_that_made_it(pages_of: PagesOf) -> None:
    page = pages_of("runs")["reference/runs.md"]
    for run in RUNS.iterdir():
        section = page.partition(f"\n## {run.name}\n")[2].partition("\n## ")[0]
        assert re.search(r"\| Command \| `(attnbench|make) ", section)
        assert any(name in section for name in ("results.csv", "compare.csv", "swap.csv"))


def test_the_picture_of_the_layers_is_well_formed_and_names_every_part() -> None:
    layers = generator("layers")
    drawn = layers.drawing()
    HTMLParser().feed(drawn)
    assert set(layers.WHAT) == set(layers.layers())
    assert all(re.search(rf"[> ]{home}[< ]", drawn) for homes in layers.layers().values() for home in homes.split())


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("``a|b`` and w_ij * *all* x", r"`a|b` and w\_ij \* *all* x"),
        (":class:`~attnbench.suite.cell.Cell` is", "`Cell` is"),
        (
            "Raises:\n    UsageError: no\n        such name.\n    Other: ``x``.",
            "**Raises**\n\n- `UsageError`: no such name.\n- `Other`: `x`.",
        ),
        ("Returns:\n    a: b\n    c", "**Returns**\n\na: b\nc"),
    ],
)
def test_a_docstring_becomes_markdown(docstring: str, markdown: str) -> None:
    assert generator("markdown").prose(docstring) == markdown


def test_each_claim_names_the_sweeps_and_the_runs_that_it_reads(pages_of: PagesOf) -> None:
    page = pages_of("claims")["reference/claims.md"].partition("## Where each claim comes from")[2]
    rows = {
        line.split("|")[1].strip(): line.split("|")
        for line in page.splitlines()
        if " trains " in line and "table 2" in line
    }
    assert len(rows) == 7  # rows of table 2 that are a speed-up
    for row in rows.values():
        assert row[4:6] == [" `speed` ", " [lra-cpu](runs.md#lra-cpu): 2 "]


@pytest.mark.slow
def test_claims_without_a_folder_read_the_runs_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    frame = read_rows([Path("results/reference")], lambda line: None)
    page = {one.claim.id: one.verdict for one in generator("claims").judged()}
    assert {one.id: judge_all_rows(one, frame).verdict for one in claims()} == page
