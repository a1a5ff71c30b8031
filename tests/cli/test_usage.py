"""What a user reads who has typed too little, or the wrong thing: in a fresh process, whatever typer is installed."""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.cli.usage import COMMANDS, OVERVIEW
from attnbench.errors import Exit
from attnbench.version import __version__
from tests.typed import attnbench, in_a_new_process


def test_alone_it_says_what_there_is_in_a_few_lines_of_80_columns(tmp_path: Path) -> None:
    done = attnbench(folder=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{OVERVIEW}\n")
    assert all(f"  attnbench {name}" in OVERVIEW for name in COMMANDS)
    assert max(map(len, OVERVIEW.splitlines())) < 80
    assert len(OVERVIEW.splitlines()) <= 28


@pytest.mark.parametrize("arguments", ["run", "show", "compare", "compare --n 4", "check"])
def test_a_command_without_its_arguments_says_what_is_missing(arguments: str, tmp_path: Path) -> None:
    done = attnbench(*arguments.split(), folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    name = arguments.split()[0]
    assert line.startswith(f"error: {name} needs ")
    assert "variant" in line or "suite" in line
    assert len(line) <= 2 * 80


@pytest.mark.parametrize("name", COMMANDS)
def test_the_exit_code_1_is_described_for_each_command_that_may_measure_nothing(name: str) -> None:
    command = import_module(f"attnbench.cli.{'list_' if name == 'list' else name}")
    described = inspect.getsource(Exit).partition("FAILED = 1")[2].partition("nothing could be measured")[0]
    assert (f"``{name}``" in described) == hasattr(command, "NothingMeasured")


@pytest.mark.parametrize("name", ["list", "env"])
def test_a_command_that_needs_no_arguments_answers_without_them(name: str, tmp_path: Path) -> None:
    done = attnbench(name, folder=tmp_path)
    assert (done.returncode, done.stderr.startswith("error")) == (0, False)
    assert done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_and_holds_no_markup(name: str, tmp_path: Path) -> None:
    done = attnbench(name, "--help", folder=tmp_path)
    assert done.returncode == 0
    assert f"Example: attnbench {COMMANDS[name].example}" in " ".join(done.stdout.split())
    assert "\\[" not in done.stdout
    types = re.compile(r"--\S+ +<(str|int|float|path|list)\b")
    assert not types.search(done.stdout), "what an option takes is said in words of the command line"


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_breaks_no_word_and_leaves_none_out_on_a_narrow_screen(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for columns in ("80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main([*filter(None, [name]), "--help"]) == 0
        found[columns] = capsys.readouterr().out
    assert max(map(len, found["40"].splitlines())) <= 40
    wide, slim = (re.sub(r"(?<=[|-])\s+", "", text).split() for text in (found["80"], found["40"]))
    assert slim == wide
    assert name or all(one.what in " ".join(found["80"].split()) for one in COMMANDS.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("compare a b --head-dim 0", "--head-dim must be at least 1; attnbench compare --help lists the options"),
        ("compare a b --seed 18446744073709551615", f"--seed must be at most {2**63 - 1}; attnbench compare --help"),
        ("compare a b --heads 100000000000000000000", "--heads must be at most 1048576;"),
        ("run quick --threads 100000", "--threads must be at most 4096; attnbench run --help lists the options"),
        ("score softmax --threads 99999999999", "--threads must be at most 4096;"),
        ("run quick --memory-limit 9999999T", "--memory-limit: '9999999T' is more than any machine has; write a size"),
        ("compare softmax --memory-limit 9999999T", "--memory-limit: '9999999T' is more than any machine has;"),
        ("compare a b --timeout nan", "--timeout must be"),
        ("compare a b --heads x", "--heads must be a whole number;"),
        (
            "compare a b --pass sideways",
            "--pass must be forward, backward, training, decode, stepwise or generate, not 'sideways';",
        ),
        ("list things", "the argument of list must be variants, suites, inputs or tasks, not 'things';"),
        ("run quick lra", "too many arguments: lra; attnbench run --help"),
        ("run quick --min-time", "--min-time needs a value; attnbench run --help"),
        ("run quick --devise cpu", "unknown option --devise; did you mean '--device'?;"),
        ("rum", "unknown command 'rum'; did you mean 'run'?"),
        ("zzz", "unknown command 'zzz'; there are run, plot, report, compare,"),
    ],
)
def test_what_is_wrong_is_said_in_words_of_the_command_line(arguments: str, said: str, tmp_path: Path) -> None:
    done = attnbench(*arguments.split(), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_has_a_short_flag(flag: str, tmp_path: Path) -> None:
    assert attnbench(flag, folder=tmp_path).stdout == f"attnbench {__version__}\n"


def test_env_holds_what_a_bug_report_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = in_a_new_process("env", "--json", OMP_NUM_THREADS="1", ATTNBENCH_PLUGINS="", folder=tmp_path)
    facts = json.loads(done.stdout)
    assert facts["attnbench"] == __version__
    assert {"torch", "typer", "pydantic", "numpy"} <= set(facts["dependencies"])
    assert facts["devices"]["cpu"] == ""
    assert facts["torch_threads"] == facts["default_threads"] == 1
    assert {"cpu_quota", "memory_limit_bytes"} <= set(facts)
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "OMP_NUM_THREADS=1" in text
    assert max(map(len, text.splitlines())) <= 80


def test_env_loads_no_plug_in_that_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[attnbench.variants]\nmine = no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for switch, loaded in (("", False), ("on", True)):
        monkeypatch.setenv("ATTNBENCH_PLUGINS", switch)
        assert main(["env", "--json"]) == 0
        assert ("mine" in json.loads(capsys.readouterr().out)["plugins"]) == loaded


def test_env_works_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    done = in_a_new_process("env", PYTHONPATH=str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ImportError: libtorch.so" in done.stdout
