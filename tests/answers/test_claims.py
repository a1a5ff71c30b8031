"""A verdict follows from rows: each kind of claim holds, fails and depends on planted numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pydantic import ValidationError

from attnbench.answers.claims.assessment import Judgement, judge
from attnbench.answers.claims.claim_points import Point
from attnbench.answers.claims.claims import Claim, claims
from attnbench.cli.app import main
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.harness.plan import Plan
from attnbench.measure.status import Status
from attnbench.results.read import read_results
from attnbench.results.record import Record
from attnbench.results.table import csv_text
from attnbench.suite.cell import Cell, ModelSize, Pass, Training
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite


def timed(
    label: str, n: int, seconds: float, *, spread: float = 0.01, pass_: Pass = "forward", **columns: Any
) -> Record:
    cell = Cell("claims", "forward", parse_spec(label), Shape(seq_len=n, heads=4, head_dim=64), pass_=pass_)
    times = {
        "time_median_s": seconds,
        "time_ci_low_s": seconds * (1 - spread),
        "time_ci_high_s": seconds * (1 + spread),
        "time_min_s": seconds * (1 - spread),
    }
    return Record.of(cell, Status.OK, **times, **columns)


def scored(label: str, scores: Iterable[float], task: str = "recall", *, heads: int = 2) -> list[Record]:
    return [
        Record.of(
            Cell(
                "claims", "scores", parse_spec(label), Shape(seq_len=64, heads=heads, head_dim=64 // heads, batch=32),
                level="model", pass_="training", measure=("score",), model=ModelSize(2, 128), task=parse_spec(task),
                training=Training(steps=400, learning_rate=4e-3, protocol="fixed"), seed=seed,
            ),
            Status.OK, score=score, score_low=score - 0.01, score_high=min(score + 0.01, 1.0), val_score=score,
        )
        for seed, score in enumerate(scores)
    ]  # fmt: skip


def frame(records: Iterable[Record], tmp_path: Path) -> pd.DataFrame:
    file = tmp_path / "rows.csv"
    file.write_text(csv_text(records), encoding="utf-8")
    return read_results(file)


def claim(**test: Any) -> Claim:
    return Claim.model_validate(
        {"id": "planted", "says": "So it is.", "source": "a test", "suite": "claims", "test": test}
    )


def verdict(records: Iterable[Record], tmp_path: Path, **test: Any) -> Judgement:
    return judge(claim(**test), frame(records, tmp_path))


FASTER = {"kind": "ratio", "of": "time_median_s", "top": "linear", "bottom": "softmax", "below": 1.0}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({512: 0.5, 1024: 0.3}, "holds"),
        ({512: 1.5, 1024: 1.2}, "fails"),
        ({512: 1.5, 1024: 0.5}, "depends on"),
        ({512: 1.0, 1024: 0.5}, "depends on"),  # at 512 the interval holds 1
        ({512: 1.0, 1024: 1.5}, "fails"),  # it is nowhere seen to hold
        ({512: 1.0, 1024: 1.0}, "open"),
    ],
)
def test_a_ratio_needs_the_whole_interval(times: Mapping[int, float], expected: str, tmp_path: Path) -> None:
    rows = [timed(*one) for n, ratio in times.items() for one in (("softmax", n, 1.0), ("linear", n, ratio))]
    found = verdict(rows, tmp_path, **FASTER)
    assert found.verdict == expected
    assert len(found.points) == 2
    if expected == "open":
        assert "both answers" in found.evidence


def test_a_ratio_to_an_error_that_may_be_0_is_open(tmp_path: Path) -> None:
    drawn = {"error_kind": "distance", "error_draws": 5}
    rows = [
        timed(label, n, 1.0, rel_error=error, rel_error_std=std, **drawn)
        for n, wide in ((512, 0.01), (1024, 0.7))
        for label, error, std in (("linear", 0.1, 0.01), ("softmax", 0.5, wide))
    ]
    found = verdict(rows, tmp_path, **{**FASTER, "of": "rel_error"})
    assert [(point.holds, point.high == math.inf) for point in found.points] == [(True, False), (None, True)]
    assert found.verdict == "depends on"


def test_rows_that_were_measured_otherwise_are_no_pair(tmp_path: Path) -> None:
    rows = [timed("softmax", 512, 1.0), timed("linear", 1024, 0.5), timed("linear", 512, 0.5, pass_="backward")]
    found = verdict(rows, tmp_path, **FASTER)
    assert (found.verdict, found.points) == ("not tested here", ())
    assert "attnbench run claims" in found.evidence


def test_a_failed_row_is_no_evidence(tmp_path: Path) -> None:
    failed = replace(timed("linear", 512, 0.5), status=Status.TIMEOUT, reason="over 10 s")
    found = verdict([timed("softmax", 512, 1.0), failed], tmp_path, **FASTER)
    assert (found.verdict, found.evidence) == ("not tested here", "linear: timeout: over 10 s")


def test_a_time_without_an_interval_is_no_evidence(tmp_path: Path) -> None:
    once = replace(timed("linear", 512, 0.5), time_ci_low_s=None, time_ci_high_s=None, time_rounds=1)
    found = verdict([timed("softmax", 512, 1.0), once], tmp_path, **FASTER)
    assert found.verdict == "not tested here"
    assert found.evidence == (
        "linear: without an interval: too few rounds, 1; attnbench run claims --rounds 5 gives one"
    )


def test_a_pair_of_one_variant_agrees_in_the_options_that_the_claim_does_not_name(tmp_path: Path) -> None:
    rows = [
        timed(f"performer:features={m},kernel={kernel}", 512, 0.1 * m * (1 if kernel == "trig" else 2))
        for m in (16, 64)
        for kernel in ("positive", "trig")
    ]
    test = {**FASTER, "top": "performer:kernel=trig", "bottom": "performer:kernel=positive"}
    found = verdict(rows, tmp_path, **test)
    assert [point.value for point in found.points] == [pytest.approx(0.5)] * 2
    assert [point.at for point in found.points] == ["features=16", "features=64"]


def test_a_pair_may_differ_in_the_pass_where_the_claim_says_so(tmp_path: Path) -> None:
    rows = [
        timed("softmax", n, seconds * n / 512, pass_=pass_, causal=True)
        for n in (512, 1024)
        for pass_, seconds in (("stepwise", 6.0), ("forward", 2.0))
    ]
    test = {**FASTER, "top": "softmax", "below": None, "above": 1.0, "where": {"pass": "stepwise"}}
    found = verdict(rows, tmp_path, **test, bottom_where={"pass": "forward"})
    assert found.verdict == "holds"
    assert [point.value for point in found.points] == [pytest.approx(3.0)] * 2
    assert [point.at for point in found.points] == ["n=512", "n=1024"]
    assert verdict(rows[:1], tmp_path, **test, bottom_where={"pass": "forward"}).points == ()


@pytest.mark.parametrize(("power", "expected"), [(1.0, "holds"), (2.0, "fails"), (1.2, "open")])
def test_growth_is_the_power_between_the_longest_and_a_quarter_of_it(
    power: float, expected: str, tmp_path: Path
) -> None:
    rows = [timed("linear", n, (n / 1e6) ** power) for n in (512, 1024, 2048, 4096)]
    found = verdict(rows, tmp_path, kind="growth", of="time_median_s", top="linear", at_most=1.2)
    assert found.verdict == expected
    assert found.points[0].value == pytest.approx(power)
    assert found.points[0].at == "n=1024 to 4096"


def test_growth_of_an_exact_number_may_equal_its_limit(tmp_path: Path) -> None:
    rows = [timed("linear", n, 1.0, state_bytes=4096) for n in (512, 2048)]
    found = verdict(rows, tmp_path, kind="growth", of="state_bytes", top="linear", at_most=0.0)
    assert found.verdict == "holds"
    assert str(found.points[0]) == "n=512 to 2048: power of n in state 0"


@pytest.mark.parametrize(("value", "points"), [(1e-9, 1), (0.0, 0)])
def test_growth_down_to_an_error_of_zero_has_no_lower_end(value: float, points: int, tmp_path: Path) -> None:
    errors = {512: (0.1, 0.001), 2048: (value, value)}
    rows = [
        timed("linear", n, 1.0, rel_error=error, rel_error_std=std, error_draws=3) for n, (error, std) in errors.items()
    ]
    found = verdict(rows, tmp_path, kind="growth", of="rel_error", top="linear", at_most=0.0)
    assert len(found.points) == points
    assert all(point.low == -math.inf and point.holds for point in found.points)


def test_each_number_of_a_claim_has_its_name(tmp_path: Path) -> None:
    rows = [timed(*one) for one in (("softmax", 512, 1.0), ("linear", 512, 0.5))]
    (point,) = verdict(rows, tmp_path, **FASTER).points
    assert str(point) == "time ratio 0.5 (0.49 to 0.51)"


@pytest.mark.parametrize(
    ("ratios", "expected", "said"),
    [
        ({512: 2.0, 2048: 1.3, 4096: 0.8, 8192: 0.4}, "holds", "slower at n=2048, faster from n=4096 on"),
        ({512: 0.9, 2048: 0.5, 4096: 0.3, 8192: 0.2}, "fails", "faster from n=512 on, or shorter"),
        ({512: 9.0, 4096: 3.0, 16384: 1.5}, "fails", "not faster up to n=16384"),
        ({512: 2.0, 1024: 0.8, 2048: 0.7, 4096: 0.5}, "fails", "slower at n=512, faster from n=1024 on"),
        ({512: 2.0, 4096: 1.0}, "open", "not faster up to n=4096"),
        (
            {512: 2.0, 1024: 0.8, 2048: 0.7, 4096: 1.0},
            "open",
            "slower at n=512, faster at n=1024 to 2048, open at n=4096",
        ),
    ],
)
def test_a_crossover_lies_between_two_measured_lengths(
    ratios: Mapping[int, float], expected: str, said: str, tmp_path: Path
) -> None:
    rows = [timed(*one) for n, ratio in ratios.items() for one in (("softmax", n, 1.0), ("linear", n, ratio))]
    test = {"kind": "crossover", "of": "time_median_s", "top": "linear", "bottom": "softmax"}
    found = verdict(rows, tmp_path, **test, lowest=2500, highest=10000)
    assert (found.verdict, found.points[0].said) == (expected, said)


def test_a_crossover_of_times_that_are_the_hosts_says_so(tmp_path: Path) -> None:
    host = {"launched": "eager", "device_s": 0.1, "host_share": 0.88}
    rows = [timed("softmax", n, 1.0, launched="graph", device_s=1.0, host_share=0.0) for n in (512, 4096)]
    rows += [timed("linear", n, seconds, **host) for n, seconds in ((512, 2.0), (4096, 0.8))]
    test = {"kind": "crossover", "of": "time_median_s", "top": "linear", "bottom": "softmax"}
    found = verdict(rows, tmp_path, **test, lowest=100, highest=10000)
    assert found.evidence.endswith("faster from n=4096 on; eager: 88 % of linear's time is the host")


@pytest.mark.parametrize(
    ("scores", "above", "expected"),
    [
        ([0.90, 0.91, 0.92], -0.02, "holds"),
        ([0.90, 0.92, 0.91], 0.0, "open"),
        ([0.50, 0.51, 0.52], -0.02, "fails"),
        ([0.99, 0.98, 0.99], 0.0, "holds"),
    ],
)
def test_scores_are_compared_seed_by_seed(scores: list[float], above: float, expected: str, tmp_path: Path) -> None:
    rows = [*scored("softmax", [0.90, 0.91, 0.92]), *scored("linear", scores)]
    found = verdict(rows, tmp_path, kind="score", top="linear", bottom="softmax", task="recall", above=above)
    assert found.verdict == expected


@pytest.mark.parametrize(("many", "expected"), [([0.97, 0.98, 0.99], "holds"), ([0.4, 0.5, 0.45], "fails")])
def test_scores_of_two_numbers_of_heads_are_compared_seed_by_seed(
    many: list[float], expected: str, tmp_path: Path
) -> None:
    rows = [*scored("softmax", [0.90, 0.91, 0.92], heads=1), *scored("softmax", many, heads=8)]
    test = {"kind": "score", "top": "softmax", "bottom": "softmax", "task": "recall", "above": 0.0}
    other = {"heads": 1, "head_dim": 64}
    found = verdict(rows, tmp_path, **test, where={"heads": 8}, bottom_where=other)
    assert (found.verdict, len(found.points)) == (expected, 1)
    assert verdict(rows, tmp_path, **test, where={"heads": 8}, bottom_where={"heads": 1}).points == ()


def test_trainings_that_were_guided_are_compared_with_others_where_the_claim_asks_for_it(tmp_path: Path) -> None:
    guided = [replace(row, guide=1.0) for row in scored("softmax", [0.97, 0.98, 0.99])]
    rows = [*scored("softmax", [0.90, 0.91, 0.92]), *guided]
    test = {"kind": "score", "top": "softmax", "bottom": "softmax", "task": "recall", "above": 0.0}
    found = verdict(rows, tmp_path, **test, where={"guide": 1}, bottom_where={"guide": None})
    assert (found.verdict, [round(point.value, 9) for point in found.points]) == ("holds", [0.07])


def test_a_score_may_be_about_several_tasks_each_a_point(tmp_path: Path) -> None:
    rows = [
        row
        for task, of_linear in (("recall", 0.95), ("copy", 0.5), ("digits", 0.1))
        for label, mean in (("softmax", 0.8), ("linear", of_linear))
        for row in scored(label, [mean, mean + 0.01, mean - 0.01], task)
    ]
    test = {"kind": "score", "top": "linear", "bottom": "softmax", "above": 0.0}
    found = verdict(rows, tmp_path, **test, task=["recall", "copy"])
    assert found.verdict == "depends on"
    assert {point.at: point.holds for point in found.points} == {"recall, n=64": True, "copy, n=64": False}


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    rows = [*scored("softmax", [0.9]), *scored("linear", [0.1])]
    found = verdict(rows, tmp_path, kind="score", top="linear", bottom="softmax", task="recall", above=-0.02)
    assert found.verdict == "open"


def two_runs(first: Iterable[Record], second: Iterable[Record], tmp_path: Path) -> pd.DataFrame:
    files = []
    for name, records in (("a", first), ("b", second)):
        files.append(tmp_path / f"{name}.csv")
        files[-1].write_text(csv_text(records), encoding="utf-8")
    return read_results(files)


PARALLEL = {
    "kind": "ratio",
    "of": "time_median_s",
    "top": "linformer",
    "bottom": "linformer",
    "below": 0.67,
    "where": {"sweep": "forward", "threads": 2},
    "bottom_where": {"threads": 1},
}


@pytest.mark.parametrize(
    ("times", "expected"),
    [({512: 0.5, 2048: 0.6}, "holds"), ({512: 0.9, 2048: 1.0}, "fails"), ({512: 0.5, 2048: 0.9}, "depends on")],
)
def test_rows_of_one_thread_and_of_two_are_paired_across_runs(
    times: Mapping[int, float], expected: str, tmp_path: Path
) -> None:
    one = [timed("linformer", n, 1.0, threads=1) for n in times]
    two = [timed("linformer", n, seconds, threads=2) for n, seconds in times.items()]
    found = judge(claim(**PARALLEL), two_runs(one, two, tmp_path))
    assert found.verdict == expected
    assert [(point.at, point.value) for point in found.points] == [
        (f"n={n}", pytest.approx(seconds)) for n, seconds in times.items()
    ]
    run = "attnbench run claims -k forward --threads"
    assert found.claim.command == f"{run} 2; {run} 1"
    alone = judge(claim(**PARALLEL), frame(two, tmp_path))
    assert (alone.verdict, alone.why) == (
        "not tested here",
        f"no such rows; measure them with: {found.claim.command}",
    )


def test_two_sweeps_of_one_variant_are_told_apart_by_their_names(tmp_path: Path) -> None:
    small = [timed("softmax", 512, 1.0), timed("linear", 512, 3.0)]
    large = [replace(timed("softmax", 512, 2.0), sweep="large")]
    test = {**FASTER, "top": "softmax", "bottom": "softmax", "where": {"sweep": "large"}}
    found = verdict([*small, *large], tmp_path, **test, bottom_where={"sweep": "forward"})
    assert (found.verdict, [point.value for point in found.points]) == ("fails", [pytest.approx(2.0)])


@pytest.mark.parametrize(("power", "expected"), [(0.0, "holds"), (1.0, "fails")])
def test_growth_over_heads_keeps_the_width_of_the_model(power: float, expected: str, tmp_path: Path) -> None:
    def of_heads(heads: int, n: int) -> Record:
        shape = Shape(seq_len=n, heads=heads, head_dim=512 // heads)
        return Record.of(
            Cell("claims", "forward", parse_spec("softmax"), shape), Status.OK, peak_bytes=int(4096 * heads**power)
        )

    rows = [of_heads(heads, n) for heads in (1, 4, 16) for n in (512, 1024)]
    found = verdict(rows, tmp_path, kind="growth", of="peak_bytes", top="softmax", over="heads", at_most=0.1)
    assert found.verdict == expected
    assert [point.at for point in found.points] == ["heads=4 to 16, n=512", "heads=4 to 16, n=1024"]
    assert [point.value for point in found.points] == [pytest.approx(power)] * 2


@pytest.mark.parametrize(
    ("top", "trait", "expected", "said"),
    [("linear", "causal", "holds", "yes"), ("fnet", "causal", "fails", str(VARIANTS.get("fnet").traits.causal))],
)
def test_an_ability_is_decided_by_traits_and_needs_no_row(top: str, trait: str, expected: str, said: str) -> None:
    test = {"kind": "ability", "top": top, "trait": trait}
    one = Claim.model_validate({"id": "planted", "says": "So it is.", "source": "a test", "test": test})
    found = judge(one, None)
    assert (found.verdict, found.evidence, one.command) == (expected, said, f"attnbench check {top}")


def test_every_shipped_claim_asks_for_rows_that_its_suite_has() -> None:
    """A claim whose variant, option, sweep or task is not in its suite could never be tested."""
    for one in claims():
        if one.test is None or one.test.kind == "ability":
            continue
        cells = expand(load_suite(str(one.suite)), device="cpu")
        wanted = dict(one.test.where)
        labels = [(one.test.top, wanted)]
        if one.test.kind != "growth" and one.test.bottom:
            instead = one.test.bottom_where if one.test.kind in ("ratio", "score") else {}
            labels.append((one.test.bottom, {**wanted, **instead}))
        for label, values in labels:
            spec = parse_spec(label)
            columns = {name: value for name, value in values.items() if name != "threads"}  # of a run, not of a cell
            there = [cell for cell in cells if _fits(cell, spec.name, dict(spec.options), columns)]
            assert there, f"{one.id}: no cell of {label} in {one.suite}"
            if one.test.kind == "score":
                trained = {cell.task.name for cell in there if cell.task}
                assert {parse_spec(task).name for task in one.test.tasks} <= trained, one.id
            if one.test.kind == "growth":
                steps = {cell.shape.H if one.test.over == "heads" else cell.shape.N for cell in there}
                assert max(steps) >= 4 * min(steps), one.id


def test_the_sweep_over_heads_keeps_one_width() -> None:
    cells = [cell for cell in expand(load_suite("claims"), device="cpu") if cell.sweep == "head-counts"]
    assert {(cell.shape.H, cell.shape.C) for cell in cells} == {(1, 512), (4, 512), (16, 512)}


def _fits(cell: Cell, name: str, options: Mapping[str, object], where: Mapping[str, object]) -> bool:
    complete = dict(VARIANTS.get(cell.variant.name).complete(cell.variant).options)
    columns = {"sweep": cell.sweep, "level": cell.level, "pass": cell.pass_, "seq_len": cell.shape.N}
    columns |= {"heads": cell.shape.H, "head_dim": cell.shape.D, "positions": cell.model and cell.model.positions}
    columns |= {"guide": (cell.training and cell.training.guide) or None}
    return (
        cell.variant.name == name
        and all(complete.get(key) == value for key, value in options.items())
        and all(columns[key] == value for key, value in where.items())
    )


def test_every_claim_has_a_name_of_its_own() -> None:
    assert len({one.id for one in claims()}) == len(claims())


@pytest.mark.parametrize(
    "wrong",
    [
        {"suite": "claims"},
        {"missing": "no variant", "suite": "claims"},
        {"suite": "claims", "test": {**FASTER, "above": 2.0}},
        {"suite": "claims", "test": {"kind": "growth", "of": "time_median_s", "top": "linear"}},
        {"suite": "claims", "test": {**FASTER, "colour": "red"}},
        {"suite": "claims", "test": {**FASTER, "bottom_where": {"threads": 1}}},
        {"suite": "claims", "test": {**PARALLEL, "where": {"threads": 2}}},
        {"suite": "claims", "test": {**FASTER, "where": {"threads": 2}}},
        {"suite": "claims", "test": {"kind": "ability", "top": "linear", "trait": "causal"}},
        {"test": {"kind": "ability", "top": "linear", "trait": "courage"}},
        {"test": FASTER},
    ],
)
def test_a_claim_that_cannot_be_decided_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Claim.model_validate({"id": "planted", "says": "So it is.", "source": "a test", **wrong})


def test_the_command_prints_each_claim_and_counts_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claims"]) == 0  # before anything was measured
    out = capsys.readouterr().out
    known = Counter(judge(one, None).verdict for one in claims())  # abilities need no rows
    told = f"{known['holds']} hold, {known['fails']} fail, 0 depend on the setting"
    told += f", 0 open, {known['not tested here']} not tested here."
    assert f"Of {len(claims())} claims: {told}" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "-k", "no such thing"]) == 2
    assert main(["claims", str(tmp_path / "nowhere")]) == 2
    assert main(["claims", "a", "b", "--run"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def two_thread_claims() -> Iterable[str]:
    return (one.id for one in claims() if any(run.threads for run in one.runs))


@pytest.mark.parametrize(("cores", "counts"), [(2, [2, 1]), (8, [2, 1]), (1, [1])])
def test_run_measures_both_numbers_of_threads(
    cores: int, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("attnbench.cli.screen.run.measured", plans.append)
    monkeypatch.setattr("attnbench.measure.machine.available_cores", lambda: cores)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "rows.csv").write_text(csv_text([timed("softmax", 512, 1.0)]), encoding="utf-8")
    main(["claims", "results/rows.csv", "--run", "-k", "parallel-linformer"])
    assert [plan.settings.threads for plan in plans] == counts
    assert {(cell.suite, cell.sweep) for plan in plans for cell in plan.cells} == {("claims", "parallel")}
    told = capsys.readouterr().err
    assert ("too few for: attnbench run claims -k parallel --threads 2" in told) == (cores < 2)


def test_each_claim_about_threads_names_the_runs_that_it_needs() -> None:
    known = {one.id: [run.threads for run in one.runs] for one in claims()}
    assert {name: known[name] for name in two_thread_claims()} == {
        "parallel-linformer": [2, 1],
        "parallel-linformer-faster": [2],
        "parallel-softmax": [2, 1],
        "parallel-recurrent": [2, 1],
    }


@pytest.mark.parametrize(
    ("select", "sweeps"),
    [
        ("fewer-parameters-performer", {"layers"}),
        ("positions-guided-far", {"sinusoid", "guided"}),
        ("positions-", {"near", "near-guided"}),
    ],
)
def test_run_measures_the_sweeps_that_the_chosen_claims_read(
    select: str, sweeps: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("attnbench.cli.screen.run.measured", plans.append)
    monkeypatch.chdir(tmp_path)
    main(["claims", "--run", "-k", select])
    assert sweeps in [{cell.sweep for cell in plan.cells if plan.visits(cell)} for plan in plans]


def test_the_range_of_many_points_names_its_quantity() -> None:
    points = tuple(Point(f"n={n}", n / 2, n / 2, n / 2, True, what="time ratio") for n in range(1, 6))
    found = Judgement(next(iter(claims())), "holds", points).evidence
    assert found == "holds at n=1, n=2, n=3, n=4 and 1 more (time ratio: least 0.5, largest 2.5)"
    alone = Point("n=6, rank=2", 1.01, 0.9, 1.1, None, what="time ratio")
    found = Judgement(next(iter(claims())), "depends on", (*points, alone)).evidence
    assert found.endswith("largest 2.5); open at n=6, rank=2: time ratio 1.01 (0.9 to 1.1)")
