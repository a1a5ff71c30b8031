"""Published tables: shipped and users' own become claims that planted rows reproduce or contradict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnbench.answers.claims import published_tables
from attnbench.answers.claims.assessment import Judgement, judge_all_rows
from attnbench.answers.claims.evidence import MACHINE
from attnbench.answers.claims.published_tables import SHIPPED, Number, claims_of, is_model, is_table, load
from attnbench.cli.app import main
from attnbench.errors import AttnbenchError
from attnbench.figures.published.lra import NYSTROMFORMER, read_linformer, read_published
from attnbench.figures.published.point_file import read_points
from attnbench.harness.plan import Plan
from attnbench.measure.status import Status
from attnbench.results.read import read_results
from attnbench.results.record import Record
from tests.answers.test_claims import frame, timed

FORM = """source: Who et al. 2021
place: table 1
device: H200
level: operator
baseline: exact
unit: ms
at: {seq_len: [512, 1024], heads: 4, head_dim: 64}
rows:
- {row: exact, variant: softmax, values: [1.0, 4.0]}
- {row: ours, variant: linear, values: [2.0, 2.0]}
"""


def of(name: str) -> dict[tuple[str, str, str, int, str], Number]:
    return {(one.row, one.pass_, one.shape, one.n, one.unit): one for one in load(name)}


def written(tmp_path: Path, text: str = FORM, name: str = "table.yaml") -> Sequence[Number]:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return load(str(file))


def judged(
    table: Sequence[Number], rows: Sequence[Record], tmp_path: Path, machines: Sequence[str] = ()
) -> list[Judgement]:
    known = frame(rows, tmp_path).assign(**{MACHINE: next(iter(machines), "")})
    return [judge_all_rows(one, known) for one in claims_of(table, machines)]


def rows_of(exact: tuple[float, float], ours: tuple[float, float]) -> list[Record]:
    pairs = zip((512, 1024), exact, ours, strict=True)
    return [timed(*one) for n, a, b in pairs for one in (("softmax", n, a), ("linear", n, b))]


def test_the_shipped_tables_are_as_printed() -> None:
    assert len(SHIPPED) >= 10
    size = sum(file.stat().st_size for file in Path(published_tables.__file__).with_name("tables").iterdir())
    assert size < 40_000
    lra = of("lra")
    for row in read_published().dropna(subset="steps_per_s_1k").to_dict("records"):
        (name,) = {one.row for one in lra.values() if row["model"].startswith(one.row)}
        for k in (1, 2, 3, 4):
            assert lra[name, "training", "", k * 1024, "steps/s"].value == row[f"steps_per_s_{k}k"]
            assert lra[name, "training", "", k * 1024, "GB"].value == row[f"memory_gb_{k}k"]
    linformer = of("linformer")
    for row in read_linformer().to_dict("records"):
        at = (f"k = {row['rank']}", "forward", "", int(row["n"]))
        assert linformer[*at, "times faster"].value == row["time_saved"]
        assert linformer[*at, "times smaller"].value == row["memory_saved"]
    assert len(linformer) == 2 * len(read_linformer())
    nystrom = of("nystromformer")
    for row in read_points(NYSTROMFORMER).table.to_dict("records"):
        at = (row["model"], "forward", "", row["n"])
        assert (nystrom[*at, "ms"].value, nystrom[*at, "MB"].value) == (row["time_ms"], row["memory_mb"])


@pytest.mark.parametrize(
    ("pass_", "shape", "n", "over_baseline", "over_best"),
    [
        ("forward", "fla-1x96x128", 8192, 2.97, 0.83),  # "three times as fast as attention" is a loss
        ("forward", "fla-4x64x128", 4096, 1.62, 0.44),
        ("forward", "fla-2x16x128", 16384, 4.89, 1.29),
        ("training", "fla-1x96x128", 8192, 3.24, 0.89),
        ("training", "fla-2x16x128", 16384, 5.52, 1.55),
    ],
)
def test_a_published_gain_may_be_a_loss_against_the_best_exact_kernel_of_the_card(
    pass_: str, shape: str, n: int, over_baseline: float, over_best: float
) -> None:
    number = of("fla-readme")["gdn", pass_, shape, n, "ms"]
    against = number.against(load("fla-readme"))
    best = number.over_best([one for name in SHIPPED for one in load(name) if one.exact and one.of == "time_median_s"])
    assert against is not None
    assert best is not None
    assert (round(against[0], 2), round(best[0], 2)) == (over_baseline, over_best)
    assert "FA-4" in best[1]


def test_the_command_prints_both_ratios_and_needs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "fla-readme", "-k", "1x96x128 n=8192 forward"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert "gdn 1.265 ms, 2.97 × FA-2, 0.827 × FA-4, slower than exact attention" in said
    assert "attnbench claims fla-readme --run" in said
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_table_can_be_read_without_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claims", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= len(load(name))
    assert {one["verdict"] for one in found} == {"not tested here"}
    assert all(one["source"] and one["evidence"] for one in found)


@pytest.mark.parametrize(
    ("exact", "ours", "verdicts", "orders", "crossover"),
    [
        ((1.0, 4.0), (2.0, 2.0), ["holds", "holds"], ["holds", "holds"], "holds"),
        ((0.1, 0.4), (0.2, 0.2), ["holds", "holds"], ["holds", "holds"], "holds"),  # another machine, the same ratios
        ((1.0, 4.0), (1.5, 3.0), ["fails", "fails"], ["holds", "holds"], "holds"),
        ((1.0, 4.0), (0.5, 8.0), ["fails", "fails"], ["is reversed", "is reversed"], "fails"),
        ((1.0, 4.0), (1.0, 4.0), ["fails", "fails"], ["open", "open"], "open"),
        ((1.0, 4.0), (2.0, 5.0), ["holds", "fails"], ["holds", "is reversed"], "fails"),
    ],
)
def test_ratios_orders_and_the_crossover_are_judged_on_any_device(
    exact: tuple[float, float],
    ours: tuple[float, float],
    verdicts: list[str],
    orders: list[str],
    crossover: str,
    tmp_path: Path,
) -> None:
    *numbers, overtakes = judged(written(tmp_path), rows_of(exact, ours), tmp_path, ["AMD EPYC"])
    ratios = [one for one in numbers if "ours" in one.claim.says]
    assert [one.verdict for one in ratios] == verdicts
    assert [one.evidence.partition("order ")[2].partition(";")[0] for one in ratios] == orders
    assert f"; best exact here: {exact[0] / ours[0]:.3g} × softmax" in ratios[0].evidence
    assert (overtakes.claim.says, overtakes.verdict) == ("ours overtakes exact between n=512 and 1024", crossover)


def test_a_variant_that_is_not_loaded_is_no_best_exact_kernel(tmp_path: Path) -> None:
    foreign = replace(timed("sdpa", 512, 0.1), variant="theirs", label="theirs", options="{}")
    found = judged(written(tmp_path), [*rows_of((1.0, 4.0), (2.0, 2.0)), foreign], tmp_path)
    assert any("; best exact here: 0.5 × softmax" in one.evidence for one in found)


def test_how_far_off_it_is_is_said(tmp_path: Path) -> None:
    found = judged(written(tmp_path), rows_of((1.0, 4.0), (1.0, 1.0)), tmp_path)
    assert "time ratio 4 (3.92 to 4.08), 2 of the published" in found[-2].evidence


@pytest.mark.parametrize(
    ("machine", "seconds", "verdict"),
    [
        ("NVIDIA H200", 1e-3, "holds"),
        ("NVIDIA H200", 1.2e-3, "fails"),
        ("NVIDIA H20", 1e-3, "not tested here"),
        ("NVIDIA GH200", 1e-3, "not tested here"),
        ("NVIDIA H200 NVL", 1e-3, "not tested here"),
    ],
)
def test_a_time_is_judged_on_the_published_device_alone(
    machine: str, seconds: float, verdict: str, tmp_path: Path
) -> None:
    first, *_ = judged(written(tmp_path), [timed("softmax", 512, seconds)], tmp_path, [machine])
    assert first.verdict == verdict
    assert ("judged on H200 alone" in first.evidence) == (verdict == "not tested here")


def test_rows_of_another_machine_are_not_judged_beside_those_of_the_published_device(tmp_path: Path) -> None:
    rows = [timed("softmax", 512, 1e-3), timed("softmax", 512, 3e-3)]
    known = frame(rows, tmp_path).assign(**{MACHINE: ["NVIDIA H200", "AMD EPYC"]})
    first, *_ = claims_of(written(tmp_path), ["NVIDIA H200", "AMD EPYC"])
    assert judge_all_rows(first, known).verdict == "holds"


@pytest.mark.parametrize(
    ("device", "machine", "same"),
    [
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100_80GB_HBM3", "NVIDIA H100 80GB HBM3", True),
        ("H100", "NVIDIA H100 PCIe", False),
        ("H100", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", False),
        ("H100 NVL", "NVIDIA H100 NVL", True),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("A100 40GB", "NVIDIA A100-SXM4-80GB", False),
        ("80GB", "NVIDIA A100-SXM4-80GB", False),
        ("RTX 3080", "NVIDIA GeForce RTX 3080 Ti", False),
        ("AMD", "AMD EPYC", False),
        ("EPYC 7763", "AMD EPYC 7763 64-Core Processor", True),
        ("Xeon Platinum 8480C", "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", True),
        ("Ryzen 7", "AMD Ryzen 7 5800X 8-Core Processor", False),
    ],
)
def test_a_machine_is_the_published_device_if_it_is_its_model(device: str, machine: str, same: bool) -> None:
    assert is_model(device, machine) == same


@pytest.mark.parametrize(
    ("unit", "value", "amount", "column"),
    [
        ("s", 2.0, 2.0, "time_median_s"),
        ("us", 3.0, 3e-6, "time_median_s"),
        ("steps/s", 4.0, 0.25, "time_median_s"),
        ("TFLOP/s", 2.0, 4 * 4 * 512**2 * 64 / 2e12, "time_median_s"),
        ("MB", 1.0, 1e6, "peak_bytes"),
        ("GB", 1.0, 1e9, "peak_bytes"),
    ],
)
def test_units(unit: str, value: float, amount: float, column: str, tmp_path: Path) -> None:
    text = FORM.replace("unit: ms", f"unit: {unit}").replace("values: [1.0, 4.0]", f"values: [{value}, null]")
    first = written(tmp_path, text)[0]
    assert (first.amount, first.of) == (pytest.approx(amount), column)


def test_a_length_may_be_written_as_in_a_suite(tmp_path: Path) -> None:
    table = written(tmp_path, FORM.replace("[512, 1024]", "[512, 1k]"))
    assert [one.n for one in table] == [512, 1024] * 2
    assert judged(table, rows_of((1.0, 4.0), (2.0, 2.0)), tmp_path)[-1].claim.says.endswith("between n=512 and 1024")


def test_a_row_that_failed_and_a_kernel_that_is_not_here_say_why(tmp_path: Path) -> None:
    rows = [
        *rows_of((1.0, 4.0), (2.0, 2.0))[:3],
        replace(timed("linear", 1024, 1.0), status=Status.OOM, reason="too much", time_median_s=None),
    ]
    text = FORM + "- {row: theirs, variant: linear, kernel: FlashLinear, values: [1.0, null]}\n"
    found = {one.claim.says: one for one in judged(written(tmp_path, text), rows, tmp_path)}
    last, kernel = found["n=1024 forward: ours 2 ms, 2 × exact"], found["n=512 forward: theirs 1 ms, 1 × exact"]
    assert (last.verdict, last.evidence) == ("not tested here", "linear: oom: too much")
    assert (kernel.verdict, kernel.evidence) == ("not tested here", "nothing loaded has FlashLinear")


WRONG = [
    ("at: {seq_len: [512, 1024], heads: 4, head_dim: 64}", "at: 5", 9, "'at' is no mapping"),
    ("unit: ms", "unit: msec", 6, "'unit' cannot be 'msec'"),
    ("head_dim: 64", "head_dims: 64", 9, "unknown key 'head_dims'; did you mean 'head_dim'?"),
    ("variant: linear", "variant: linaer", 10, "did you mean 'linear'?"),
    ("variant: linear", "variant: zzz", 10, "unknown variant 'zzz'; 'attnbench list variants' shows the names"),
    ("unit: ms", "unit: times faster", 9, "unknown variant 'exact'; 'attnbench list variants' shows the names"),
    ("variant: linear", "variant: 'linear:featurs=3'", 10, "linear"),
    ("heads: 4", "shape: llama3-80b", 9, "did you mean 'llama3-8b'?"),
    ("heads: 4", "heads: [4]", 9, "a list in 'at' is of another length; write 2 values"),
    ("seq_len: [512, 1024], ", "", 9, "'seq_len' is missing; add it"),
    ("seq_len: [512, 1024]", "seq_len: 512..1024", 9, "'seq_len' is '512..1024'; write a list"),
    ("baseline: exact", "baseline: exakt", 9, "no row is called 'exakt'; did you mean 'exact'?"),
    ("heads: 4", "heads: 4, variant: linear", 9, "'variant' is no axis of 'at'; write it beside 'at'"),
    ("[512, 1024]", "512", 9, "n=512 forward: exact 4 ms, and 1 at the same place; remove one, or write [..] in 'at'"),
    ("row: ours, variant: linear", "row: exact, variant: softmax", 10, "exact 2 ms, and 1 at the same place; remove"),
    ("row: ours", "row: exact", 10, "another variant is called 'exact' too, the baseline; rename one"),
    ("baseline: exact", "basline: exact", 5, "unknown key 'basline'; did you mean 'baseline'?"),
    ("device: H200\n", "", 8, "'device' is missing; add it"),
    ("device: H200", "device: '-'", 3, "'device' '-' is no name; write one such as H200"),
    ("values: [2.0, 2.0]", "values: [2.0, fast]", 10, "'value'"),
    ("values: [2.0, 2.0]", "values: [2.0, -1]", 10, "'value'"),
    ("values: [2.0, 2.0]", "values: [2.0, 0]", 10, "'value' must be at least 1e-30, got 0"),
    ("values: [2.0, 2.0]", "values: [2.0, 1e-320]", 10, "'value' must be at least 1e-30, got 1e-320"),
    ("values: [2.0, 2.0]", "values: [2.0, 1e308]", 10, "'value' must be at most 1e+30, got 1e+308"),
    ("values: [2.0, 2.0]", "value: 2.0", 10, "write a row as"),
    ("level: operator", "level: kernel", 4, "'level' cannot be 'kernel'"),
    ("rows:\n", "rows: []\nmore:\n", 8, "no numbers; write rows:"),
    ("source: Who et al. 2021", "source: [", 3, "not YAML"),
    (
        FORM.partition("rows:\n")[2],
        "- {row: exact, variant: softmax, values: [null, null]}\n",
        8,
        "no numbers; write rows:",
    ),
    ("baseline: exact\nunit: ms", "unit: times faster", 8, "'times faster' than what? add baseline: with a variant"),
]


@pytest.mark.parametrize(("old", "new", "line", "said"), WRONG, ids=[new.strip() or old for old, new, _, _ in WRONG])
def test_a_mistake_is_one_line_with_the_place(
    old: str, new: str, line: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(FORM.replace(old, new), encoding="utf-8")
    assert main(["claims", str(file)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"error: {file}:{line}: ")
    assert said in told


CUDNN = """config_name,backend,data_type,attn_mask,batch_size,q_seqlen,kv_seqlen,num_q_heads,num_kv_heads,head_dim_qk,\
head_dim_vo,profile_pass,deterministic_bwd,time_ms,sliding_window_size,success,skipped,gpu_name
llama,cudnn,bfloat16,top_left,2,4096,4096,64,8,128,128,fwd,False,0.893,,True,False,NVIDIA H200
llama,flash_attention_4,bfloat16,top_left,2,4096,4096,64,8,128,128,bwd,False,1.2,,True,False,NVIDIA H200
llama,cudnn,fp8,top_left,2,4096,4096,64,8,128,128,fwd,False,0.6,,True,False,NVIDIA H200
llama,pyt_flash_attention,bfloat16,no_mask,2,512,4096,64,8,128,128,fwd,False,0.3,128,True,False,NVIDIA H200
"""


@pytest.mark.parametrize("text", [CUDNN, CUDNN.replace("True", "TRUE").replace("False", "FALSE")])
def test_cudnns_csv_is_a_table(text: str, tmp_path: Path) -> None:
    found = written(tmp_path, text, "llama.csv")
    assert [(one.row, one.variant, one.pass_, one.amount) for one in found] == [
        ("cudnn", "cudnn", "forward", 0.893e-3),
        ("flash_attention_4", "fa-4", "backward", 1.2e-3),
        ("pyt_flash_attention", "sdpa:backend=flash", "forward", 0.3e-3),
    ]
    assert found[0].line == 2
    assert found[0].device == "H200"
    assert found[2].at["kv_len"] == 4096
    assert (found[2].at["causal"], found[2].at["mask"]) == (False, "sliding:128")
    assert found[0].note.startswith("1 left out: what failed, fp8")


@pytest.mark.parametrize("left", ["FALSE,0.893,,FALSE,FALSE,", "TRUE,0.893,,TRUE,FALSE,", "FALSE,0.893,,TRUE,TRUE,"])
def test_what_is_left_out_is_so_after_a_spreadsheet_saved_it(left: str, tmp_path: Path) -> None:
    found = written(tmp_path, CUDNN.replace("False,0.893,,True,False,", left), "llama.csv")
    assert [one.row for one in found] == ["flash_attention_4", "pyt_flash_attention"]


def trace(**changes: Any) -> dict[str, Any]:
    done = {
        "status": "PASSED",
        "performance": {"latency_ms": 0.2, "reference_latency_ms": 4.0, "speedup_factor": 20.0},
        "environment": {"hardware": "NVIDIA_H100", "libs": {}},
    }
    workload = {"uuid": "1", "axes": {"total_q": 4096, "len_indptr": 2}, "inputs": {}}
    whole = {"definition": "gqa_ragged_prefill_causal_h32_kv8_d128", "solution": "wrapper", "workload": workload}
    return {**whole, "evaluation": done, **changes}


@pytest.mark.parametrize("form", ["{}\n{}", "[{},\n {}]"])
def test_flashinfers_traces_are_a_table(form: str, tmp_path: Path) -> None:
    gdn = trace(definition="gdn_prefill_qk2_v8_d128_k_last", solution="mine")
    found = written(tmp_path, form.replace("{}", "%s") % (json.dumps(trace()), json.dumps(gdn)), "traces.json")
    first, second = found
    assert (first.variant, first.kernel, first.device, first.amount) == ("sdpa", "wrapper", "H100", 0.2e-3)
    assert {"heads": 32, "kv_heads": 8, "seq_len": 4096}.items() <= first.at.items()
    assert (second.row, second.variant) == ("mine", "gated-delta:expand=1,value_groups=4")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "x,y\n1,2\n", "a.csv:2: no 'attn_mask'; give a file of cuDNN's benchmark"),
        (
            "a.csv",
            CUDNN.replace("cudnn,bf", "magic,bf", 1),
            "a.csv:2: backend 'magic' or mask 'top_left' is unknown; write",
        ),
        ("a.csv", CUDNN.replace("0.893", "soon"), "a.csv:2: could not convert string to float: 'soon'"),
        ("a.csv", CUDNN.partition("llama")[0], "a.csv:1: no number for attnbench (it is empty)"),
        ("a.csv", CUDNN.replace("0.893", "inf"), "a.csv:2: 'value' must be finite"),
        (
            "a.csv",
            CUDNN.partition("llama")[0] + "llama,cudnn,bfloat16\n",
            "a.csv:2: a value is missing or of another kind",
        ),
        ("a.json", "5", "a.json:1: a value is missing or of another kind; give a file of flashinfer-bench"),
        ("a.json", "{", "a.json:1: "),
        ("a.json", "[" * 100_000, "a.json:1: a value is missing or of another kind"),
        ("a.jsonl", json.dumps(trace()) + "\n" + '{"a":' * 100_000, "a.jsonl:2: a value is missing or of another kind"),
        ("a.json", json.dumps(trace()) + "\n{oops}\n", "a.json:2: "),
        ("a.json", json.dumps(trace(definition="gemm_n128")), "1 left out: what failed"),
        ("a.json", json.dumps(trace(evaluation=None)), "1 left out: what failed"),
    ],
)
def test_a_file_of_another_benchmark_that_cannot_be_read_is_one_line(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(AttnbenchError) as caught:
        written(tmp_path, text, name)
    assert said in str(caught.value)


def test_a_csv_of_results_is_no_table(tmp_path: Path) -> None:
    frame([timed("softmax", 512, 1.0)], tmp_path)
    assert not is_table(str(tmp_path / "rows.csv"))
    assert is_table("lra")
    assert not is_table("results")
    with (tmp_path / "rows.csv").open("a") as file:  # a suite of many cells
        file.writelines(",".join(["x" * 99] * 10) + "\n" for _ in range(1100))
    assert not is_table(str(tmp_path / "rows.csv"))


def test_a_trace_may_have_more_than_a_megabyte(tmp_path: Path) -> None:
    long = {**trace(), "log": "x" * 9000}
    assert len(written(tmp_path, "\n".join([json.dumps(long)] * 120), "traces.jsonl")) == 120


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_table_that_cannot_be_read_is_one_line_and_names_no_other_form(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if content:
        file.write_bytes(content)
    with pytest.raises(AttnbenchError, match=r"give .*a file of numbers$"):
        load(str(file))


@pytest.mark.parametrize("more", [[], ["--run"]])
def test_an_unknown_name_is_one_line(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "linformr", *more]) == 2
    assert not any(tmp_path.iterdir())
    assert "no published table; did you mean 'linformer'?" in capsys.readouterr().err


SMALL = """source: a test
place: here
device: nowhere
level: operator
baseline: exact
unit: ms
at: {seq_len: [32, 64], heads: 1, head_dim: 8}
rows:
- {row: exact, variant: softmax, values: [1.0, 4.0]}
- {row: ours, variant: linear, values: [2.0, 2.0]}
- {row: GPU only, variant: cudnn, values: [2.0, 2.0]}
"""


def test_run_measures_a_table_beside_the_exact_kernels_and_says_what_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "small.yaml", tmp_path / "out"
    file.write_text(SMALL, encoding="utf-8")
    assert main(["claims", str(file), str(out), "--run", "--cell-timeout", "20", "--json"]) == 0
    found = {one["says"]: (one["verdict"], one["evidence"]) for one in json.loads(capsys.readouterr().out)}
    assert found["n=32 forward: ours 2 ms, 0.5 × exact"][0] != "not tested here"
    assert "; best exact here: " in str(found)
    assert "cudnn: unsupported" in found["n=64 forward: GPU only 2 ms, 2 × exact"][1]
    (run,) = (out / "claims-small").iterdir()
    rows = read_results(run)
    assert set(rows["label"]) == {"softmax", "linear", "sdpa:backend=cudnn", "sdpa"}
    monkeypatch.setattr("attnbench.cli.screen.run.measured", lambda plan: plans.append(plan))
    plans: list[Plan] = []
    main(["claims", "fla-readme", str(out), "--run", "--cell-timeout", "3"])
    assert [plan.options.cell_timeout for plan in plans] == [3]
    assert {cell.shape.batch for cell in plans[0].cells} == {1, 2, 4, 8}
    main(["claims", str(file), str(out), "--run", "-k", "n=64 forward: ours"])
    assert {cell.label for cell in plans[1].cells} == {"softmax/n64", "linear/n64", "sdpa/n64"}
