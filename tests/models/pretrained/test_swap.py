from __future__ import annotations

import csv
import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from attnbench.answers.swap.summary import lines
from attnbench.contract.spec import parse_spec
from attnbench.errors import BrokenContract, CorruptResults
from attnbench.harness.swap.question import Entry, Question, Wanted
from attnbench.harness.swap.row import COLUMNS, Row
from attnbench.harness.swap.swap import ROWS, TABLE, Place, SwapFolder, Swapped, Watcher, swap
from attnbench.harness.swap.tune import Rules
from attnbench.measure.status import Status
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.own_encoder import OwnEncoder
from tests.models.pretrained import properties
from tests.models.pretrained.models import tiny

RULES = Rules((0, 2), 1e-3, 2, "all", 0)


class Seen(Watcher):
    def __init__(self) -> None:
        self.visits: list[str] = []
        self.warnings: list[str] = []

    def visiting(self, entry: Entry) -> None:
        self.visits.append(f"{entry.label} {entry.named}")

    def warned(self, message: str) -> None:
        self.warnings.append(message)


def question(*variants: str, layers: Wanted | None = None, rules: Rules = RULES) -> Question:
    return Question(tuple(map(parse_spec, variants)), layers or Wanted(whole=True), 6, rules)


def ask(out: Path, *variants: str, seen: Seen | None = None, fresh: bool = False, **changed: object) -> Swapped:
    asked = replace(question(*variants), **changed)
    return swap(asked, tiny(), Trees(24), Place(out, fresh), seen or Seen())


def by_key(rows: Sequence[Row]) -> dict[tuple[str, str, int], Row]:
    return {(row.label, row.layers, row.steps): row for row in rows}


def test_every_variant_has_a_row_for_each_number_of_steps_beside_the_controls(tmp_path: Path) -> None:
    found = ask(tmp_path, "performer:features=8", "local:window=8").rows
    properties.the_controls_stand_in_the_rows(found, (0, 2))
    rows = by_key(found)
    assert list(rows) == [
        ("exact", "all", 0),
        *((label, "none" if label == "none" else "all", steps)
          for label in ("none", "mean-value", "performer:features=8", "local:window=8") for steps in (0, 2)),
    ]  # fmt: skip
    assert all(row.ok for row in rows.values())
    exact, none = rows["exact", "all", 0], rows["none", "none", 0]
    assert exact.loss == pytest.approx(exact.loss_base, abs=1e-5)
    assert none.loss_delta == 0
    trained = rows["performer:features=8", "all", 2]
    assert (trained.tokens_trained, trained.train) == (2 * 2 * 24, "all")
    assert trained.trained_parameters == sum(one.numel() for one in tiny().module.parameters())
    assert (none.pairs_seen, exact.pairs_seen) == (None, 1.0)
    assert rows["local:window=8", "all", 0].pairs_seen == pytest.approx(336 / 576)
    assert trained.loss_delta_low is not None
    assert trained.loss_delta_high is not None
    assert trained.loss_delta_low <= (trained.loss_delta or 0) <= trained.loss_delta_high


def test_the_same_command_visits_nothing_again_and_a_further_variant_joins(tmp_path: Path) -> None:
    first, again, more = Seen(), Seen(), Seen()
    before = ask(tmp_path, "local:window=8", seen=first)
    assert ask(tmp_path, "local:window=8", seen=again) == before
    assert (len(first.visits), again.visits) == (4, [])
    joined = ask(tmp_path, "local:window=8", "local:window=4", seen=more)
    assert (joined.folder, more.visits) == (before.folder, ["local:window=4 all"])


def test_other_rules_and_a_fresh_start_have_folders_of_their_own(tmp_path: Path) -> None:
    folders = {
        ask(tmp_path, "local:window=8").folder,
        ask(tmp_path, "local:window=8", fresh=True).folder,
        ask(tmp_path, "local:window=8", rules=replace(RULES, learning_rate=2e-3)).folder,
        ask(tmp_path, "local:window=8", windows=7).folder,
    }
    assert len(folders) == 4


def test_what_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    class Stops(Seen):
        def visiting(self, entry: Entry) -> None:
            super().visiting(entry)
            if entry.label.startswith("local"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, "local:window=8", seen=Stops())
    seen = Seen()
    assert all(row.ok for row in ask(tmp_path, "local:window=8", seen=seen).rows)
    assert seen.visits == ["local:window=8 all"]


def test_what_cannot_be_put_in_is_a_row_with_the_reason_and_is_not_tried_again(tmp_path: Path) -> None:
    rows = by_key(ask(tmp_path, "fnet", "linformer:rank=64").rows)
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
        row = by_key(ask(tmp_path, "local:window=8").rows)["local:window=8", "all", 2]
        assert (row.status, row.reason) == (Status.ERROR, "ArithmeticError: no luck")
    seen = Seen()
    assert by_key(ask(tmp_path, "local:window=8", seen=seen).rows)["local:window=8", "all", 2].ok
    assert seen.visits == ["local:window=8 all"]


