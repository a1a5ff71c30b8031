"""``match --score``: which settings are trained, how often, and what their scores decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnbench.answers.match import match as matching
from attnbench.answers.match.budget import Budget
from attnbench.answers.match.match import ReadyMatch, prepare_scores
from attnbench.answers.match.result import Match
from attnbench.cli.app import main
from attnbench.cli.options import MatchOptions
from attnbench.cli.signature import completed
from attnbench.errors import UsageError
from attnbench.harness.outside.isolation import Worker
from attnbench.harness.plan import Plan
from attnbench.harness.runner import Watcher
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.results.store import RunFolder
from attnbench.suite.cell import Cell

SPREAD = 0.01
"""By which the scores of neighbouring seeds differ: with three seeds Student's interval is ±0.0248."""


class Trained:
    """Stands for the runs: each training scores at once, ``of`` its cell on average over seeds."""

    def __init__(self, of: Callable[[Cell], float], fails: Callable[[Cell], bool] = lambda cell: False) -> None:
        self.of, self.fails = of, fails
        self.asked: list[list[Cell]] = []
        self.path = Path("results/match-recall/run")

    def execute(self, plan: Plan, watcher: Watcher, worker: Worker) -> tuple[Any, list[Record]]:
        watcher.begun(self.path, cells=3, visits=3, resumed=0)
        return SimpleNamespace(path=self.path), self._rows(plan, watcher)

    def go_on(self, plan: Plan, folder: Any, worker: Worker, watcher: Watcher) -> list[Record]:
        return self._rows(plan, watcher)

    def _rows(self, plan: Plan, watcher: Watcher) -> list[Record]:
        mine = [cell for cell in plan.cells if plan.visits(cell)]
        self.asked.append(mine)
        for cell in mine:
            watcher.visiting(cell)
        return [self._row(cell) for cell in mine]

    def _row(self, cell: Cell) -> Record:
        if self.fails(cell):
            return Record.of(cell, Status.CRASH, "the process was killed")
        score = self.of(cell) + SPREAD * (cell.seed - 1)
        scores = {"score": score, "score_low": score - 0.001, "score_high": score + 0.001, "val_score": score}
        return Record.of(cell, Status.OK, **scores, chance_score=0.25, test_examples=10_000)


def features(cell: Cell) -> int:
    return int(dict(cell.variant.options).get("features", 256))


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Match]:
    """Asks with trainings that take no time; every setting runs, in as many seconds as it has features."""

    class Idle:
        traces = ""
        served = 0

        def __init__(self, settings: object) -> None: ...

        def __enter__(self) -> Idle:
            return self

        def __exit__(self, *_: object) -> None: ...

        def start(self) -> dict[str, str]:
            return {"process": "tuned"}

    def look(self: VisitCell, worker: object, timeout: float) -> Any:
        m = features(self.cell)
        return SimpleNamespace(record=Record.of(self.cell, Status.OK, time_median_s=float(m), peak_bytes=1000 * m))

    def ask(trained: Trained, variants: list[str], score: float, **how: Any) -> Match:
        monkeypatch.setattr(matching, "Worker", Idle)
        monkeypatch.setattr(matching.Contest, "answer", lambda *_, **__: None)
        monkeypatch.setattr(VisitCell, "ask", look)
        monkeypatch.setattr(matching, "execute", trained.execute)
        monkeypatch.setattr(matching, "go_on", trained.go_on)
        ready = prepared(variants, score, **{"rates": "0.004", **how})
        assert ready.trainings is not None
        return ready.answer()

    return ask


def test_the_cheapest_setting_is_chosen_whose_interval_over_seeds_reaches_the_score(
    answer: Callable[..., Match],
) -> None:
    trained = Trained(lambda cell: 1 - 4 / features(cell))
    found = answer(trained, ["performer"], 0.9)
    (one,) = found.found
    assert [point.value for point in one.tries] == [8, 16, 32, 64, 48, 56]  # the mean alone would do at 40
    assert one.chosen is not None
    assert one.chosen.value == 56
    assert one.chosen.score == pytest.approx(1 - 4 / 56)
    assert one.chosen.score_low == pytest.approx(1 - 4 / 56 - 4.303 * SPREAD / 3**0.5, abs=1e-4)
    assert (one.chosen.time, one.chosen.memory) == (56.0, 56_000)
    assert [sorted(cell.seed for cell in cells) for cells in trained.asked] == [[0, 1, 2]] * 6
    assert found.sentences() == ["performer:features=56 reaches score 0.9: 0.929 (0.904 to 0.953)"]
    assert found.kept == trained.path


def test_a_row_says_what_was_trained_and_a_score_that_is_not_reached_is_an_answer(answer: Callable[..., Match]) -> None:
    found = answer(Trained(lambda cell: 0.61), ["performer"], 0.9, task="recall:pairs=4", n=32, layers=1)
    assert found.sentences() == ["performer does not reach score 0.9: best 0.61 (0.585 to 0.635) at features=8"]
    row = found.to_rows()[-1]
    told = ("target", "score", "reached", "seq_len", "layers", "steps", "seeds", "level", "pass")
    assert [row[name] for name in told] == ["score", pytest.approx(0.61), False, 32, 1, 400, 3, "model", "training"]
    assert row["task"].startswith("recall:")
    assert row["error"] is None


def test_variants_without_a_knob_are_trained_as_they_stand_and_the_least_memory_is_named(
    answer: Callable[..., Match],
) -> None:
    found = answer(Trained(lambda cell: 0.95), ["performer", "softmax", "identity"], 0.9)
    lines = found.sentences()
    assert "softmax takes part as it stands (it has no knob): 0.95 (0.925 to 0.975), at score 0.9 or more" in lines
    assert "least memory at score 0.9 or more: performer:features=8, 7.81 KiB" in lines


