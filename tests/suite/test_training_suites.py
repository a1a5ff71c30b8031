from __future__ import annotations

from typing import Any

import pytest

from attnbench.errors import SuiteError, UsageError
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Training
from attnbench.suite.expand import apply_overrides, expand
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

SWEEP: dict[str, Any] = {
    "name": "w",
    "level": "model",
    "pass": "training",
    "measure": "score",
    "matrix": {"variant": "softmax", "task": ["recall", "copy"], "seq_len": 64},
}


def suite(*more: dict[str, Any], **changes: Any) -> Suite:
    given = {**SWEEP, **changes}
    given = {name: value for name, value in given.items() if value is not None}
    return Suite.of({"name": "s", "sweeps": [given, *more]}, Origin())


def matrix(**axes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**SWEEP["matrix"], **axes}.items() if value is not None}


def test_a_sweep_of_scores_is_a_cell_for_each_training() -> None:
    training = {"steps": 50, "pretrain": "masked", "sweep_seeds": 1}
    cells = expand(suite(training=training, matrix=matrix(seed=[0, 1], learning_rate=[0.001, 0.004])))
    assert len(cells) == len({cell.cell_id for cell in cells}) == 8
    assert {cell.training for cell in cells} == {
        Training(steps=50, learning_rate=rate, protocol="sweep", sweep_seeds=1, pretrain_steps=50)
        for rate in (0.001, 0.004)
    }
    assert {cell.task and cell.task.label for cell in cells} == {"recall", "copy"}
    (plain, _) = expand(suite())
    assert plain.training == Training()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"level": "layer"}, "'score' is measured by training a model; write level: model and pass: training"),
        ({"pass": "forward"}, "'score' is measured by training a model; write level: model and pass: training"),
        ({"measure": ["score", "time"]}, "'score' stands alone: what trains is not timed"),
        ({"matrix": matrix(task=None)}, "'score' needs a task; write task: recall, say"),
        ({"matrix": matrix(task="recal")}, "unknown task 'recal'; did you mean 'recall'?"),
        ({"matrix": matrix(task="recall:pears=3")}, "recall: unknown option 'pears'; did you mean 'pairs'?"),
        ({"matrix": matrix(padding=0.5)}, "'padding' does nothing to a task"),
        ({"matrix": matrix(learning_rate="2e-3")}, "write 2.0e-3: YAML takes 2e-3 for text"),
        ({"matrix": matrix(learning_rate=0)}, "'learning_rate' must be above 0 and at most 1, got 0; write 0.002, say"),
        ({"model": {"vocab": 9}}, "'vocab' does nothing with a task, which has its own; remove it"),
        ({"measure": "time", "training": {"steps": 3}}, "'training' does nothing without measure: score; remove it"),
        (
            {"measure": "time", "matrix": matrix(learning_rate=0.1)},
            "'learning_rate' does nothing without measure: score",
        ),
        (
            {"measure": "time", "matrix": matrix(test_len=128)},
            "'test_len' does nothing without measure: score; remove it",
        ),
        ({"matrix": matrix(test_len=0)}, "'test_len' must lie between 1 and"),
        ({"matrix": matrix(test_len="long")}, "'test_len' must be whole numbers, got the text 'long'"),
        ({"measure": "time", "level": "operator"}, "'task' does nothing at level operator"),
        ({"training": {"pretrain_steps": 3}}, "'pretrain_steps' does nothing without pretrain: masked; remove it"),
        ({"training": {"step": 3}}, "unknown key 'step'; did you mean 'steps'?"),
        ({"training": {"steps": 0}}, "'steps'"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SuiteError) as refused:
        expand(suite(**changes))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_test_at_the_length_of_the_training_is_what_it_was_before_there_were_others() -> None:
    (plain, _), others = expand(suite()), expand(suite(matrix=matrix(task="recall", test_len=["64..256", 32])))
    assert [cell.test_len for cell in others] == [None, 128, 256, 32]
    assert others[0] == plain
    assert len({cell.cell_id for cell in others}) == 4
    assert {cell.whole_training for cell in others} == {plain}
    assert [Record.of(cell, Status.OK).test_len for cell in others] == [64, 128, 256, 32]
    left = Suite.of(
        {
            "name": "s",
            "sweeps": [{**SWEEP, "matrix": matrix(task="recall", test_len=[64, 128, 256])}],
            "exclude": [{"test_len": ">=128"}],
        },
        Origin(),
    )
    assert [cell.test_len for cell in expand(left)] == [None]


def test_overrides_reach_the_sweeps_that_have_the_axis() -> None:
    timed = {"name": "t", "matrix": {"variant": "softmax", "seq_len": 64}}
    changed = apply_overrides(suite(timed), {"task": "recall:pairs=8,values=4", "learning_rate": "0.001,0.002"})
    scored, plain = changed.sweeps
    assert [spec.label for spec in scored.matrix.task] == ["recall:pairs=8,values=4"]
    assert scored.matrix.learning_rate == [0.001, 0.002]
    assert not plain.matrix.task
    with pytest.raises(UsageError, match="--set learning_rate: only sweeps that measure a score have this axis"):
        apply_overrides(Suite.of({"name": "s", "sweeps": [timed]}, Origin()), {"learning_rate": "0.1"})
