"""A variant that is not the method as its source describes it is marked wherever its name stands."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path

import pytest

from tests.typed import attnbench

NOTE = "† not the form that the source describes; attnbench show NAME says what differs"
SMALL = ("--n", "16", "--heads", "1", "--head-dim", "8", "--min-time", "0.01", "--unchecked")
SUITE = """
name: own
description: A variant in a form of its own, causal and not.
sweeps:
  - name: one
    level: operator
    matrix: {variant: [retnet, softmax], seq_len: 16, heads: 1, head_dim: 8, causal: [false, true]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own")
    (path / "own.yaml").write_text(SUITE)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return attnbench("run", "own.yaml", "--quick", "--unchecked", "--out", "out", folder=folder)


def test_the_table_of_a_run_marks_the_causality_that_is_meant(run: subprocess.CompletedProcess[str]) -> None:
    cells = [line.split()[:2] for line in run.stdout.splitlines()]
    assert ["retnet†", "False"] in cells
    assert ["retnet", "True"] in cells
    assert ["softmax", "False"] in cells
    assert run.stdout.count(NOTE) == 1


def test_the_csv_has_the_sentence(run: subprocess.CompletedProcess[str], folder: Path) -> None:
    (file,) = folder.glob("out/**/results.csv")
    with file.open(encoding="utf-8") as lines:
        forms = {(row["variant"], row["causal"]): row["own_form"] for row in csv.DictReader(lines)}
    assert "in both directions" in forms.pop(("retnet", "false"))
    assert set(forms.values()) == {""}


def test_a_comparison_marks_it_in_every_table(folder: Path) -> None:
    words = ("compare", "retnet", "softmax", *SMALL)
    not_causal, causal = (attnbench(*words, *more, folder=folder) for more in ((), ("--causal",)))
    assert not_causal.stdout.count("retnet†") == 3  # beside the times, the memory and the own error
    assert not_causal.stdout.count(NOTE) == 1
    assert "†" not in causal.stdout + causal.stderr


def test_the_chart_and_the_rows_of_a_comparison_have_it(folder: Path) -> None:
    words = ("compare", "softmax", "retnet", *SMALL)
    done = attnbench(*words, "--no-error", "--plot", "own.svg", "--width", "column", "--csv", "own.csv", folder=folder)
    assert "\nmemory\n" in done.stdout  # nothing stands there against exact attention
    panels, key = ((folder / name).read_text(encoding="utf-8") for name in ("own.svg", "own-2.svg"))
    assert 'width="237.6pt"' in panels  # 3.3 inches
    assert 'width="237.6pt"' in key
    assert "retnet†<" in panels  # the title says which is faster, or that neither is
    assert ">retnet†<" in panels + key
    assert ">softmax<" in panels + key
    with (folder / "own.csv").open(encoding="utf-8") as lines:
        (row,) = csv.DictReader(lines)
    assert row["a_own_form"] == ""
    assert "in both directions" in row["b_own_form"]


def test_the_list_and_what_is_shown_mark_it(folder: Path) -> None:
    listed = attnbench("list", folder=folder)
    assert " retnet " in listed.stdout  # its causal form is the paper's
    assert all(f" {name}† " in listed.stdout for name in ("perceiver", "monotonic", "h2o", "tova", "msa"))
    marked = {
        line.split()[0].rstrip("†") for line in listed.stdout.splitlines() if "† " in line and line.startswith(" ")
    }
    recurrent = {"gated-delta", "kda", "mamba2", "rwkv7", "delta", "gla", "ssd", "path"}
    assert not marked & (recurrent | {"moba", "streaming", "hyena", "csa"})
    assert " softmax " in listed.stdout
    assert NOTE in listed.stdout
    shown = attnbench("show", "retnet", folder=folder).stdout
    assert "own form†   not causal: weights fade with the distance in both directions" in shown
    assert "own form" not in attnbench("show", "softmax", folder=folder).stdout
