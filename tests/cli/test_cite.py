"""``attnbench cite``: what a run says of itself as a paragraph, and BibTeX that holds only what the catalogue has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import attnbench
from attnbench.cli.app import main
from attnbench.cli.cite import _key, _work
from attnbench.contract.variant import VARIANTS
from attnbench.errors import AttnbenchError

RUNS = Path(__file__).parents[2] / "results" / "reference"
ENTRY = re.compile(r"^@(\w+)\{([^,\s]+),\n(.*?)\n\}$", re.MULTILINE | re.DOTALL)


def cited(run: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, str]]:
    assert main(["cite", str(RUNS / run)]) == 0
    paragraph, _, entries = capsys.readouterr().out.partition("\n@")
    found = ENTRY.findall(f"@{entries}")
    assert len({key for _, key, _ in found}) == len(found)
    return " ".join(paragraph.split()), {key: fields for _, key, fields in found}


def test_a_run_is_cited_with_its_method_and_all_that_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    method, entries = cited("headline-long-cpu", capsys)
    for said in (
        "attnbench 0.1.0, suite headline-long",
        "on 2026-11-23",
        "AMD EPYC with 2 cores",
        "PyTorch 2.13.0+cpu",
    ):
        assert said in method
    assert "3 rounds over the cells in a shuffled order" in method
    assert "fresh process" not in method  # its version began none
    assert "steps of training on recall" in method
    assert "eprint = {2009.14794}" in entries["choromanski2021:2009.14794"]
    assert "author = {Choromanski and others}" in entries["choromanski2021:2009.14794"]
    assert "note = {performer: equations 4-7, lemma 1}" in entries["choromanski2021:2009.14794"]
    assert "version = {0.1.0}" in entries["attnbench"]


@pytest.mark.parametrize("run", ["gpu-h200", "swap-minilm", "peers-cpu", "kernels-cpu"])
def test_runs_of_every_kind_are_cited(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    method, entries = cited(run, capsys)
    assert "attnbench" in entries
    assert method.startswith("Measured on 2026-")
    assert "None" not in method
    assert ("NVIDIA H200 (140 GiB)" in method) is (run == "gpu-h200")


def test_from_python_it_is_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    method, entries = cited("kernels-cpu", capsys)
    text, _, bibtex = attnbench.cite(RUNS / "kernels-cpu").partition("\n@")
    assert text.strip() == method
    assert {key: fields for _, key, fields in ENTRY.findall(f"@{bibtex}")} == entries
    with pytest.raises(AttnbenchError, match="holds no run"):
        attnbench.cite("tests")


@pytest.mark.parametrize("name", [one.name for one in VARIANTS if "this project" not in one.source])
def test_a_source_becomes_fields_and_nothing_of_it_is_lost_or_invented(name: str) -> None:
    source = VARIANTS.get(name).source
    works = [_work(part) for part in source.split("; ")]
    assert any(fields for fields, _ in works), source
    for fields, rest in works:
        values = re.findall(r"\{+([^{}]+)\}", " ".join(fields))
        for word in re.findall(r"[\w.]+", " ".join([*values, rest])):
            assert word in {"and", "others", "arXiv"} or word in source, word
    assert not re.search(r"arXiv|doi|\bet al\b", " ".join(rest for _, rest in works)), works


def test_a_work_with_one_author_two_or_many_a_team_or_a_number_alone() -> None:
    assert _work("Eckart and Young 1936")[0] == ["author = {Eckart and Young}", "year = {1936}"]
    assert _work("Kimi Team 2025, arXiv:2510.26692, section 3")[0][0] == "author = {{Kimi Team}}"
    assert _work("Sanford, Hsu & Telgarsky 2024")[0][0] == "author = {Sanford and Hsu and Telgarsky}"
    assert _key(_work("von Oswald et al. 2025, arXiv:2506.05233")[0]) == "oswald2025:2506.05233"
    assert _work("authors' code, hyena.py") == ([], "authors' code, hyena.py")
    assert _key(_work("arXiv:2411.10958, section 3")[0]) == "2411.10958"
