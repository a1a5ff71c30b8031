"""``attnbench swap`` and ``attnbench capture`` as commands: what they refuse, print, write and return."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from attnbench.cli.app import main
from attnbench.errors import Exit
from tests.models.pretrained import models
from tests.models.pretrained.test_swap import forget

pytestmark = pytest.mark.usefixtures("forks")
QUICK = ["--length", "24", "--windows", "6", "--device", "cpu", "--threads", "1"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("attnbench.models.pretrained.models.OwnEncoder", models.tiny)
    forget()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["swap", "listops"], "swap needs --variant; for example: attnbench swap listops --variant performer"),
        (["swap", "listopps", "-v", "local"], "no model 'listopps'; give a folder with config.json"),
        (["swap", "listops", "-v", "perfomer"], "unknown variant 'perfomer'; did you mean 'performer'?"),
        (["swap", "listops", "-v", "local", "--layers", "x"], "--layers 'x': 'x' is no layer"),
        (["swap", "listops", "-v", "local", "--layers", "7"], "--layers 7: the model has 3 layers, counted from 0"),
        (
            ["swap", "listops", "-v", "local", "--steps", "many"],
            "--steps: 'many' is not a number or a range; write 1024",
        ),
        (["swap", "listops", "-v", "local", "--windows", "5"], "--windows 5: below 6 no interval"),
        (["swap", "listops", "-v", "local", "--lr", "2"], "--lr must be above 0 and at most 1, got 2"),
        (["swap", "listops", "-v", "local", "--text", "t.txt"], "the model listops reads trees of ListOps"),
        (["swap", "listops", "-v", "local", "--plot", "f.gif"], "--plot f.gif: the name must end in .svg"),
        (["capture", "listops", "--layers", "each"], "--layers 'each': each means nothing here"),
        (["capture", "listops", "--gates"], "the model listops has attention alone; remove --gates"),
        (["capture", "listops", "--layers", "9"], "--layers 9: the model has 3 layers, counted from 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == Exit.USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("results/swap/*"))


def test_it_prints_the_answer_in_80_columns_and_writes_rows_and_a_figure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["swap", "listops", "-v", "performer:features=8,kernel=positive", "-v", "local:window=8", "-v", "fnet"]
    more = ["--steps", "0,2", "--layers", "all,each", "--csv", "rows.csv", "--plot", "swap.svg"]
    assert main([*words, *QUICK, *more]) == Exit.OK
    told = capsys.readouterr()
    assert max(map(len, told.out.splitlines()[:-1])) <= 80
    assert told.out.startswith("listops: 3 layers, 2 × 8, full; 6 windows of 24 tokens\n")
    for said in ("all replaced together", "trained as long", "one layer replaced", "fnet: unsupported: a mixer"):
        assert said in told.out
    assert "none: nothing is replaced" in told.err
    with Path("rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["label"] for row in rows} >= {"sdpa", "none", "mean-value", "local:window=8", "fnet"}
    assert Path("swap.svg").stat().st_size > 5000
    assert main([*words, *QUICK, *more, "--json"]) == Exit.OK
    again = capsys.readouterr()
    assert "have rows (--fresh repeats all)" in again.err
    stored = json.loads(again.out)
    assert [row["label"] for row in stored] == [row["label"] for row in rows]


@pytest.mark.parametrize(("layers", "said"), [("0", "layers 0"), ("0,2", "layers 0,2")])
def test_the_table_names_the_layers_that_were_replaced(
    layers: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["swap", "listops", "-v", "local:window=8", "--layers", layers, *QUICK]) == Exit.OK
    out = capsys.readouterr().out
    assert f"replaced: {said}\n" in out
    assert "all replaced together" not in out


def test_a_dry_run_says_what_all_would_take_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["swap", "listops", "-v", "local:window=8", "--steps", "0,2", "--batch", "3", *QUICK, "--dry-run"]
    assert main(words) == Exit.OK
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["listops: 3 layers, 2 × 8, full; 6 windows of 24 tokens", "7 rows"]
    assert told[2].startswith("79 windows to read, 18 to train on, ")
    assert told[3].startswith("about ")
    assert told[4] == "nothing was replaced"
    assert not list(tmp_path.iterdir())
    assert main([*words, "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["resumed"], found["windows_trained"]) == (7, 0, 18)


def test_the_code_is_1_where_no_variant_could_be_put_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swap", "listops", "-v", "fnet", *QUICK]) == Exit.FAILED
    assert "no variant could be put in; reasons: results" in capsys.readouterr().err


def test_a_suite_measures_errors_on_what_was_captured() -> None:
    few = [*QUICK[:4], "--layers", "all", "--device", "cpu", "--out", "x.safetensors"]
    assert main(["capture", "listops", *few]) == Exit.OK
    written = Path("x.safetensors").read_bytes()
    Path("s.yaml").write_text(
        "name: s\nsweeps:\n  - name: e\n    measure: error\n    matrix: {variant: [softmax, mean-value], "
        "inputs: 'file:path=x.safetensors', seq_len: 24, heads: 2, head_dim: 8, causal: [false, true]}\n"
    )
    assert main(["run", "s.yaml", "--device", "cpu", "--threads", "1"]) == Exit.OK
    (table,) = Path("results/s").glob("*/results.csv")
    with table.open(encoding="utf-8", newline="") as file:
        rows = {(row["variant"], row["causal"]): row for row in csv.DictReader(file)}
    assert float(rows["softmax", "false"]["rel_error"]) < 1e-5
    assert float(rows["mean-value", "false"]["rel_error"]) > 0.05
    assert "captured from attention that is not causal" in rows["softmax", "true"]["warnings"]
    assert "captured from" not in rows["softmax", "false"]["warnings"]
    assert main(["capture", "listops", *few]) == Exit.OK
    assert Path("x.safetensors").read_bytes() == written, "the digest stays"


def test_a_model_that_ends_its_process_or_raises_what_nobody_foresaw_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def at_once(_: int) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def odd(_: int) -> None:
        raise LookupError("nobody thought of it")

    monkeypatch.setattr("attnbench.models.pretrained.models.OwnEncoder", at_once)
    assert main(["capture", "listops"]) == Exit.USAGE
    assert capsys.readouterr().err == "error: listops: the measuring process was killed by SIGSEGV\n"
    monkeypatch.setattr("attnbench.models.pretrained.models.OwnEncoder", odd)
    assert main(["capture", "listops"]) == Exit.FAILED
    (told,) = capsys.readouterr().err.splitlines()
    found = re.fullmatch(r"error: unforeseen error: LookupError: nobody thought of it; please send (\S+), .*", told)
    assert found
    assert "in odd" in Path(found[1]).read_text()
    Path(found[1]).unlink()


def test_capture_writes_a_file_and_says_how_a_suite_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "listops", *QUICK[:4], "--layers", "all", "--device", "cpu", "--out", "x.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "x.safetensors: 6 windows, 3 layers, 2 heads of 8, 24 tokens" in out
    assert "inputs: file:path=x.safetensors, seq_len: 24, heads: 2, head_dim: 8, causal: false" in out
    assert main(["capture", "listops", *QUICK[:4], "--device", "cpu", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["file"], about["shape"]) == ("qkv.safetensors", [6, 3, 2, 24, 8])


def test_a_captured_file_says_what_it_holds_and_how_a_suite_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "listops", *QUICK[:4], "--layers", "all", "--device", "cpu", "--out", "x.safetensors"]) == 0
    written = capsys.readouterr().out.splitlines()
    assert main(["list", "inputs", "--file", "x.safetensors"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "model: listops"
    assert told[-1] == written[-1], "the line for a suite"
    layers = [line for line in written if " to " in line and "full" in line]
    assert len(layers) == 3
    assert all(line in told for line in layers)
    assert main(["list", "inputs", "--file", "x.safetensors", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["shape"], about["model"], len(about["logit_std"][0])) == ([6, 3, 2, 24, 8], "listops", 2)


def test_a_file_without_metadata_has_a_shape_and_no_file_no_line_but_one(capsys: pytest.CaptureFixture[str]) -> None:
    save_file({name: torch.ones(1, 1, 4 if name == "q" else 2, 8, 16) for name in "qkv"}, "own.safetensors")
    assert main(["list", "inputs", "--file", "own.safetensors"]) == 0
    told = capsys.readouterr().out
    assert "no metadata of attnbench capture" in told
    assert "inputs: file:path=own.safetensors, seq_len: 8, heads: 4, kv_heads: 2, head_dim: 16" in told
    for words in (["inputs", "--file", "none.safetensors"], ["variants", "--file", "own.safetensors"]):
        assert main(["list", *words]) == Exit.USAGE
        assert capsys.readouterr().err.count("\n") == 1
