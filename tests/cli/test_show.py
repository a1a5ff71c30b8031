"""What ``show`` and ``list`` print in a terminal of 80 columns."""

from __future__ import annotations

import json
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from torch import nn

from attnbench.cli.app import main
from attnbench.cli.screen import console
from attnbench.cli.show import _facts, as_data
from attnbench.contract.inputs import INPUTS
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import TASKS
from attnbench.contract.variant import FAMILIES, VARIANTS, Variant

NAMES = [entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.catalogue.attention.")]

TASK_NAMES = [entry.name for entry in TASKS if entry.make.__module__.startswith("attnbench.catalogue.tasks.")]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_out", lambda: Console(highlight=False, width=80))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_fits_the_terminal_and_leaves_no_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "show", name)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert text.partition("\n")[0].startswith(f"{name}: ")
    assert "`" not in text


@pytest.mark.parametrize("name", NAMES)
def test_the_name_and_the_summary_are_one_line(name: str) -> None:
    assert len(f"{name}: {VARIANTS.get(name).summary}") <= 80
    assert len(VARIANTS.get(name).summary) <= 70


def test_no_two_summaries_are_alike() -> None:
    assert len({VARIANTS.get(name).summary for name in NAMES}) == len(NAMES)


def test_every_trait_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "show", "performer")
    for claim in (
        "O(n·R·d); claimed: time ~ n, memory ~ n",
        "with kernel=relu: other: another operator",
        "sum to 1: the output is an average",
        "does not matter: permuted tokens",
        "the squared error falls as 1/features",
    ):
        assert claim in text
    assert "matters: the output depends" in shown(capsys, "show", "local")
    assert "exact with  window=n" in shown(capsys, "show", "local")
    assert "no: it has no causal form" in shown(capsys, "show", "lara")
    flex = shown(capsys, "show", "flex")
    assert "dtypes      bfloat16, float16, float32 on a CPU" in flex
    assert "compiled    for each shape and dtype" in flex
    assert "compiled  " not in text


def test_a_plug_in_without_a_docstring_has_no_description() -> None:
    class Silent(nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()

    data = as_data(Variant("silent", Silent, "", family="exact", source="", formula="", cost=""))
    assert data["description"] == ""
    assert data["options"] == []


def test_the_description_is_filled_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = shown(capsys, "show", "softmax").rpartition("claimed")[2].split()
    monkeypatch.setattr(console, "_out", lambda: Console(highlight=False, width=50))
    text = shown(capsys, "show", "softmax")
    assert max(map(cell_len, text.splitlines())) <= 50
    assert text.rpartition("claimed")[2].split() == narrow


@pytest.mark.parametrize("name", TASK_NAMES)
def test_a_task_fits_the_terminal_and_shows_source_licence_and_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = TASKS.get(name)
    text = shown(capsys, "show", name)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert f"{name}: {entry.summary}" in text
    assert "`" not in text
    words = " ".join(text.split())
    for claim in (entry.source, entry.licence, *entry.options):
        assert all(word in words for word in claim.split())
    assert "Raises:" in text
    data = json.loads(shown(capsys, "show", name, "--json"))
    data = data.get("task", data)
    assert (data["source"], data["licence"]) == (entry.source, entry.licence)
    assert [option["name"] for option in data["options"]] == list(entry.options)


def test_what_is_an_input_and_a_task_is_shown_as_both(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "show", "listops")
    for entry in (INPUTS.get("listops"), TASKS.get("listops")):
        assert f"listops: {entry.summary}" in text


def test_every_task_is_listed_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(shown(capsys, "list", "tasks", "--json"))}
    for name in TASK_NAMES:
        assert rows[name]["options"] == list(TASKS.get(name).options)
        assert re.search(rf"^{name}\b", shown(capsys, "list", "tasks"), re.MULTILINE)


@pytest.mark.parametrize("what", ["variants", "suites", "inputs", "tasks"])
def test_a_list_fits_the_terminal(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(cell_len, shown(capsys, "list", what).splitlines())) <= 80


@pytest.fixture
def none_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variants but the package's: their costs may be longer than a line."""
    monkeypatch.setattr(VARIANTS, "_entries", {name: VARIANTS.get(name) for name in NAMES})


@pytest.mark.usefixtures("none_of_other_tests")
def test_a_variant_is_one_line_of_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "list").splitlines()
    families = [line.strip() for line in lines if re.match("[A-Z]", line)]
    assert families == [family.upper() for family in FAMILIES]
    assert [line.split()[0].rstrip("†") for line in lines if line.startswith(" ")] == sorted(
        NAMES, key=lambda name: FAMILIES.index(VARIANTS.get(name).family)
    )
    assert lines[-1].startswith("† not the form that the source describes")
    assert len(lines) == 1 + len(families) + len(NAMES) + 1


@pytest.mark.usefixtures("none_of_other_tests")
def test_the_list_and_what_is_shown_use_the_words_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "list").splitlines()
    at = lines[0].index("target")
    words = {line[at:].split()[0] for line in lines[1:] if line.startswith(" ")}
    assert words == {"softmax", "learned", "other"}
    signs = {line.split()[0].rstrip("†"): line[at:].split()[1] for line in lines[1:] if line.startswith(" ")}
    assert {name for name, sign in signs.items() if sign == "="} == {one.name for one in VARIANTS if one.traits.exact}
    fixed = {one.name for one in VARIANTS if not one.traits.longer and not one.traits.exact}
    assert {name for name, sign in signs.items() if sign == "≤"} == fixed
    for name in NAMES:
        word = VARIANTS.get(name).traits.target
        assert re.search(rf"^target +{word}: ", shown(capsys, "show", name), re.MULTILINE)


def test_what_is_not_claimed_of_growth_is_not_shown_as_linear() -> None:
    def make(shape: Shape) -> None: ...

    data = as_data(Variant("silent", make, "", family="exact", source="", formula="", cost="whatever"))
    assert ("cost", "whatever; claimed: nothing") in _facts(data)


def test_the_operator_within_a_layer_is_shown_with_the_gates_that_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "show", "gated-delta")
    assert "gated-delta at level operator: The gated delta rule" in text
    assert "(B, K, N, 1), at most 0: log2 of the share of the state" in text
    assert as_data(VARIANTS.get("sdpa"))["operator"] is None
    assert [one["name"] for one in as_data(VARIANTS.get("kda"))["operator"]["reads"]] == ["beta", "log2_decay"]


def test_an_option_that_needs_another_says_so() -> None:
    meanings = {one["name"]: one["meaning"] for one in as_data(VARIANTS.get("minference"))["options"]}
    assert meanings["window"] == "pattern=a-shape: keys up to a query"
    assert meanings["block"] == "tokens per block"
