"""A swap is a run: its rows, and what a second command finds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from attnbench.cli import options
from attnbench.cli.signature import completed
from attnbench.errors import BrokenContract
from attnbench.harness.runner import Watcher, execute
from attnbench.harness.swap import loss
from attnbench.harness.swap.request import SwapRequest, refuse_inexact, variants_of
from attnbench.measure.status import Status
from attnbench.models.pretrained import models
from attnbench.models.pretrained import pretrained_cell as cells
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.results.record import Record
from attnbench.results.swaps import lines
from attnbench.suite.cell import Cell
from tests.models.pretrained import properties
from tests.models.pretrained.models import tiny

pytestmark = pytest.mark.usefixtures("forks")
QUICK = {"length": 24, "windows": 6, "steps": "0,2", "batch": 2, "learning_rate": 1e-3, "device": "cpu", "threads": 1}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.setattr(models, "OwnEncoder", tiny)
    yield
    forget()


def forget() -> None:
    for one in (cells.cached, loss._baseline, loss._moved, loss._tuning):
        one.forget()


class Seen(Watcher):
    def __init__(self) -> None:
        self.visits: list[str] = []

    def visiting(self, cell: Cell) -> None:
        self.visits.append(f"{cell.variant.label} {cell.replaced} {cell.tuned}")


def ask(out: Path, *variants: str, seen: Watcher | None = None, **changed: Any) -> list[Record]:
    given = completed(options.SwapOptions, {**QUICK, "out": out, **changed})
    one = SwapRequest.of("listops", variants_of(variants, ()), given)
    with one.worker() as worker:
        records = execute(one.plan(worker)[1], seen, worker)[1]
    refuse_inexact(records)
    return records


def by_key(rows: Sequence[Record]) -> dict[tuple[str, str, int], Record]:
    return {(row.label if row.sweep != "exact" else "exact", row.replaced, row.tuned): row for row in rows}


def test_every_variant_has_a_row_for_each_number_of_steps_beside_the_controls(tmp_path: Path) -> None:
    found = ask(tmp_path, "performer:features=8", "local:window=8")
    properties.the_controls_stand_in_the_rows(found, (0, 2))
    rows = by_key(found)
    assert list(rows) == [
        ("exact", "all", 0),
        *((label, "all", steps)
          for label in ("none", "mean-value", "performer:features=8", "local:window=8") for steps in (0, 2)),
    ]  # fmt: skip
    assert all(row.status == "ok" for row in rows.values())
    exact, none = rows["exact", "all", 0], rows["none", "all", 0]
    assert exact.loss == pytest.approx(exact.loss_base, abs=1e-5)
    assert none.loss_delta == 0
    trained = rows["performer:features=8", "all", 2]
    assert (trained.tuned, trained.train, trained.learning_rate) == (2, "all", 1e-3)
    assert trained.trainable_params == sum(one.numel() for one in tiny().module.parameters())
    assert (none.pairs_seen, exact.pairs_seen) == (None, 1.0)
    assert rows["local:window=8", "all", 0].pairs_seen == pytest.approx(336 / 576)
    assert trained.loss_delta_low is not None
    assert trained.loss_delta_high is not None
    assert trained.loss_delta_low <= (trained.loss_delta or 0) <= trained.loss_delta_high
    assert len(json.loads(trained.window_losses)) == 6


def test_a_training_that_was_stopped_on_the_way_gives_the_numbers_of_one_that_was_not(tmp_path: Path) -> None:
    whole = by_key(ask(tmp_path / "a", "performer:features=8", steps="0,1,3"))
    only = by_key(ask(tmp_path / "b", "performer:features=8", steps="3"))
    for key, row in only.items():
        assert (row.window_losses, row.kl) == (whole[key].window_losses, whole[key].kl)


def test_the_same_command_visits_nothing_again_and_a_further_variant_joins(tmp_path: Path) -> None:
    first, again, more = Seen(), Seen(), Seen()
    before = ask(tmp_path, "local:window=8", seen=first)
    assert ask(tmp_path, "local:window=8", seen=again) == before
    assert (len(first.visits), again.visits) == (7, [])
    joined = ask(tmp_path, "local:window=8", "local:window=4", seen=more)
    assert more.visits == ["local:window=4 all 0", "local:window=4 all 2"]
    assert by_key(joined).items() > by_key(before).items()


def test_other_rules_and_a_fresh_start_take_nothing_over(tmp_path: Path) -> None:
    ask(tmp_path, "local:window=8")
    for changed in ({"fresh": True}, {"learning_rate": 2e-3}, {"windows": 7}):
        seen = Seen()
        ask(tmp_path, "local:window=8", seen=seen, **changed)
        assert "local:window=8 all 2" in seen.visits
        assert len(seen.visits) == (6 if "learning_rate" in changed else 7), "what is not trained is the same"


def test_what_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    class Stops(Seen):
        def visiting(self, cell: Cell) -> None:
            super().visiting(cell)
            if cell.variant.name == "local":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, "local:window=8", seen=Stops())
    seen = Seen()
    assert all(row.status == "ok" for row in ask(tmp_path, "local:window=8", seen=seen))
    assert seen.visits == ["local:window=8 all 0", "local:window=8 all 2"]


def test_what_cannot_be_put_in_is_a_row_with_the_reason_and_is_not_tried_again(tmp_path: Path) -> None:
    rows = by_key(ask(tmp_path, "fnet", "linformer:rank=64"))
    for steps in (0, 2):
        assert rows["fnet", "all", steps].status is Status.UNSUPPORTED
        assert "rank 64 is above" in rows["linformer:rank=64", "all", steps].reason
    seen = Seen()
    ask(tmp_path, "fnet", "linformer:rank=64", seen=seen)
    assert seen.visits == []


def test_a_visit_that_failed_is_a_row_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbench.catalogue.attention.pattern.local import Local

    def fails(self: Local, *_: object, **__: object) -> Tensor:
        raise ArithmeticError("no luck")

    with monkeypatch.context() as patched:
        patched.setattr(Local, "forward", fails)
        row = by_key(ask(tmp_path, "local:window=8", unchecked=True))["local:window=8", "all", 2]
        assert (row.status, row.reason) == (Status.ERROR, "ArithmeticError: no luck")
    seen = Seen()
    again = ask(tmp_path, "local:window=8", unchecked=True, seen=seen)
    assert by_key(again)["local:window=8", "all", 2].status == "ok"
    assert seen.visits == ["local:window=8 all 0", "local:window=8 all 2"]


def test_a_model_in_which_softmax_attention_changes_the_loss_is_never_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(OwnEncoder):
        """Hands on q without the model's own scale."""

        def read(self, tokens: Tensor, intercept: Any = None) -> Any:
            if intercept is None:
                return super().read(tokens)
            return super().read(tokens, lambda place, q, k, v, exact: intercept(place, 2 * q, k, v, exact))

    monkeypatch.setattr(models, "OwnEncoder", lambda length: Scaled(length, tiny().module))
    with pytest.raises(BrokenContract, match="softmax attention in the place of the model's own moves it"):
        ask(tmp_path, "local:window=8")
    (table,) = tmp_path.glob("swap/*/records.jsonl")
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert {row["status"] for row in rows if row["label"] != "none"} == {"unsupported"}