def test_a_model_in_which_softmax_attention_changes_the_loss_is_never_scored(tmp_path: Path) -> None:
    class Scaled(OwnEncoder):
        """Hands on q without the model's own scale."""

        def read(self, tokens: Tensor, intercept=None):
            if intercept is None:
                return super().read(tokens)
            return super().read(tokens, lambda place, q, k, v, exact: intercept(place, 2 * q, k, v, exact))

    seen = Seen()
    with pytest.raises(BrokenContract, match="softmax attention in the place of the model's own moves it"):
        swap(question("local:window=8"), Scaled(24, tiny().module), Trees(24), Place(tmp_path), seen)
    assert seen.visits == ["exact all"]


def test_a_model_whose_attention_is_not_reached_is_never_scored(tmp_path: Path) -> None:
    class Unmoved(OwnEncoder):
        """Takes what is put in, and goes on with its own."""

        def read(self, tokens: Tensor, intercept=None):
            return super().read(tokens)

    with pytest.raises(BrokenContract, match="the attention of layer 0 was not reached"):
        swap(question("mean-value"), Unmoved(24, tiny().module), Trees(24), Place(tmp_path), Seen())


def test_layers_one_by_one_are_untrained_and_have_errors_of_their_own(tmp_path: Path) -> None:
    rows = by_key(ask(tmp_path, "local:window=8", layers=Wanted(each=True)).rows)
    assert [key[1:] for key in rows if key[0] == "local:window=8"] == [("0", 0), ("1", 0), ("2", 0)]
    errors = [rows["local:window=8", str(place), 0].attention_error for place in range(3)]
    assert len(set(errors)) == 3
    assert all((rows["mean-value", str(place), 0].kl or 0) > 0 for place in range(3))


def test_the_table_has_the_columns_of_a_row_and_the_journal_the_windows(tmp_path: Path) -> None:
    found = ask(tmp_path, "local:window=8")
    with (found.folder / TABLE).open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert tuple(table[0]) == COLUMNS
    assert len(table) == len(found.rows)
    stored = [json.loads(line) for line in (found.folder / ROWS).read_text(encoding="utf-8").splitlines()]
    assert all(len(line["window_losses"]) == 6 for line in stored)
    assert all("seal" in line for line in stored)


def test_compressed_rows_go_on(tmp_path: Path) -> None:
    first = ask(tmp_path, "local:window=8")
    for name in (ROWS, TABLE):
        (first.folder / f"{name}.xz").write_bytes(lzma.compress((first.folder / name).read_bytes()))
        (first.folder / name).unlink()
    assert by_key(SwapFolder(first.folder).rows()) == by_key(first.rows)
    again = ask(tmp_path, "local:window=8", "identity")
    assert again.folder == first.folder
    assert by_key(again.rows).items() > by_key(first.rows).items()
    assert not list(first.folder.glob("*.xz"))


def test_a_changed_row_is_told(tmp_path: Path) -> None:
    found = ask(tmp_path, "local:window=8")
    file = found.folder / ROWS
    file.write_text(file.read_text().replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(CorruptResults, match=r"swap\.jsonl:1"):
        ask(tmp_path, "local:window=8")


def shipped(out: Path, *steps: int) -> Swapped:
    rules = Rules(steps, 1e-3, 8, "all", 0)
    variants = (parse_spec("local:window=8"), parse_spec("performer:features=64"))
    return swap(Question(variants, Wanted(whole=True), 16, rules), OwnEncoder(64), Trees(64), Place(out), Seen())


def test_the_shipped_model_survives_a_window_better_than_no_attention_and_random_features_not_at_all(
    tmp_path: Path,
) -> None:
    loss = {row.label: row.loss or 0.0 for row in shipped(tmp_path, 0).rows}
    assert loss["exact"] + 0.3 < loss["local:window=8"] < loss["mean-value"] - 0.05
    assert loss["performer:features=64"] > loss["exact"] + 0.5


@pytest.mark.slow
def test_a_little_training_repairs_the_window_and_not_the_lack_of_attention(tmp_path: Path) -> None:
    found = shipped(tmp_path, 0, 50)
    after = {line.label: line for line in lines(found.rows) if line.steps == 50}
    assert abs(after["none"].loss - by_key(found.rows)["exact", "all", 0].loss) < 0.15, "the control hardly moves"
    assert after["local:window=8"].repaired > 0.5
    nothing = after["mean-value"].repaired
    assert nothing < 0.25
    assert after["performer:features=64"].repaired > nothing + 0.1, "but less than half, in so few steps"