def test_a_setting_of_which_one_training_failed_is_not_chosen_and_bounds_the_search(
    answer: Callable[..., Match],
) -> None:
    trained = Trained(lambda cell: 0.5, fails=lambda cell: features(cell) == 32 and cell.seed == 2)
    (one,) = answer(trained, ["performer"], 0.9).found
    assert one.chosen is None
    (failed,) = [point for point in one.tries if point.status is Status.CRASH]
    assert (failed.value, failed.score) == (32, None)
    assert failed.reason == "1 of 3 trainings failed: the process was killed"
    assert max(point.value or 0 for point in one.tries) == 32


def test_a_target_that_guessing_reaches_is_doubted(answer: Callable[..., Match]) -> None:
    said = "always the same answer scores 0.250, so that score 0.2 asks for nothing; raise --score"
    assert said in answer(Trained(lambda cell: 0.5), ["performer"], 0.2).warnings
    assert said not in answer(Trained(lambda cell: 0.5), ["performer"], 0.3).warnings


def prepared(variants: list[str], score: float = 0.9, **how: Any) -> ReadyMatch:
    given = completed(MatchOptions, {"device": "cpu", "threads": 1, **how})  # type: ignore[typeddict-item]  # by name
    return prepare_scores(variants, Budget("score", score), given)


def test_every_setting_that_may_be_tried_is_in_one_plan_whatever_the_target() -> None:
    low, high = prepared(["performer", "softmax"], 0.1), prepared(["performer", "softmax"], 0.99)
    assert low.trainings is not None
    assert high.trainings is not None
    assert low.trainings.plan.cells == high.trainings.plan.cells
    labels = {cell.variant.label for cell in low.trainings.plan.cells}
    assert labels == {"softmax", *(f"performer:features={m}" for m in range(8, 65, 8))}


def test_how_many_trainings_a_setting_takes_at_most_is_known_before() -> None:
    several, one = prepared(["performer"]).trainings, prepared(["performer"], rates="0.004", seeds=4).trainings
    assert several is not None
    assert one is not None
    assert several.of_one_setting == 5  # two seeds at two rates, and the third at the better one
    assert one.of_one_setting == 4
    question = prepared(["performer", "softmax"])
    assert [question.most_tries(entrant) for entrant in question.entrants] == [6, 1]


def test_the_model_that_is_timed_is_the_one_that_is_trained() -> None:
    question = prepared(["performer"], n=32, heads=4, head_dim=8, batch=5, layers=3, ffn=17, task="copy")
    assert question.trainings is not None
    cell, training = question.cell, question.trainings.plan.cells[0]
    assert (cell.shape, cell.model, cell.task) == (training.shape, training.model, training.task)
    assert (cell.level, cell.pass_, cell.training, cell.measure) == ("model", "training", None, ("time", "memory"))
    assert question.about.startswith("copy, n = 32, 3 layers, 4 × 8, feed-forward 17, batches of 5, 400 steps, 3 ")


def test_more_settings_than_a_run_can_have_are_refused_before_they_are_listed() -> None:
    with pytest.raises(UsageError, match="6291456 trainings are within reach, at most 20000; give a smaller --most"):
        prepared(["performer"], n=2**23)


TINY = "--task recall:pairs=4,values=4,test=64 --n 16 --heads 2 --head-dim 8 --layers 1 --ffn 16 --batch 4 --steps 6"


@pytest.mark.usefixtures("forks")
def test_finished_trainings_are_kept_and_another_target_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["match", "performer", "softmax", *TINY.split(), "--seeds", "2", "--rates", "0.004", "--min-time", "0.01"]
    asked += ["--device", "cpu", "--threads", "1", "--process", "as-shipped"]
    assert main([*asked, "--score", "0.001", "--csv", "match.csv", "--plot", "frontier.svg"]) == 0
    out, err = capsys.readouterr()
    assert "at most 6 trainings of 6 steps, 2 for each setting that is tried" in " ".join(err.split())
    assert "softmax takes part as it stands" in " ".join(out.split())
    assert len((tmp_path / "match.csv").read_text(encoding="utf-8").splitlines()) in (3, 4)
    (folder,) = (file.parent for file in tmp_path.glob("results/match-recall/*/records.jsonl"))
    assert f"trainings: {folder.relative_to(tmp_path)}/results.csv" in out
    before = {row.cell_id: row.started_at for row in RunFolder(folder).records().values()}
    assert {row.status for row in RunFolder(folder).records().values()} == {Status.OK}
    assert main([*asked, "--score", "0.99"]) == 0
    out, err = capsys.readouterr()
    assert "performer does not reach score 0.99: best" in " ".join(out.split())
    assert f"resuming {folder.relative_to(tmp_path)}: {len(before)} trainings found" in " ".join(err.split())
    assert err.count("resuming") == 1  # and not once more for each setting
    after = RunFolder(folder)
    assert {row.cell_id: row.started_at for row in after.records().values()}.items() >= before.items()
    assert sum(row.cell_id in before for row in after.history()) == len(before)  # none was trained again
    labels = {row.label for row in after.records().values()}
    assert labels == {"performer:features=8", "performer:features=16", "softmax"}
    assert main(["match", "--from", str(folder), "--score", "0.99"]) == 0
    out, _ = capsys.readouterr()
    assert "performer does not reach score 0.99: best" in " ".join(out.split())