def test_a_model_whose_attention_is_not_reached_is_never_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmoved(OwnEncoder):
        """Takes what is put in, and goes on with its own."""

        def read(self, tokens: Tensor, intercept: Any = None) -> Any:
            return super().read(tokens)

    monkeypatch.setattr(models, "OwnEncoder", lambda length: Unmoved(length, tiny().module))
    with pytest.raises(BrokenContract, match="the attention of layer 0 was not reached"):
        ask(tmp_path, "mean-value")


def test_layers_one_by_one_are_untrained_and_have_errors_of_their_own(tmp_path: Path) -> None:
    rows = by_key(ask(tmp_path, "local:window=8", layers="each"))
    assert [key[1:] for key in rows if key[0] == "local:window=8"] == [("0", 0), ("1", 0), ("2", 0)]
    errors = [rows["local:window=8", str(place), 0].attention_error for place in range(3)]
    assert len(set(errors)) == 3
    assert all((rows["mean-value", str(place), 0].kl or 0) > 0 for place in range(3))


def shipped(out: Path, steps: str, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    monkeypatch.setattr(models, "OwnEncoder", OwnEncoder)
    more = {"steps": steps, "batch": 8, "length": 64, "windows": 16}
    return ask(out, "local:window=8", "performer:features=64", **more)


def test_the_shipped_model_survives_a_window_better_than_no_attention_and_random_features_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {key[0]: row.loss or 0.0 for key, row in by_key(shipped(tmp_path, "0", monkeypatch)).items()}
    assert found["exact"] + 0.3 < found["local:window=8"] < found["mean-value"] - 0.05
    assert found["performer:features=64"] > found["exact"] + 0.5


@pytest.mark.slow
def test_a_little_training_repairs_the_window_and_not_the_lack_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shipped(tmp_path, "0,50", monkeypatch)
    after = {line.label: line for line in lines([row.to_json() for row in found]) if line.steps == 50}
    assert abs(after["none"].loss - by_key(found)["exact", "all", 0].loss) < 0.15, "the control hardly moves"
    assert after["local:window=8"].repaired > 0.5
    nothing = after["mean-value"].repaired
    assert nothing < 0.25
    assert after["performer:features=64"].repaired > nothing + 0.1, "but less than half, in so few steps"
