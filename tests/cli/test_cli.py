from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from attnbench.cli import completion
from attnbench.cli.app import main
from attnbench.cli.usage import COMMANDS
from attnbench.errors import Exit, shell_word
from tests.forked import forks
from tests.typed import in_a_new_process as attnbench


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "name: tiny\nsweeps:\n  - name: w\n    measure: [time, memory, error]\n    error_draws: 1\n"
        "    matrix: {variant: [softmax, linear], seq_len: [32, 64], heads: 2, head_dim: 8}\n"
    )
    return path


_NOTHING_HEAVY = (
    "import sys; from attnbench.cli.app import main; code = main(sys.argv[1:]); assert code == 0; "
    "heavy = {'torch', 'pandas', 'matplotlib', 'numpy', 'pydantic', 'rich'} & set(sys.modules); assert not heavy, heavy"
)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["plot", "--help"], ["compare", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NOTHING_HEAVY, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_list_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"Usage: attnbench {name}" in capsys.readouterr().out


def test_help_reads_no_command_but_the_one_that_is_meant() -> None:
    code = (
        "import sys; from attnbench.cli.app import main; from attnbench.cli.usage import COMMANDS; "
        "main(['list', '--help']); "
        "read = {name for name in (*COMMANDS, 'list_') if f'attnbench.cli.{name}' in sys.modules}; "
        "assert read == {'list_'}, read"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_completion_knows_every_shipped_name_without_torch() -> None:
    code = (
        "import json, sys; from attnbench.cli import completion as c; "
        "print(json.dumps([c.variants(''), c.suites(''), c.names(''), c.laws(''), c.figures(''), c.axes('')])); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    variants, suites, names, laws, figures, axes = json.loads(done.stdout)

    from attnbench.contract.inputs import INPUTS
    from attnbench.contract.task import TASKS
    from attnbench.contract.variant import VARIANTS
    from attnbench.figures import figure_kinds
    from attnbench.laws import LAWS, laws_named
    from attnbench.suite.axes import AXES
    from attnbench.suite.load import shipped_suites

    shipped = {entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.")}  # not of other tests
    assert set(variants) == shipped
    assert suites == shipped_suites()
    tasks = {entry.name for entry in TASKS if entry.make.__module__.startswith("attnbench.")}
    assert sorted(names) == sorted(shipped | set(INPUTS.names()) | tasks)
    assert [shlex.split(law) for law in laws] == [[law] for law in laws]  # words that no shell splits or closes
    assert laws_named(laws) == [name for law in laws for name in LAWS if law == shell_word(name)]
    assert len(laws) == len(LAWS)
    assert set(figures) == set(figure_kinds())
    assert axes == [f"{axis}=" for axis in AXES]
    assert completion.variants("perf") == ["performer"]


def test_completion_knows_every_option_of_what_is_shipped() -> None:
    from attnbench.contract.inputs import INPUTS
    from attnbench.contract.task import TASKS
    from attnbench.contract.variant import VARIANTS

    every = ((completion.variants, VARIANTS), (completion.inputs, INPUTS), (completion.tasks, TASKS))
    for complete, entries in every:
        for entry in entries:
            if entry.make.__module__.startswith("attnbench."):  # not of other tests
                assert complete(f"{entry.name}:") == [f"{entry.name}:{option}=" for option in entry.options]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("compare perf", "performer"),
        ("compare --heads 4 softmax perf", "performer"),
        ("match perf", "performer"),
        ("compare perf --batch 2 --n 64 --de", "--device"),
        ("run sca", "scaling"),
        ("list sui", "suites"),
        ("compare performer:fea", "performer:features="),
        ("compare performer : fea", "features="),
        ("compare performer:features=3,ker", "performer:features=3,kernel="),
        ("compare performer : features = 3,ker", "3,kernel="),
        ("run quick --set seq", "seq_len="),
        ("run quick --set variant=performer:fea", "variant=performer:features="),
        ("run quick --set variant = perf", "performer"),
        ("run quick --set inputs=gau", "inputs=gaussian"),
        ("compare softmax linear --inputs gaussian:l", "gaussian:logit_std="),
        ("check performer --law caus", "causality"),
        ("check performer --law shape", "shape-and-type"),
        ("plot results --figure tra", "tradeoff"),
        ("plo", "plot"),
    ],
)
def test_the_shell_completes_without_importing_anything_heavy(words: str, expected: str) -> None:
    typed = f"attnbench {words}"
    asked = {"_ATTNBENCH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", _NOTHING_HEAVY], capture_output=True, text=True, env=os.environ | asked, check=False
    )
    assert done.returncode == 0, done.stderr
    # After "=" bash must not put a space, as it does after what seems the only way to go on.
    assert done.stdout.split() == [expected, *([f"{expected}VALUE"] if expected.endswith("=") else [])]


def test_a_suite_is_run_planned_stored_and_drawn(suite: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "results")
    options = ["--out", out, "--min-time", "0.001", "--rounds", "1", "--device", "cpu", "--threads", "1", "--unchecked"]
    done = attnbench("run", str(suite), *options)
    assert done.returncode == 0, done.stderr
    assert "tiny: 4 cells on cpu" in done.stdout
    (table,) = Path(out).glob("tiny/*/results.csv")
    assert f"results: {table}" in done.stdout.replace("\n", "").replace("results:", "results: ").replace("  ", " ")
    with forks():
        drawn, again = attnbench("plot", out), attnbench("run", str(suite), *options)
    assert drawn.returncode == 0, drawn.stderr
    assert (table.parent / "plots" / "tradeoff.svg").read_text().startswith("<?xml")
    assert (table.parent / "plots" / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    assert again.returncode == 0
    assert "4 of 4 cells have rows (--retry-failed" in again.stderr


@pytest.mark.usefixtures("forks")
def test_a_dry_run_predicts_and_writes_nothing(suite: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = attnbench("run", str(suite), "--dry-run", "--out", str(out), "--set", "seq_len=64,262144")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^4 cells: \d fit, \d will not fit; nothing was run$", done.stdout, re.MULTILINE)
    assert "nothing was run" in done.stdout
    assert not out.exists()


@pytest.mark.usefixtures("forks")
def test_compare_prints_ratio_verdict_memory_error_and_crossover(tmp_path: Path) -> None:
    csv, figure = tmp_path / "c.csv", tmp_path / "c.svg"
    arguments = ["compare", "softmax", "linear", "--n", "64..128", "--heads", "2", "--head-dim", "8"]
    done = attnbench(*arguments, "--min-time", "0.01", "--csv", str(csv), "--plot", str(figure), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "ratio: time / time of softmax" in done.stdout
    assert re.search(r"^crossover: ", done.stdout, re.MULTILINE)
    assert "peak memory" in done.stdout
    assert csv.read_text().startswith("a,b,seq_len,verdict,ratio")
    assert figure.is_file()
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.usefixtures("forks")
def test_compare_json_is_json(tmp_path: Path) -> None:
    arguments = ["compare", "identity", "mean-value", "--n", "64", "--json", "--min-time", "0.01", "--device", "cpu"]
    data = json.loads(attnbench(*arguments).stdout)
    assert {row["verdict"] for row in data["rows"]} <= {"faster", "slower", "same", "inconclusive", "withheld"}
    assert data["crossovers"][0]["seq_len"] is None
    assert data["comparisons"] == 1
    assert data["environment"]["variables"]["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("what", ["variants", "suites", "inputs"])
def test_list_has_a_table_and_json(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what]) == 0
    assert capsys.readouterr().out
    assert main(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["name"] for row in rows)


def test_the_list_marks_what_takes_no_longer_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    told = capsys.readouterr()
    marked = {line.split()[0].rstrip("†") for line in told.out.splitlines() if "≤" in line}
    assert {"linformer", "synthesizer", "gmlp", "mlp-mixer"} <= marked
    assert not marked & {"softmax", "performer", "linear", "lstm"}
    assert max(map(len, told.out.splitlines())) <= 80
    assert "≤: takes no longer sequences than it was made for" in told.err


def test_show_names_paper_formula_cost_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "performer", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "2009.14794" in data["source"]
    assert {option["name"] for option in data["options"]} >= {"features", "kernel", "beta"}
    assert all(option["meaning"] for option in data["options"])
    assert main(["show", "performer"]) == 0
    assert "Choromanski" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "lar"], "unknown suite 'lar'; did you mean 'lra'?"),
        (["run", "nothere.yaml"], "nothere.yaml: no such file; check the path"),
        (["run", "quick", "--set", "seqlen=12"], "unknown axis 'seqlen'; did you mean 'seq_len'?"),
        (["run", "quick", "--dtype", "int8"], "error: --dtype: 'dtype' cannot be 'int8'; write float64"),
        (["run", "quick", "--seed", str(2**63)], "error: --seed: 'seed' must lie between 0 and"),
        (["run", "quick", "--set", "dtype=int8"], "error: --set dtype: 'dtype' cannot be 'int8'; write float64"),
        (["run", "quick", "--set", "variant=perfomer"], "did you mean 'performer'?"),
        (["run", "quick", "-k", "nothing-like-it"], "no cell has 'nothing-like-it'"),
        (["run", "quick", "-k", "(a"], "-k"),
        (["run", "quick", "--device", "tpu"], "no device 'tpu' on this machine"),
        (["run", "quick", "--memory-limit", "lots"], "--memory-limit: 'lots' is not a size"),
        (["run", "quick", "--memory-limit", "9" * 400], "is not a size"),
        (["run", "quick", "--cell-timeout", "nan"], "--cell-timeout must be at most"),
        (["run", "quick", "--min-time", "inf"], "--min-time must be at most 3600"),
        (["compare", "softmax", "linear", "--timeout", "nan"], "--timeout must be"),
        (["run", "quick", "--plugin", "nothere.py"], "plug-in nothere.py: no such file"),
        (["compare", "performer", "linfromer"], "unknown variant 'linfromer'; did you mean 'linformer'?"),
        (["compare", "performer:feature=3", "linear"], "unknown option 'feature'; did you mean 'features'?"),
        (["compare", "performer:features=0", "linear"], "option features=0 must be at least 1"),
        (["compare", "performer", "linear", "--inputs", "gausian"], "did you mean 'gaussian'?"),
        (["compare", "performer", "linear", "--plot", "x.gif"], "must end in .svg, .png or .pdf"),
        (["show", "perfomer"], "unknown variant 'perfomer'; did you mean 'performer'?"),
        (["plot", "nothere"], "nothere"),
        (["plot", "--format", "gif"], "choose from svg, png, pdf"),
        (["compare", "softmax", "linear", "--head-dim", "0"], "--head-dim must be at least 1"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == Exit.USAGE
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("error: ")
    assert len(said.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("forks")
def test_a_terminal_without_unicode_or_colour_changes_only_the_looks() -> None:
    plain = attnbench("show", "softmax", PYTHONIOENCODING="utf-8").stdout
    assert "√" in plain
    for encoding, environment in (
        ("ascii", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}),
        ("cp1252", {"PYTHONIOENCODING": "cp1252"}),
        ("utf-8", {"NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}),
    ):
        done = attnbench("show", "softmax", **environment)
        assert done.returncode == 0, done.stderr
        seen = plain.encode(encoding, "replace").decode(encoding)
        assert done.stdout == seen.encode(encoding).decode("utf-8", "replace")
