"""``match --from``: only points that a finished run measured."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest

import attnbench
from attnbench.answers.match.budget import Budget
from attnbench.answers.match.from_run import match_run
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import ResultsError, UsageError
from attnbench.measure.status import Status
from attnbench.results.record import COLUMNS, Record
from attnbench.suite.cell import Cell

# In pandas 2 a column without a number has no say in the type of a joined one; a warning says that pandas 3 decides so.
pytestmark = pytest.mark.filterwarnings("ignore:The behavior of DataFrame concatenation:FutureWarning")

SECONDS = 1e-5


def row(
    label: str, n: int = 1024, status: Status = Status.OK, level: str = "operator", **columns: Any
) -> dict[str, Any]:
    cell = Cell("s", "w", parse_spec(label), Shape(seq_len=n), level=level)  # type: ignore[arg-type]
    return Record.of(cell, status, **columns).to_json()


def timed(label: str, seconds: float, size: int, **columns: Any) -> dict[str, Any]:
    times = {"time_median_s": seconds, "time_ci_low_s": 0.9 * seconds, "time_ci_high_s": 1.1 * seconds}
    return row(label, **times, peak_bytes=size, **columns)


def erred(label: str, error: float, spread: float = 0.0, **columns: Any) -> dict[str, Any]:
    kind = columns.pop("error_kind", "approximation")
    return row(label, rel_error=error, rel_error_std=spread, error_draws=5, error_kind=kind, **columns)


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows), columns=[*COLUMNS])
    for name in ("time_median_s", "time_ci_low_s", "time_ci_high_s", "peak_bytes", "rel_error", "rel_error_std"):
        frame[name] = frame[name].astype(float)
    return frame.assign(error_kind=frame["error_kind"].fillna(""), reason=frame["reason"].fillna(""))


@pytest.fixture
def run() -> pd.DataFrame:
    rows = []
    for features in (64, 128, 256, 512):
        label = f"performer:features={features}" if features != 256 else "performer"
        rows += [timed(label, SECONDS * features, 1000 * features), erred(label, 4 / features)]
    rows += [timed("softmax", 0.02, 2**22), erred("softmax", 1e-7, error_kind="exact")]
    rows += [timed("topk", 0.01, 2**20), erred("topk", 0.02)]
    return table(*rows)


def test_the_cheapest_measured_setting_within_an_error_is_chosen_and_named_with_its_value(run: pd.DataFrame) -> None:
    found = match_run(run, ["performer"], Budget("error", 0.02))
    (one,) = found.found
    assert one.chosen is not None
    assert (one.chosen.label, one.chosen.memory, len(one.tries)) == ("performer:features=256", 256_000, 4)
    assert found.ok


def test_the_dearest_measured_setting_that_fits_is_chosen(run: pd.DataFrame) -> None:
    (one,) = match_run(run, ["performer"], Budget("memory", 200_000)).found
    assert one.chosen is not None
    assert one.chosen.value == 128


def test_without_names_everything_in_the_run_takes_part_and_ratios_say_that_they_are_not_paired(
    run: pd.DataFrame,
) -> None:
    found = match_run(run, [], Budget("error", 0.02))
    assert [one.variant for one in found.found] == ["performer", "softmax", "topk"]
    said = found.sentences()
    assert "performer:features=256 takes 0.128 (0.105 to 0.156) of the time of softmax; not timed in turns" in said
    assert "least memory within error 0.02: performer:features=256, 250 KiB" in said


def test_other_options_must_agree_and_a_given_value_stays(run: pd.DataFrame) -> None:
    more = [timed("performer:features=64,kernel=relu", 1e-4, 100), erred("performer:features=64,kernel=relu", 0.001)]
    both = pd.concat([run, table(*more)], ignore_index=True)
    plain, relu, fixed = match_run(
        both, ["performer", "performer:kernel=relu", "performer:features=64"], Budget("error", 0.02)
    ).found
    assert plain.chosen is not None
    assert relu.chosen is not None
    assert (plain.chosen.value, relu.chosen.value) == (256, 64)
    assert (fixed.note, fixed.chosen) == ("its features is given", None)


def test_what_the_run_has_not_measured_is_said(run: pd.DataFrame) -> None:
    nothing = match_run(run, ["local"], Budget("error", 0.02))
    assert nothing.sentences() == ["local: not measured: the run has no row of it"]
    with pytest.raises(UsageError, match="no rows at n = 77; there are: 1024"):
        match_run(run, ["performer"], Budget("error", 0.02), n=77)
    with pytest.raises(UsageError, match="no error rows with inputs 'listops'"):
        match_run(run, ["performer"], Budget("error", 0.02), inputs="listops")
    with pytest.raises(ResultsError, match="no time of model training; it has --level operator --pass forward"):
        match_run(run, ["performer"], Budget("time", 0.02), level="model", pass_="training")


@pytest.mark.parametrize("names", [[], ["performer"]])
def test_a_row_that_says_nothing_of_the_knob_takes_part_as_it_stands(names: list[str]) -> None:
    frame = table(timed("performer", 1e-3, 100), erred("performer", 0.01)).assign(options="{}")
    (one,) = match_run(frame, names, Budget("error", 0.02)).found
    assert one.chosen is not None
    assert (one.knob, one.note, one.chosen.error) == ("", "its row says nothing of features", 0.01)


def test_a_setting_that_failed_in_the_run_is_no_answer_and_gives_its_reason() -> None:
    frame = table(
        timed("performer:features=64", 1e-3, 100),
        erred("performer:features=64", 0.5),
        row("performer:features=128", status=Status.OOM, reason="needs another 9 GiB"),
    )
    found = match_run(frame, ["performer"], Budget("error", 0.1))
    (line,) = found.sentences()
    assert line == (
        "performer does not reach error 0.1: best 0.5 at features=64; features=128: oom, needs another 9 GiB"
    )


def test_a_row_that_failed_in_one_sweep_hides_no_time_of_another() -> None:
    late = row("topk", status=Status.TIMEOUT, reason="exact attention took too long", sweep="error")
    (topk,) = match_run(table(late, timed("topk", 0.01, 2**20)), ["topk"], Budget("time", 1.0)).found
    assert topk.chosen is not None
    assert topk.chosen.time == 0.01


def test_times_of_other_circumstances_are_not_mixed(run: pd.DataFrame) -> None:
    other = table(timed("topk", 1e-9, 1)).assign(batch=64)
    found = match_run(pd.concat([other, run], ignore_index=True), ["topk"], Budget("time", 1.0))
    assert found.found[0].chosen is not None
    assert found.found[0].chosen.time == 0.01


@pytest.mark.parametrize("fact", ["machine_id", "torch_version", "run"])
def test_times_of_two_machines_versions_or_runs_are_not_mixed(run: pd.DataFrame, fact: str) -> None:
    both = pd.concat([table(timed("linear", 1e-9, 1)).assign(**{fact: "b"}), run.assign(**{fact: "a"})])
    found = {one.variant: one for one in match_run(both, [], Budget("time", 1.0)).found}
    assert found.keys() == {"performer", "softmax", "topk"}


def test_errors_without_times_of_the_same_level_say_which_times_there_are(run: pd.DataFrame) -> None:
    found = match_run(run, ["performer"], Budget("error", 0.02), level="layer")
    assert found.warnings == ["no times of layer forward at n = 1024; it has --level operator --pass forward"]
    assert found.found[0].chosen is not None
    assert found.found[0].chosen.time is None


def test_its_rows_are_plain_values(run: pd.DataFrame) -> None:
    json.dumps(match_run(run, [], Budget("error", 0.02)).to_json())


SMALL = {"heads": 1, "kv_heads": 1, "head_dim": 16, "v_dim": 16}


def test_an_error_is_not_joined_with_the_time_of_another_shape() -> None:
    frame = table(
        *(timed(name, 0.01, 100, heads=4, kv_heads=4) for name in ("performer", "softmax")),
        erred("performer", 0.1, **SMALL),
    )
    found = match_run(frame, ["performer"], Budget("error", 0.3))
    assert found.warnings == ["the times at n = 1024 are of another shape than the errors, and are left out"]
    assert "H=1 D=16" in found.about
    (point,) = found.found[0].tries
    assert (point.error, point.time, point.memory) == (0.1, None, None)
    lacking = match_run(frame, ["softmax"], Budget("error", 0.3))
    assert lacking.sentences() == ["softmax: not measured: the run has no error of it at this shape"]
    cheap = match_run(frame, ["performer"], Budget("time", 0.1))
    assert cheap.warnings == ["the errors at n = 1024 are of another shape than the time, and are left out"]
    assert "H=4" in cheap.about
    assert "errors" not in cheap.about
    (point,) = cheap.found[0].tries
    assert (point.error, point.time) == (None, 0.01)


def test_of_errors_at_two_shapes_those_with_the_most_settings_are_taken_with_times_of_their_own_shape() -> None:
    more = [erred(f"performer:features={features}", 0.1, **SMALL) for features in (16, 32)]
    frame = table(
        timed("performer:features=16", 0.02, 100), erred("performer:features=16", 0.2), *more,
        timed("performer:features=16", 0.01, 50, **SMALL),
    )  # fmt: skip
    (one,) = match_run(frame, ["performer"], Budget("error", 0.3)).found
    assert [(point.value, point.error, point.time) for point in one.tries] == [(16, 0.1, 0.01), (32, 0.1, None)]


def test_what_has_no_error_is_not_said_to_miss_an_error(run: pd.DataFrame) -> None:
    frame = pd.concat([run[run["variant"] != "softmax"], table(timed("softmax", 0.02, 2**22))], ignore_index=True)
    lines = match_run(frame, ["softmax"], Budget("error", 0.3)).sentences()
    assert lines == ["softmax takes part as it stands (it has no knob): no error measured"]
    without = table(timed("performer:features=64", 1e-3, 100), erred("softmax", 1e-7))
    assert match_run(without, ["performer"], Budget("error", 0.3)).sentences() == [
        "performer does not reach error 0.3: no error measured"
    ]


def test_rows_of_a_version_that_lacked_an_option_are_found_by_their_label_and_told(run: pd.DataFrame) -> None:
    def older(text: str) -> str:
        options = json.loads(text)
        return json.dumps({name: value for name, value in options.items() if name not in ("beta", "gamma")})

    assert "beta" in json.loads(run["options"].iloc[0])
    before = run.assign(options=run["options"].map(older))
    found = match_run(before, ["performer", "performer:features=64", "softmax"], Budget("error", 0.02))
    plain, fixed, exact = found.found
    assert plain.chosen is not None
    assert (plain.chosen.value, len(plain.tries), plain.before) == (256, 4, "no beta, no gamma")
    assert (fixed.tries[0].error, fixed.before, exact.before) == (4 / 64, "no beta, no gamma", "")
    assert found.sentences()[0].endswith("; in the run: no beta, no gamma")
    assert [one.before for one in match_run(run, ["performer"], Budget("error", 0.02)).found] == [""]


@pytest.mark.parametrize("budget", ["error", "score"])
def test_a_frame_that_is_no_table_of_results_is_refused(budget: str) -> None:
    given: Any = {budget: 0.5}
    with pytest.raises(ResultsError, match="not a results table"):
        attnbench.match(results=pd.DataFrame(), **given)
