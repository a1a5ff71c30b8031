"""A claim names the rows that it reads, and has no verdict while one of them is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from attnbench.answers.claims.assessment import (
    Needed,
    judge,
    judge_all_rows,
    missing_of,
    needed_by,
    rows_by_run,
    rows_of,
)
from attnbench.answers.claims.claims import Claim, claims
from attnbench.answers.claims.evidence import read_rows
from attnbench.cli.app import main
from attnbench.files import read_stored
from attnbench.measure.status import Status
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.table import csv_text
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite

REFERENCE = Path(__file__).parents[2] / "results/reference"
CLAIMS = {one.id: one for one in claims()}
FUSED = CLAIMS["fused-exact"]


def rows_for(claim: Claim, ratio: float = 0.5) -> list[Record]:
    """All rows that a claim needs; ``sdpa`` takes ``ratio`` times as long as anything else."""
    wanted = {one.cell_id for one in needed_by(claim, None)}
    cells = [cell for cell in expand(load_suite(str(claim.suite)), device="cpu") if cell.cell_id in wanted]
    seconds = [ratio if cell.variant.name == "sdpa" else 1.0 for cell in cells]
    return [
        Record.of(cell, Status.OK, time_median_s=one, time_ci_low_s=0.99 * one, time_ci_high_s=1.01 * one)
        for cell, one in zip(cells, seconds, strict=True)
    ]


def written(rows: list[Record], tmp_path: Path) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text(csv_text(rows), encoding="utf-8")
    return file


@cache
def committed() -> pd.DataFrame:
    return read_rows([REFERENCE], lambda line: None)


@cache
def with_rows() -> dict[str, tuple[Needed, ...]]:
    """Id of each claim that needs rows -> those that it needs, by the committed runs."""
    return {one.id: needed for one in CLAIMS.values() if (needed := needed_by(one, committed()))}


def test_without_any_one_of_its_rows_a_claim_has_no_verdict_and_says_how_many_are_missing(tmp_path: Path) -> None:
    rows = rows_for(FUSED)
    assert judge_all_rows(FUSED, read_results(written(rows, tmp_path))).verdict == "holds"
    for lost in rows:
        table = read_results(written([row for row in rows if row is not lost], tmp_path))
        found = judge_all_rows(FUSED, table)
        assert judge(FUSED, table).verdict == "holds"  # what the other rows say
        assert found.verdict == "not tested here"
        assert found.evidence.startswith("1 of 10 rows is missing; measure it with: attnbench run claims; so far n=")
        assert [one.cell_id for one in found.missing] == [lost.cell_id]


def test_a_row_that_failed_is_there_and_one_that_was_interrupted_is_not(tmp_path: Path) -> None:
    last, *rows = rows_for(FUSED)[::-1]
    failed = replace(last, status=Status.OOM, time_median_s=None, time_ci_low_s=None, time_ci_high_s=None)
    assert judge_all_rows(FUSED, read_results(written([*rows, failed], tmp_path))).verdict == "holds"
    broken = replace(failed, status=Status.INTERRUPTED)
    assert judge_all_rows(FUSED, read_results(written([*rows, broken], tmp_path))).verdict == "not tested here"
    every = [replace(row, status=Status.DISTURBED, reason="a busy machine") for row in rows_for(FUSED)]
    found = judge_all_rows(FUSED, read_results(written(every, tmp_path)))
    assert found.evidence.endswith(": disturbed: a busy machine; attnbench run claims measures it anew")
    assert (found.verdict, len(found.missing)) == ("not tested here", 10)


def test_a_row_that_its_suite_does_not_measure_decides_nothing(tmp_path: Path) -> None:
    rows = rows_for(FUSED)
    other = [replace(row, cell_id=f"{number:016}", seq_len=7) for number, row in enumerate(rows[:2])]
    slower = [replace(row, time_median_s=9.0, time_ci_low_s=9.0, time_ci_high_s=9.0) for row in other]
    assert judge_all_rows(FUSED, read_results(written([*rows, *slower], tmp_path))).verdict == "holds"


def test_a_claim_about_threads_needs_the_row_of_each_number(tmp_path: Path) -> None:
    claim = CLAIMS["parallel-linformer"]
    rows = rows_for(claim)
    both = [replace(row, threads=threads) for row in rows for threads in (1, 2)]
    assert missing_of(read_results(written(both, tmp_path)), needed_by(claim, None)) == ()
    of_one = [row for row in both if row.threads == 1]
    missing = missing_of(read_results(written(of_one, tmp_path)), needed_by(claim, None))
    assert {one.threads for one in missing} == {2}
    assert {one.cell_id for one in missing} == {row.cell_id for row in rows}


def test_each_row_that_a_claim_names_is_in_the_committed_run_that_it_names() -> None:
    @cache
    def stored(run: str) -> dict[str, str]:
        lines = read_stored(REFERENCE / run / "records.jsonl").splitlines()
        return {row["cell_id"]: row["suite"] for row in map(json.loads, lines)}

    for id_, needed in with_rows().items():
        named = rows_by_run(rows_of(committed(), needed))
        assert sum(map(len, named.values())) == len(needed), id_
        for run, cells in named.items():
            assert set(cells) <= set(stored(run)), id_
            assert {stored(run)[cell] for cell in cells} == {CLAIMS[id_].suite}


def test_no_committed_claim_has_a_verdict_without_one_of_the_rows_that_it_names() -> None:
    for id_, needed in with_rows().items():
        one, table = CLAIMS[id_], committed()
        read = rows_of(table, needed)
        assert missing_of(table, needed) == ()  # so that what is missing below is what is lost there
        lost = read.index[len(read) // 2]
        found = judge_all_rows(one, table.drop(index=lost))
        assert (found.verdict, len(found.missing)) == ("not tested here", 1), one.id
        assert f"1 of {len(read)} rows is missing; measure it with: {one.command}" in found.evidence


def test_the_command_names_rows_by_run_and_cell_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_for(FUSED)
    assert main(["claims", str(written(rows, tmp_path)), "-k", "fused", "--json"]) == 0
    data = {one["claim"]: one for one in json.loads(capsys.readouterr().out)}
    fused, crossover = data["fused-exact"], data["crossover-5000-fused"]
    assert (fused["verdict"], fused["suite"], fused["sweeps"]) == ("holds", "claims", ["forward"])
    ((_, cells),) = fused["rows"].items()
    assert (sorted(cells), fused["missing"]) == (sorted(row.cell_id for row in rows), [])
    assert crossover["verdict"] == "not tested here"
    assert len(crossover["missing"]) == 5  # those of the performer
    assert main(["claims", str(written(rows[1:], tmp_path)), "-k", "fused-exact"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("not tested Exact attention itself")
    assert "1 of 10 rows is missing; measure it with: attnbench run claims; so far" in out
    assert "0 depend on the setting, 0 open, 1 not tested here." in out


def test_what_was_tested_and_remains_open_is_not_called_untested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["claims", str(written(rows_for(FUSED, ratio=1.0), tmp_path)), "-k", "fused-exact"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("open        Exact attention itself")
    assert "0 depend on the setting, 1 open, 0 not tested here." in out
    assert main([*words, "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "open"
