"""``attnbench compare`` as a user meets it, in a process of its own."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from attnbench.cli.app import main
from attnbench.cli.compare import _time_rows, _without_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import Exit
from attnbench.harness.compare import compare as compare_module
from attnbench.harness.compare.compare import CompareRow, Comparison, Side
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.forked import forks
from tests.typed import attnbench

QUICK = ["--heads", "2", "--head-dim", "8", "--min-time", "0.01", "--device", "cpu", "--threads", "1", "--unchecked"]
NEVER_FASTER = '''
import torch
from attnbench import register


@register("{name}", family="reference", source="-", formula="V", cost="O(n)")
class Raises(torch.nn.Module):
    """Cannot run."""

    def __init__(self, shape):
        super().__init__()

    def forward(self, q, k, v, *, key_mask=None):
        raise RuntimeError("not today")
'''


compare = partial(attnbench, "compare")


@pytest.fixture
def broken(tmp_path: Path) -> list[str]:
    """Options that load two variants that cannot run."""
    options = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.py"
        path.write_text(NEVER_FASTER.format(name=name))
        options += ["--plugin", str(path)]
    return options


@pytest.mark.parametrize("arguments", [[], ["--n", "4"]])
def test_without_a_variant_it_says_what_is_missing_and_gives_an_example(arguments: list[str]) -> None:
    done = compare(*arguments)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert "compare needs a variant, or several to be held against the first: attnbench compare" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variants", "same"),
    [
        (["softmax", "softmax"], "softmax and softmax are the same variant; "),
        (["performer", "performer:features=256"], "performer and performer:features=256 are the same variant; "),
        (["linear", "softmax", "linear"], "linear and linear are the same variant; "),
        (
            ["performer:features=256", "performer:kernel=positive"],
            "performer:features=256 and performer:kernel=positive are the same variant, performer; ",
        ),
    ],
)
def test_one_variant_written_twice_is_refused_by_its_name(
    variants: list[str], same: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *variants, "--n", "4"]) == Exit.USAGE
    needs = "name different ones: attnbench compare softmax linear --n 1024..4096\n"
    assert capsys.readouterr().err == f"error: {same}{needs}"


@pytest.mark.parametrize(
    ("lengths", "remedy"),
    [("0", "write --n 1024..4096"), ("many", "write 1024 or 1k or 512,1024"), ("4096..1024", "write 1024..4096")],
)
def test_lengths_that_are_wrong_say_what_to_write(lengths: str, remedy: str) -> None:
    done = compare("softmax", "linear", "--n", lengths)
    assert done.returncode == Exit.USAGE
    assert remedy in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_where_nothing_could_be_measured_the_rows_are_shown_and_the_code_is_1(
    broken: list[str], tmp_path: Path
) -> None:
    files = {"--csv": tmp_path / "rows.csv", "--plot": tmp_path / "figure.svg"}
    done = compare("one", "two", "--n", "16..32", *QUICK, *broken, *(str(x) for pair in files.items() for x in pair))
    assert done.returncode == Exit.FAILED
    assert files["--csv"].read_text().count("not today") == 4
    assert not files["--plot"].exists()
    assert "not today" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: nothing could be measured; the reasons stand above"
    one_works = compare("one", "mean-value", "--n", "16", *QUICK, *broken)
    assert one_works.returncode == Exit.OK


def test_json_is_alone_on_stdout_and_warnings_are_on_stderr(broken: list[str]) -> None:
    done = compare("one", "two", "mean-value", "--n", "16", "--json", *QUICK, *broken)
    data = json.loads(done.stdout)
    assert [row["a_status"] for row in data["rows"]] == ["error", "error", "error"]
    told, *warned = done.stderr.splitlines()
    assert re.fullmatch(r"n = 16: one error, two error, mean-value \d.* .s", told)
    assert [f"warning: {text}" for text in data["warnings"]] == warned


def test_one_length_has_nothing_to_cross_and_several_are_sorted(tmp_path: Path) -> None:
    assert "crossover" not in compare("identity", "mean-value", "--n", "16", *QUICK).stdout
    done = compare("identity", "mean-value", "--n", "64,16,16", *QUICK)
    assert "\ncrossover: " in done.stdout
    lengths = [line.split()[0] for line in done.stdout.splitlines() if line.strip()[:2] in ("16", "64")]
    assert lengths == [*["16", "16", "64", "64"] * 2, "16", "64"]  # times; memory and error; own errors of one of them


def test_long_names_of_many_variants_fit_a_terminal() -> None:
    names = ["performer:features=16,kernel=relu", "performer:features=32,kernel=relu", "local:window=8"]
    done = compare(*names, "--n", "32..64", *QUICK)
    assert done.returncode == Exit.OK
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert len(re.findall(r"^ratio: time / time of performer:features=16,kernel=relu$", done.stdout, re.MULTILINE)) == 1
    for name in names:  # whole in each row; wide intervals leave one space between columns
        tables = 2 if name.startswith("local") else 3  # times, memory, and the own errors of other operators
        assert len(re.findall(rf"^ *(?:32|64) {{1,2}}{name} ", done.stdout, re.MULTILINE)) == 2 * tables


def test_padding_stands_in_the_heading_and_in_every_row(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    done = compare("softmax", "linear", "--n", "32", "--batch", "2", "--padding", "0.5", "--csv", str(table), *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("operator forward, 50% padding, B=2 H=2 D=8, float32, gaussian, on cpu")
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert (row["padding"], row["batch"], row["pass"], row["dtype"]) == ("0.5", "2", "forward", "float32")


def test_a_variant_that_takes_no_padding_says_so_and_a_share_that_is_none_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    refuses = "cost='O(n)', traits=Traits(target='other', key_padding=No('it takes no mask'))"
    text = NEVER_FASTER.format(name="own").replace('cost="O(n)"', refuses)
    own.write_text(f"from attnbench.contract.variant import No, Traits\n{text}")
    arguments = ["own", "softmax", "--n", "16", "--no-error", "--plugin", str(own), *QUICK]
    three = compare(*arguments, "linear", "--padding", "0.5")
    assert "it takes no mask" in " ".join(three.stdout.split())
    assert "n = 16: own unsupported, softmax " in three.stderr
    done = compare(*arguments, "--padding", "0.5")  # which leaves nothing to compare
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert done.stderr.startswith("error: own: unsupported: key padding: it takes no mask; leave it out")
    done = compare(*arguments, "--padding", "1")
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert done.stderr == "error: padding must be at least 0 and below 1, not 1; 0.5 makes half of the tokens padding\n"


def test_a_table_that_is_stopped_is_shown_with_the_lengths_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = compare_module.measure_length

    def pressed(worker: object, cells: list[Cell], *more: object, **how: object) -> object:
        if cells[0].shape.N == 32:
            raise KeyboardInterrupt
        return honest(worker, cells, *more, **how)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(compare_module, "measure_length", pressed)
    table = tmp_path / "rows.csv"
    with forks():
        code = main(["compare", "identity", "mean-value", "--n", "16..32", "--csv", str(table), *QUICK])
    said = capsys.readouterr()
    assert code == 130
    assert "stopped; the finished measurements follow" in said.err
    assert "withheld at n = 16: a verdict needs 3 processes" in said.out
    assert re.search("^95 % intervals over 1 process(;|$)", said.out, re.MULTILINE)
    assert "withheld: no verdict and no ratio" in said.out
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert (row["seq_len"], row["verdict"], row["processes"], row["ratio"]) == ("16", "withheld", "1", "")
    assert float(row["a_time_median_s"]) > 0


def test_the_lines_above_a_table_say_for_how_many_ratios_and_over_how_many_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with forks():
        assert main(["compare", "identity", "mean-value", "sdpa", "--n", "16", *QUICK]) == 0
    line = r"process 95 % intervals over \d( to \d)? processes; verdicts: 95 % for all 3 together; --csv has "
    assert re.search(line, " ".join(capsys.readouterr().out.split()))


def test_the_time_of_the_baseline_is_that_of_its_most_processes() -> None:
    def side(label: str, seconds: float) -> Side:
        cell = Cell("s", "w", parse_spec(label), Shape(heads=1, seq_len=64, head_dim=4))
        return Side(Record.of(cell, Status.OK), seconds, (0.9 * seconds, 1.1 * seconds))

    labels = ["softmax", "sdpa", "chunked"]
    rows = [
        CompareRow(64, side("softmax", base), side(label, 1.0), None, processes=processes)
        for label, base, processes in (("sdpa", 3.0, 3), ("chunked", 2.0, 6))
    ]
    found = _time_rows(Comparison(labels), rows)
    assert [line[2].split(" ±")[0] for line in found] == ["2.00 s", "1.00 s", "1.00 s"]


def test_all_stand_in_one_table_against_the_baseline_and_are_told_as_they_are_measured(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    names = ["identity", "mean-value", "sdpa"]
    done = compare(*names, "--baseline", "sdpa", "--n", "16..32", "--csv", str(table), *QUICK)
    assert done.returncode == 0, done.stderr
    times = done.stdout[done.stdout.index("ratio: time / time of sdpa\n") : done.stdout.index("\nmemory and error")]
    rows = re.findall(r"^(16|32)  (\S+) ", times, re.MULTILINE)
    assert rows == [(n, name) for n in ("16", "32") for name in ("sdpa", "identity", "mean-value")]
    assert done.stdout.count("\nratio: ") == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("n = ")]
    assert [re.sub(r" \d\S* .s", "", line) for line in told] == [
        "n = 16: sdpa, identity, mean-value",
        "n = 32: sdpa, identity, mean-value",
    ]
    rows = [(row["a"], row["b"], row["verdict"]) for row in csv.DictReader(table.read_text().splitlines())]
    assert {pair[:2] for pair in rows} == {("sdpa", "identity"), ("sdpa", "mean-value"), ("identity", "mean-value")}


def test_one_variant_is_measured_alone_in_three_processes(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    done = compare("mean-value", "--n", "16..32", "--csv", str(table), *QUICK)
    assert done.returncode == 0, done.stderr
    assert "95 % intervals over 3 processes\n" in done.stdout
    assert "\ntime\n" in done.stdout
    assert "ratio" not in done.stdout
    assert len(re.findall(r"^(?:16|32)  mean-value  .*s (?:±\d+%|\(.* to .*s\))$", done.stdout, re.MULTILINE)) == 2
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [(row["a"], row["b"], row["verdict"], row["processes"]) for row in rows] == [("mean-value", "", "", "3")] * 2
    assert all(float(row["a_time_median_s"]) > 0 and not row["b_time_median_s"] for row in rows)
    alone = compare("mean-value", "--n", "16", "--plot", str(tmp_path / "figure.svg"), *QUICK)
    assert alone.stderr.splitlines()[-1].endswith("one variant alone is beside nothing; name another")


def test_what_a_module_cannot_take_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n\nclass Own(torch.nn.Module):\n    def __init__(self, dim=16):\n        super().__init__()\n"
        "    def forward(self, x):\n        return x\n"
    )
    module = f"{tmp_path}/own.py:Own"
    done = compare("softmax", "linear", module, "--level", "layer", "--causal", "--n", "16", *QUICK)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    said = (
        "error: Own: unsupported: causal: its constructor has no option causal; leave it out, or ask for what it takes"
    )
    assert done.stderr == f"{said}\n"


@pytest.mark.parametrize(
    ("dtype", "measured"), [("float32", {"linear"}), ("bfloat16", {"linear", "performer", "sdpa"})]
)
def test_another_operator_and_everything_in_few_bits_has_an_error_against_its_own_formula(
    dtype: str, measured: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["linear", "performer", "sdpa", "--n", "32", "--dtype", dtype, *QUICK]
    with forks():
        assert main(["compare", *arguments]) == 0
        shown = capsys.readouterr().out
        assert main(["compare", *arguments, "--json"]) == 0
    table = shown[shown.index("error against the variant's own formula") :]
    assert set(re.findall(r"^32  (\S+)", table, re.MULTILINE)) == measured
    (first, *_), rounding = json.loads(capsys.readouterr().out)["rows"], {"float32": 1e-5, "bfloat16": 1e-2}[dtype]
    for column in ("a_own_error", "a_own_error_late", "a_own_error_grad"):
        assert 0 < first[column] < rounding
    assert first["a_rel_error"] > 0.05, "its distance from softmax attention"


@pytest.mark.parametrize("sizes", [{"heads": 32, "kv_heads": 8}, {"heads": 8}, {"heads": 6, "qk_heads": 3}])
def test_the_heads_of_which_an_error_can_be_measured_are_some_that_a_shape_may_have(sizes: dict[str, int]) -> None:
    n = 32 * 1024
    record = Record.of(Cell("s", "w", Spec("softmax"), Shape(seq_len=n, **sizes)), Status.OK)
    said = _without_error(n, record)
    assert _without_error(64, replace(record, batch=2)).endswith("; a larger --timeout measures them")
    assert "; --batch 1 --heads 2" in said
    words = said.rpartition("; ")[2].removesuffix(" measures them").split()
    given = dict(zip((word.strip("-").replace("-", "_") for word in words[::2]), map(int, words[1::2]), strict=True))
    assert Shape(seq_len=n, **{**sizes, **given}).H * n * n <= compare_module.LONGEST_ERROR
