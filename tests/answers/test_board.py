"""A board takes runs that are as they were written and rows whose laws held, names the rest, and mixes no machines."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import attnbench
from attnbench.answers.board import entries
from attnbench.answers.board.entries import read_runs
from attnbench.answers.board.site import INDEX, exact_labels, make_site, shape_of, write_site
from attnbench.answers.report import html_page
from attnbench.cli.app import main
from attnbench.errors import AttnbenchError, CannotCreate, Exit, ResultsError
from attnbench.results.audit import audit
from attnbench.results.frame.settings import records
from attnbench.results.manifest import read_manifest, write_manifest
from attnbench.results.read import read_results
from attnbench.results.store import ENVIRONMENT, RECORDS, RunFolder
from tests.answers.fixture_runs import Row, environment, write_run
from tests.answers.report.chromium import PROGRAM, Chromium
from tests.answers.report.reading import REFERENCE, Read

Captured = pytest.CaptureFixture[str]
LENGTHS = (64, 128, 256, 512)
FAST = "sdpa"
"""The best exact kernel of these runs: half of softmax's time."""
NEAR = "local:block=16"


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures, which take seconds and have tests of their own."""
    if "telephone" not in request.node.name:
        monkeypatch.setattr(html_page, "draw_views", lambda rows, views, shared: ([], ("", 0)))


def rows(law: str = "held", crossing: float = 180, lengths: Sequence[int] = LENGTHS, **columns: Any) -> list[Row]:
    """Exact rows with n² times, and linear, which takes as long as the better of them at the length ``crossing``."""
    kinds = {"softmax": ("", None), FAST: ("", None), "linear": ("distance", 0.7), NEAR: ("approximation", 0.05)}
    found = []
    for n in lengths:
        best = 1e-8 * n**2
        taken = (2 * best, best, 1e-8 * crossing * n, 2.2e-8 * crossing * n)
        for (name, (kind, error)), seconds in zip(kinds.items(), taken, strict=True):
            told = {"laws": law, "error_kind": kind, "rel_error": error, "examples_per_s": 1 / seconds, **columns}
            found.append(Row(name, n, seconds, columns=told, sweep="-".join(["w", *columns])))
    return found


def write(
    path: Path, given: Sequence[Row] | None = None, started: str = "2026-03-01T12:00:00+00:00", **facts: Any
) -> Path:
    known = {"started_at": started, "attnbench": "0.1.0", "noise_floor": 0.01, "run_key": path.name}
    return write_run(path, rows() if given is None else given, about={**environment(**facts), **known})


def site_of(*folders: Path) -> dict[str, str]:
    return make_site(*read_runs(folders))


def page_of(site: dict[str, str]) -> Read:
    (name,) = site.keys() - {INDEX}
    return Read(site[name])


def left_out(*folders: Path) -> dict[str, str]:
    return {one.run: f"{one.what}: {one.why}" for one in read_runs(folders)[1]}


def test_the_headline_is_the_crossover_with_the_best_exact_kernel_and_not_with_softmax(tmp_path: Path) -> None:
    site = site_of(write(tmp_path / "a"))
    index, shown = Read(site[INDEX]).text, page_of(site)
    (n,) = re.findall(r"From n = (\d+) \(128 to 256\) on, up to n = 512, linear , sub-quadratic variant", shown.text)
    assert 150 < int(n) < 215, "softmax would be passed at 90"
    said = f"linear , sub-quadratic variant (error: 0.7 *), beats the best exact kernel, {FAST}."
    assert said in shown.text
    near = rf"From n = (\d+) \(256 to 512\) on, {NEAR} , approximation within an error of 0.1 \(error: 0.05\), beats"
    (close,) = re.findall(near, shown.text)
    assert 330 < int(close) < 470
    assert said in index
    told = {row["label"].removesuffix("†"): row["ratio"].partition(" ")[2] for row in shown.rows if row["n"] == "512"}
    assert told == {"softmax": FAST, FAST: "", "linear": FAST, NEAR: FAST}


def test_two_machines_have_sections_of_their_own_and_no_ratio_crosses_them(tmp_path: Path) -> None:
    only_exact = [row for row in rows() if row.variant != "linear" and not row.variant.startswith("local")]
    runs = [
        write(tmp_path / "here", processor="Here"),
        write(tmp_path / "there", only_exact, processor="There"),
        write(tmp_path / "other", rows(crossing=4000), processor="Here", torch="2.14.0"),
    ]
    site = site_of(*runs)
    shown = page_of(site)
    assert [*map(len, shown.sections)] == [16, 16, 8]
    (name,) = site.keys() - {INDEX}
    headings = re.findall(r'<h2 class="name">(.*?)</h2>', site[name])
    assert [one.rpartition(", ")[2] for one in headings] == ["here", "other", "there"]
    text = shown.text
    assert text.count("From n = ") == 2
    none = "No sub-quadratic variant is shown to beat the best exact kernel, sdpa, at n = 512"
    for told in (text, Read(site[INDEX]).text):
        assert f"Here, 1 thread, other {none}" in told
        assert "There, 1 thread, there No sub-quadratic variant was measured beside an exact kernel" in told


@pytest.mark.parametrize(
    ("law", "why"),
    [
        ("causality", "the law causality is broken: softmax, sdpa, linear, local:block=16"),
        ("unchecked", "measured with --unchecked"),
        ("not tried", "laws not tried"),
        ("", "rows of an older attnbench do not say whether the laws held"),
    ],
)
def test_rows_whose_laws_did_not_hold_are_left_out_and_named(tmp_path: Path, law: str, why: str) -> None:
    good, bad = write(tmp_path / "good"), write(tmp_path / "bad", rows(law, lengths=[64]))
    mixed = write(tmp_path / "mixed", [*rows(lengths=[64, 128]), *rows(law, lengths=[256])])
    found = left_out(good, bad, mixed)
    assert all(one.startswith("4 rows: ") and why in one for one in found.values())
    assert [*found] == ["bad", "mixed"]
    site = site_of(good, bad, mixed)
    assert [*map(len, page_of(site).sections)] == [16, 8]
    assert why.partition(":")[0] in Read(site[INDEX]).text


def damage(run: Path) -> None:
    file = run / RECORDS
    file.write_text(file.read_text().replace('"time_median_s": ', '"time_median_s": 9', 1))


def other_schema(run: Path) -> None:
    write_manifest(run / ENVIRONMENT, {**read_manifest(run / ENVIRONMENT), "schema_version": 9})


def lose_rows(run: Path) -> None:
    (run / RECORDS).unlink()


def unseal(run: Path) -> None:
    facts = json.loads((run / ENVIRONMENT).read_text())
    (run / ENVIRONMENT).write_text(
        json.dumps({name: one for name, one in facts.items() if name not in ("seal", "schema_version")})
    )
    lines = [json.loads(line) for line in (run / RECORDS).read_text().splitlines()]
    (run / RECORDS).write_text(
        "".join(json.dumps({name: one for name, one in line.items() if name != "seal"}) + "\n" for line in lines)
    )
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "samples.jsonl").write_text(
        "".join(json.dumps({name: one for name, one in line.items() if name != "seal"}) + "\n" for line in samples)
    )
    (run / "results.csv").unlink()
    RunFolder(run).write_csv(list(RunFolder(run).records().values()))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (damage, "records.jsonl:1: this line was changed"),
        (other_schema, "schema_version 9, this attnbench reads"),
        (lose_rows, "has no row in records.jsonl; and "),
        (unseal, "nothing vouches for them"),
    ],
)
def test_a_run_that_is_not_as_it_was_written_is_named_with_the_reason(
    tmp_path: Path, how: Any, why: str, capsys: Captured
) -> None:
    good, bad = write(tmp_path / "all" / "good"), write(tmp_path / "all" / "bad", started="2026-03-02T12:00:00+00:00")
    how(bad)
    assert main(["board", str(tmp_path / "all"), "--out", str(tmp_path / "site")]) == Exit.OK
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'site' / INDEX}\n"
    (line,) = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert line.startswith("warning: left out: bad, all rows: ")
    shown = Read((tmp_path / "site" / INDEX).read_text()).text
    assert why in shown
    assert str(tmp_path) not in shown
    assert "good" in shown
    assert main(["submit", str(bad), "--to", str(tmp_path / "runs")]) != Exit.OK
    said = "holds no run" if how is lose_rows else why
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["board", str(bad), "--out", str(tmp_path / "no")]) == Exit.USAGE
    assert not (tmp_path / "no").exists()
    assert good.is_dir()


def test_a_folder_without_runs_a_copy_and_a_name_that_is_wrong(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    good = write(tmp_path / "good")
    shutil.copytree(good, tmp_path / "twice")
    assert left_out(tmp_path / "empty", good, tmp_path / "twice", good) == {
        "empty": "folder: holds no run",
        "twice": "all rows: a copy of good",
    }
    for wrong, said in ((tmp_path / "empty", "empty: folder: holds no run"), (tmp_path / "none", "no such folder")):
        assert main(["board", str(wrong), "--out", str(tmp_path / "site")]) == Exit.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert not (tmp_path / "site").exists()


def test_few_rounds_and_a_single_sample_give_no_verdict(tmp_path: Path) -> None:
    about = {**environment(), "started_at": "2026-03-01T12:00:00+00:00"}
    run = write_run(tmp_path / "run", rows(), about=about, rounds=1)
    text = page_of(site_of(run)).text
    assert "No sub-quadratic variant has a verdict against the best exact kernel, sdpa, at n = 512" in text
    assert "beats" not in text


def test_faster_from_the_first_length_on_has_no_interval_below_it(tmp_path: Path) -> None:
    text = page_of(site_of(write(tmp_path / "run", rows(crossing=10)))).text
    assert "From n = 64 or less on, up to n = 512, linear" in text


def test_exact_kernels_are_those_that_compute_softmax_attention_itself() -> None:
    frame = read_results(REFERENCE / "catalogue-cpu")
    labels = exact_labels(frame)
    assert {"softmax", "sdpa", "chunked"} <= labels
    assert not {one for one in labels if one.startswith(("mla", "quantised", "linear", "local"))}


def test_a_shape_says_all_that_is_unusual_and_keeps_unlike_rows_apart(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [*rows(), *rows(causal=True), *rows(dtype="bfloat16")])
    frame = records(read_results(run))
    plain = "Batch 1, 2 heads × 8, not causal, float32, forward pass, attention operator"
    assert {shape_of(row) for row in frame} == {plain, plain.replace("not ", ""), plain.replace("float32", "bfloat16")}
    site = site_of(run)
    assert len(site) == 4
    index = Read(site[INDEX])
    assert {
        str(given["href"]) for tag, given in index.elements if tag == "a" and given.get("class") != "skip"
    } == site.keys() - {INDEX}


def test_the_pages_fetch_nothing_and_foreign_text_stays_text(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    run = write(tmp_path / hostile.replace("/", ""), processor=hostile)
    for text in site_of(run).values():
        assert "<img" not in text
        assert re.findall(r"https?:[^\s\"'`<>)]*", text) == []
        assert "default-src 'none'" in text


def test_a_board_is_written_anew_and_nothing_else_is_touched(tmp_path: Path, capsys: Captured) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other", rows(dtype="bfloat16"), processor="Other")
    site = tmp_path / "site"
    command = ["--out", str(site)]
    assert main(["board", str(one), str(other), *command]) == Exit.OK
    before = {file.name: file.read_bytes() for file in site.iterdir()}
    assert len(before) == 3
    (site / "report.html").write_text('<!doctype html><html lang="en">')
    (site / "CNAME").write_text("x")
    assert main(["board", str(one), str(other), *command]) == Exit.OK
    assert {name: (site / name).read_bytes() for name in before} == before, "the same runs give the same bytes"
    assert main(["board", str(one), *command]) == Exit.OK
    assert {file.name for file in site.iterdir()} >= {INDEX, "report.html", "CNAME"}
    assert len([*site.iterdir()]) == 4
    (site / INDEX).write_text("mine")
    capsys.readouterr()
    assert main(["board", str(one), *command]) == Exit.CANNOT_CREATE
    assert "is no page of a board" in capsys.readouterr().err
    assert (site / INDEX).read_text() == "mine"


SECRETS = {
    "/home/jane.doe/data/x.bin": "~/data/x.bin",
    "/Users/jane/x": "~/x",
    "/root/.cache/y": "~/.cache/y",
    "C:\\\\Users\\\\Jane\\\\z": "~",
    "hf_abcdefghijklmnopqrstuv": "***",
    "ghp_0123456789abcdefghij": "***",
    "https://jane:pass@host/x": "https://***@host/x",
    "API_KEY=abcdefghijkl": "API_KEY=***",
}


def test_what_is_handed_in_verifies_shows_the_same_and_says_nothing_private(tmp_path: Path, capsys: Captured) -> None:
    text = " ".join(SECRETS)
    given = rows(reason="", warnings=f"seen in {text}")
    about = {
        **environment(),
        "started_at": "2026-03-01T12:00:00+00:00",
        "process_notes": [text],
        "input_files": {"/home/jane.doe/f": "ab"},
    }
    run = write_run(tmp_path / "run", given, about=about, suite=f"s # {text}")
    assert main(["submit", str(run), "--to", str(tmp_path / "runs")]) == Exit.OK
    (folder,) = (tmp_path / "runs").iterdir()
    assert capsys.readouterr().out == f"{folder}\n"
    assert folder.name == "20260301T120000-some-processor-1-thread"
    assert {file.name for file in folder.iterdir()} == {
        "environment.json",
        "records.jsonl.xz",
        "results.csv.xz",
        "suite.yaml",
    }
    found = audit(folder)
    assert (found.findings, found.notes, found.is_sealed, found.rows) == ([], [], True, 16)
    mine, theirs = read_results(run), read_results(folder)
    numbers = mine.select_dtypes("float").columns
    assert mine[numbers].equals(theirs[numbers])
    said = [json.dumps(found.environment), (folder / "suite.yaml").read_text(), *theirs["warnings"]]
    for one in said:
        assert not re.search(r"jane|/root|hf_abc|ghp_|abcdefgh", one, re.IGNORECASE)
    assert all(instead in said[-1] for instead in SECRETS.values())
    assert [*left_out(run, folder).values()] == ["all rows: a copy of run"]
    assert site_of(folder).keys() == site_of(run).keys()
    assert main(["submit", str(run), "--to", str(tmp_path / "runs")]) == Exit.CANNOT_CREATE
    assert "was handed in before" in capsys.readouterr().err


def test_from_python_it_is_the_same_folder_and_the_same_site(tmp_path: Path) -> None:
    run, few = write(tmp_path / "run"), write(tmp_path / "few", rows("unchecked"))
    folder, left = attnbench.submit(str(run), str(tmp_path / "runs"))
    assert (folder.parent, left) == (tmp_path / "runs", [])
    index, left = attnbench.board([folder, str(few)], tmp_path / "site")
    assert [one.run for one in left] == ["few"]
    assert {file.name: file.read_text() for file in index.parent.iterdir()} == site_of(folder, few)
    (tmp_path / "file").touch()
    for option, call in (("--to", attnbench.submit), ("--out", attnbench.board)):
        with pytest.raises(AttnbenchError, match=rf"choose another folder with {option}$"):
            call(run, tmp_path / "file")


def test_runs_of_like_machines_begun_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second = (attnbench.submit(write(tmp_path / name), runs)[0] for name in ("one", "two"))
    assert second.name.startswith(f"{first.name}-")
    for name in ("one", "two"):
        with pytest.raises(CannotCreate, match="was handed in before"):
            attnbench.submit(tmp_path / name, runs)


def test_a_folder_that_cannot_be_finished_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(entries, "replace_file", full)
        with pytest.raises(AttnbenchError, match="No space left on device; make room"):
            attnbench.submit(run, tmp_path / "runs")
    assert not [*(tmp_path / "runs").iterdir()]
    assert attnbench.submit(run, tmp_path / "runs")[0].is_dir()


def test_what_a_killed_submit_leaves_is_no_run_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = write(tmp_path / "run"), tmp_path / "runs"

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(entries, "replace_file", kill)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if it were SIGKILL
        with pytest.raises(KeyboardInterrupt):
            attnbench.submit(run, runs)
    (left,) = runs.iterdir()
    assert audit(left).rows == 16
    assert left_out(run, runs) == {"runs": "folder: holds no run"}
    folder, _ = attnbench.submit(run, runs)
    assert {*runs.iterdir()} == {left, folder}
    assert left_out(runs) == {}


def test_a_suite_changed_after_it_was_handed_in_is_found(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    assert main(["submit", str(run), "--to", str(tmp_path / "runs")]) == Exit.OK
    (folder,) = (tmp_path / "runs").iterdir()
    facts = read_manifest(folder / ENVIRONMENT)
    write_manifest(folder / ENVIRONMENT, {**facts, "suite_digest": "0" * 16})
    assert audit(folder).findings
    with pytest.raises(ResultsError, match="is not the suite that was run"):
        read_runs([folder])


def test_a_run_of_which_a_board_shows_nothing_is_not_handed_in(tmp_path: Path, capsys: Captured) -> None:
    run = write(tmp_path / "run", rows("unchecked"))
    assert main(["submit", str(run), "--to", str(tmp_path / "runs")]) == Exit.USAGE
    assert "measured with --unchecked" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.timeout(600)
def test_index_and_page_fit_a_telephone_and_lead_to_each_other(tmp_path: Path) -> None:
    site = tmp_path / "site"
    runs = [str(write(tmp_path / name, processor=name)) for name in ("Here", "There")]
    assert main(["board", *runs, "--out", str(site)]) == Exit.OK
    browser = Chromium(tmp_path / "profile")
    try:
        for style in ("light", "dark"):
            browser.media(prefers_color_scheme=style)
            for width in (1280, 390):
                browser.size(width)
                browser.open(site / INDEX)
                assert browser.ask("document.documentElement.scrollWidth") == width
                browser.click("h3 a")
                browser.settle()
                browser.open(next(file for file in site.iterdir() if file.name != INDEX))
                assert browser.ask("document.documentElement.scrollWidth") == width
                assert browser.ask("document.querySelector('header a').getAttribute('href')") == INDEX
        assert browser.said == []
        assert [one for one in browser.asked if not one.startswith("file:")] == []
    finally:
        browser.close()


def test_a_folder_that_is_called_like_a_page_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.html").mkdir()
    write_site(tmp_path, {INDEX: "a page"})
    assert (tmp_path / INDEX).read_text() == "a page"
    assert (tmp_path / "notes.html").is_dir()
