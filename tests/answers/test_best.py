"""The fastest form shape by shape: which forms are chosen from, what is said of their lead, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import attnbench
from attnbench.answers.best import BestChoice, ReadyContests, choose, forms_of, shapes_of
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import Exit, UsageError
from attnbench.harness.compare import compare as compare_module
from attnbench.harness.compare.compare import CompareRow, Comparison, Contest, Side
from attnbench.harness.outside.isolation import WorkerFailed
from attnbench.measure.statistics import SAID, Ratio, Said, judged
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.forked import forks

FEW = ["--min-time", "0.01", "--device", "cpu", "--threads", "1", "--unchecked"]


def side(label: str, seconds: float | None, error: float | None = 1e-7, status: Status = Status.OK) -> Side:
    cell = Cell("s", "w", parse_spec(label), Shape(heads=1, seq_len=64, head_dim=4))
    record = Record.of(cell, status, "" if status is Status.OK else "no room", rel_error=error, peak_bytes=1024)
    return Side(record, seconds, seconds and (0.95 * seconds, 1.05 * seconds))  # type: ignore[arg-type]  # both or none


def rows(*sides: Side, spread: float = 1.02, said: Mapping[tuple[str, str], Said] | None = None) -> Any:
    found = {}
    for a, b in combinations(sides, 2):
        pair = a.record.label, b.record.label
        if a.time is None or b.time is None:
            found[pair] = CompareRow(64, a, b, None)
            continue
        ratio = a.time / b.time
        ends = ratio / spread, ratio * spread
        whole = Ratio(ratio, *ends, 30, (ends[0] / 1.01, ends[1] * 1.01), 0.0, 3)
        found[pair] = CompareRow(64, a, b, whole, (said or {}).get(pair, judged(whole.joint)), processes=3)
    return found


def chosen(found: Any, most: float = 0.02) -> BestChoice:
    (asked,) = shapes_of(None, "llama3-8b", [64])
    return choose(asked, "", 64, found, most)


def told(found: Any, most: float = 0.02) -> tuple[str | None, str, list[str], str | None]:
    choice = chosen(found, most)
    return choice.fastest and choice.fastest.record.label, choice.verdict, list(choice.tied), choice.next


@pytest.mark.parametrize(
    "order", [("softmax", "sdpa", "chunked"), ("sdpa", "chunked", "softmax"), ("chunked", "softmax", "sdpa")]
)
def test_the_fastest_is_the_same_in_whatever_order_the_forms_stand(order: tuple[str, ...]) -> None:
    seconds = {"sdpa": 1.0, "softmax": 2.0, "chunked": 3.0}
    found = rows(*(side(label, seconds[label]) for label in order))
    assert told(found) == ("sdpa", "faster", [], "softmax")
    margin = chosen(found).margin
    assert margin
    assert (margin.low, margin.estimate, margin.high) == pytest.approx((2 / 1.02, 2, 2 * 1.02))


def test_a_form_whose_interval_holds_1_is_a_tie_and_the_margin_is_to_the_next_slower_one() -> None:
    found = rows(side("sdpa", 1.0), side("sdpa:backend=flash", 1.005), side("softmax", 2.0))
    assert told(found) == ("sdpa", "a tie", ["sdpa:backend=flash"], "softmax")
    wide = rows(side("sdpa", 1.0), side("softmax", 1.3), spread=1.5)
    assert told(wide) == ("sdpa", "a tie", ["softmax"], None)


def test_what_exceeds_the_error_is_not_chosen_from_and_a_wider_limit_takes_it() -> None:
    found = rows(side("sdpa", 2.0), side("linear", 1.0, 0.5), side("softmax", 4.0))
    assert told(found) == ("sdpa", "faster", [], "softmax")
    assert chosen(found).left_out == {"linear": "its error is 0.5, above 0.02"}
    assert told(found, 0.6) == ("linear", "faster", [], "sdpa")


def test_without_a_measured_error_only_what_is_exact_by_its_laws_is_chosen_from() -> None:
    found = rows(side("sdpa", 2.0, None), side("linear", 1.0, None))
    assert told(found) == ("sdpa", "the only one", [], None)
    assert chosen(found, 9.0).left_out == {"linear": "its error is not known here"}


def test_a_form_that_failed_is_named_with_its_reason_and_nothing_is_chosen_where_all_failed() -> None:
    failed = side("softmax", None, None, Status.OOM)
    assert told(rows(side("sdpa", 1.0), failed)) == ("sdpa", "the only one", [], None)
    assert chosen(rows(side("sdpa", 1.0), failed)).left_out == {"softmax": "oom: no room"}
    both = rows(side("sdpa", None, None, Status.OOM), failed)
    assert told(both) == (None, "none", [], None)
    assert chosen(both).to_json()["fastest"] is None


def test_a_verdict_that_compare_withholds_is_withheld_and_one_of_a_busy_machine_is_marked() -> None:
    two = side("sdpa", 1.0), side("softmax", 2.0)
    withheld = rows(*two, said={("sdpa", "softmax"): Said("withheld", "the machine was busy (1.1 of 2 cores)")})
    assert told(withheld) == ("sdpa", "withheld", [], None)
    assert chosen(withheld).left_out == {"softmax": "no verdict: the machine was busy (1.1 of 2 cores)"}
    busy = rows(*two, said={("sdpa", "softmax"): Said("faster", "busy machine")})
    assert told(busy) == ("sdpa", "faster (busy machine)", [], "softmax")


def test_while_one_form_has_no_verdict_no_other_is_the_next_slower_one() -> None:
    sides = side("sdpa", 1.0), side("softmax", 1.1), side("chunked", 2.0)
    said = {
        ("sdpa", "softmax"): Said("withheld", "the machine was busy (1.1 of 2 cores)"),
        ("sdpa", "chunked"): Said("faster", "busy machine"),
    }
    found = rows(*sides, said=said)
    assert told(found) == ("sdpa", "withheld", [], None)
    assert chosen(found).margin is None


def test_the_verdicts_of_all_shapes_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"device": "cpu", "plugins": (), "max_error": 0.02, "shape": None, "variants": ()}
    asked = shapes_of(None, "llama3-8b,gpt-oss", [64, 128])
    prepared = ReadyContests.of(asked, ["softmax", "sdpa", "chunked"], given)
    assert prepared.count == 4
    seen: list[int | None] = []

    def contest(self: Contest, watched: object) -> Comparison:
        seen.append(self.family)
        return Comparison([])

    monkeypatch.setattr(Contest, "answer", contest)
    assert prepared.answer(lambda asked, contest: lambda *_: None).family == 12
    assert seen == [12, 12]


def test_shapes_that_are_finished_stand_if_no_process_starts_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"device": "cpu", "plugins": (), "max_error": 0.02, "shape": None, "variants": ()}
    prepared = ReadyContests.of(shapes_of(None, "llama3-8b,gpt-oss", [64]), ["softmax", "sdpa"], given)
    measured = rows(side("softmax", 2.0), side("sdpa", 1.0))
    answers = [Comparison([], rows={pair: [row] for pair, row in measured.items()})]

    def contest(self: Contest, watched: object) -> Comparison:
        if not answers:
            raise WorkerFailed("the measuring process did not start: no memory")
        return answers.pop()

    monkeypatch.setattr(Contest, "answer", contest)
    found = prepared.answer(lambda asked, contest: lambda *_: None)
    assert [one.asked.name for one in found.choices] == ["llama3-8b"]
    assert found.warnings == ["the measuring process did not start: no memory; not measured: gpt-oss"]
    with pytest.raises(WorkerFailed):
        prepared.answer(lambda asked, contest: lambda *_: None)


def test_exact_stands_for_the_exact_forms_of_the_machine_and_for_none_twice() -> None:
    on_cpu = forms_of((), "cpu")
    assert {"softmax", "sdpa", "sdpa:backend=math", "sdpa:backend=flash", "chunked", "flex"} <= set(on_cpu)
    assert not {"linear", "sdpa:backend=cudnn"} & set(on_cpu)
    assert "sdpa:backend=cudnn" in forms_of(("exact",), "cuda:0")
    assert forms_of(("sdpa", "exact", "linear"), "cpu") == ["sdpa", *(one for one in on_cpu if one != "sdpa"), "linear"]


def test_a_row_has_its_own_values_then_those_of_its_shape(tmp_path: Path) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text(
        "shape,n,batch,causal,pass,name\nllama3-8b,1k..2k,2,,training,\n\n,,,true,,mine\nflash-64,64,,false,,\n"
    )
    first, second, third = shapes_of(file, None, [512])
    assert (first.name, list(first.lengths), first.values) == (
        "llama3-8b",
        [1024, 2048],
        {"shape": "llama3-8b", "batch": 2, "pass_": "training"},
    )
    assert (second.name, list(second.lengths), second.values) == ("mine", [512], {"causal": True})
    assert third.place.endswith("shapes.csv:5")
    given = {"device": "cpu", "plugins": (), "max_error": 0.02, "pass_": "forward", "dtype": "bfloat16"}
    found = ReadyContests.of([first, second, third], ["sdpa"], given)
    cells = [contest.cells[0] for contest in found.contests]
    assert [
        (cell.shape.H, cell.shape.K, cell.shape.B, cell.shape.causal, cell.pass_, cell.dtype) for cell in cells
    ] == [
        (32, 8, 2, True, "training", "bfloat16"),
        (8, 8, 1, True, "forward", "bfloat16"),
        (32, 32, 1, False, "forward", "bfloat16"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n,hads\n1,2\n", ":1: unknown column 'hads'; did you mean 'heads'?"),
        ("n,heads\nmany,2\n", ":2: 'n' must be whole numbers, got the text 'many'; write 1024"),
        ("n,heads\n\n64,x\n", ":3: 'heads' must be whole numbers, got the text 'x'; write 1024"),
        ("shape\nllama\n", ":2: unknown shape 'llama'; did you mean 'llama3-8b'?"),
        ("n,heads,kv_heads\n64,4,3\n", ":2: kv_heads must divide heads"),
        ("n,pass\n64,sideways\n", ":2: unknown pass 'sideways'; write forward"),
        ("n,pass\n64,decod\n", ":2: unknown pass 'decod'; did you mean 'decode'?"),
        ("n,causal\n64,1\n", ":2: 'causal' cannot be 1; write true or false"),
        ("n,heads\n64\n", ":2: 1 cell, but 2 columns; write a value or nothing"),
        ("n,dtype\n64,int8\n", ":2: 'dtype' cannot be 'int8'; write float64"),
        ('n,heads\n64,"2,4"\n', ":2: 'heads' has 2 values; write one, and a row for each of the others"),
        ("n,mask\n64,slide:3\n", ":2: 'mask': unknown mask 'slide'; did you mean 'sliding'?"),
        ("n,n\n1,2\n", ":1: column 'n' is there twice; remove one"),
        ('n,heads\n64,"2\n', ":2: not CSV (unexpected end of data); check the quotes"),
        ("n\n", ":1: no shapes; write columns such as n,heads,head_dim and a row for each shape"),
        ("", ":1: no shapes;"),
        ("n,new_tokens\n64,4\n", ":2: --new-tokens 4: only a generation has some"),
    ],
)  # fmt: skip
def test_a_fault_of_the_file_is_one_line_with_file_line_and_remedy(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text(text)
    assert main(["best", str(file), "-v", "sdpa"]) == Exit.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}{said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "best needs shapes; for example: attnbench best --shape llama3-8b"),
        (["none.csv"], "none.csv: no such file; give a CSV file of shapes"),
        (["."], ".: not a file; give a CSV file of shapes"),
        (["--shape", "gpt-oss,lama3-8b"], "--shape: unknown shape 'lama3-8b'; did you mean 'llama3-8b'?"),
        (["--shape", "gpt-oss", "-v", "sdpaa"], "unknown variant 'sdpaa'; did you mean 'sdpa'?"),
        (["--shape", "gpt-oss", "--n", "many"], "'many' is not a number or a range; write 1024"),
    ],
)
def test_a_fault_of_the_command_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["best", *arguments]) == Exit.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_the_table_and_its_json_name_a_form_that_can_be_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text("name,n,heads,head_dim\nsmall,32,2,8\nlonger,64,2,8\n")
    arguments = ["best", str(file), "-v", "softmax", "-v", "sdpa:backend=math", "-v", "mean-value", *FEW]
    with forks():
        assert main(arguments) == Exit.OK
        said = capsys.readouterr().out
        assert main([*arguments, "--json"]) == Exit.OK
    assert "verdicts: 95 % for all 6 ratios of the table together" in " ".join(said.split())
    assert "small: operator forward, B=1 H=2 D=8, float32" in said
    assert all((f"{word}: {meaning}" in " ".join(said.split())) == (word in said) for word, meaning in SAID.items())
    assert "mean-value: its error is" in said
    found = json.loads(capsys.readouterr().out)
    assert found["comparisons"] == 6
    assert [(one["shape"], one["seq_len"]) for one in found["shapes"]] == [("small", 32), ("longer", 64)]
    for one in found["shapes"]:
        module = attnbench.build(
            one["fastest"], Shape(seq_len=one["seq_len"], heads=one["heads"], head_dim=one["head_dim"])
        )
        assert module
        assert list(one["left_out"]) == ["mean-value"]
    assert {row["shape"] for row in found["rows"]} == {"small", "longer"}
    assert {row["b"] for row in found["rows"]} == {"sdpa:backend=math", "mean-value"}


def test_shapes_that_are_finished_are_shown_after_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = compare_module.measure_length

    def pressed(worker: object, cells: list[Cell], *more: object, **how: object) -> object:
        if cells[0].shape.N == 64:
            raise KeyboardInterrupt
        return honest(worker, cells, *more, **how)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(compare_module, "measure_length", pressed)
    with forks():
        arguments = ["best", "--shape", "gdn-2", "--n", "32,64", "-v", "softmax", "-v", "sdpa", *FEW]
        assert main(arguments) == Exit.INTERRUPTED
    said = capsys.readouterr()
    assert "stopped; the finished measurements follow" in said.err
    assert "gdn-2  32" in said.out
    assert "no verdict: a verdict needs 3 processes" in said.out


@pytest.mark.usefixtures("forks")
def test_from_python_it_is_a_table_and_the_fastest_of_each_shape() -> None:
    found = attnbench.best(
        shape="gdn-2", lengths=16, variants=["softmax", "identity"], max_error=9, min_time=0.01, device="cpu",
        unchecked=True, threads=1, progress=False,
    )  # fmt: skip
    frame = found.to_frame()
    assert list(frame["shape"]) == ["gdn-2"]
    assert found.fastest[("gdn-2", 16)] in {"identity", "softmax"}
    assert found.best.max_error == 9
    assert "<table" in found._repr_html_()
    with pytest.raises(UsageError, match=r"^shape: unknown shape 'gdn'"):
        attnbench.best(shape="gdn")


def test_the_law_of_a_setting_is_asked_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    honest = compare_module.Gate._found

    def found(self: Any, worker: Any, cell: Cell) -> Any:
        asked.append(cell.variant.label)
        return honest(self, worker, cell)

    monkeypatch.setattr(compare_module.Gate, "_found", found)
    few = [one for one in FEW if one != "--unchecked"]
    with forks():
        assert main(["best", "--shape", "gdn-2,gdn-4", "--n", "16", "-v", "mean-value", "--max-error", "9", *few]) == 0
    assert asked == ["mean-value"]
