"""What docs/swap.md concludes from the committed swaps, and how."""

from __future__ import annotations

import pytest

from attnbench.cli.swap import _print_alone, _print_repaired, _print_together
from attnbench.results.swaps import EXACT, MEAN_VALUE, lines
from tests.docs import making, swap_rows
from tests.docs.making import RUNS
from tests.models.pretrained.test_summary import row


@pytest.mark.parametrize("name", swap_rows.swaps())
def test_a_committed_swap_is_whole_and_softmax_attention_changed_nothing(name: str) -> None:
    rows = swap_rows.stored(name)
    assert len({row["model"] for row in rows}) == 1
    (exact,) = [row for row in rows if row["sweep"] == EXACT]
    moved = exact["hidden_error"] if exact["loss"] is None else abs(exact["loss"] - exact["loss_base"])
    assert moved <= 1e-4
    swapped = {row["label"] for row in rows if row["replaced"] == "all" and row["variant"] != "none"}
    assert len(swapped - {"sdpa", MEAN_VALUE}) == 8
    assert all(row["status"] == "ok" or (row["status"] == "unsupported" and row["reason"]) for row in rows)
    assert (RUNS / name / "plots/swap.svg").is_file()


def test_the_printed_swap_is_what_is_printed_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, printed = (making.HERE / "docs/printed/swap.txt").read_text(encoding="utf-8").partition("\n\n")
    found = lines(swap_rows.stored(swap_rows.PRINTED))
    together = [line for line in found if not line.alone]
    _print_together(together)
    _print_repaired([line for line in together if line.over_control is not None])
    _print_alone([line for line in found if line.alone])
    assert [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()] == printed.splitlines()


@pytest.fixture
def a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """``topk`` loses little, ``linear`` as much as ``mean-value``, ``reformer`` more; ``topk`` alone is repaired."""
    rows = [row("none", 0, 0.0), row("none", 9, 0.0)]
    for label, before, after in (("mean-value", 1, 1), ("topk", 0.2, 0), ("linear", 1, 1), ("reformer", 2, 2)):
        rows += [row(label, 0, before), row(label, 9, after)]
    monkeypatch.setattr(swap_rows, "stored", lambda name: rows)


@pytest.mark.usefixtures("a_swap")
def test_a_variant_is_better_than_nothing_where_it_is_so_in_pairs_of_windows() -> None:
    assert swap_rows.no_better("any", ["topk", "linear", "reformer"]) == ["linear", "reformer"]
    said = swap_rows.swap_printed()
    assert "no better than `mean-value`, which attends to nothing: `linear` and `reformer`." in said
    assert "better than `mean-value`: `topk`." in said


@pytest.mark.usefixtures("a_swap")
def test_what_training_repairs_is_told_beside_what_it_repairs_without_attention() -> None:
    assert swap_rows._repairs("any") == [
        "Share of the damage that 9 steps repair: 100% with `topk`.",
        "9 steps repair nothing with `mean-value`, `linear` and `reformer`.",
        "After 9 steps, no better than `mean-value`, in which no attention is left to recover: `linear` and "
        "`reformer`.",
    ]


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], "Alone, no approximation keeps 90% of the answers."),
        (["a"], "Alone, `a` keeps 90% of the answers, and no other approximation does."),
        (["a", "b", "c"], "Alone, `a`, `b` and `c` keep 90% of the answers, and no other approximation does."),
    ],
)
def test_what_survives_is_said_in_a_sentence(labels: list[str], said: str) -> None:
    assert swap_rows.keep(labels, "answers", "Alone") == said


def test_spread_and_keys_go_together_only_where_they_do() -> None:
    spread = {0: 1.0, 3: 3.0, 5: 2.0}
    assert "the fewer keys" in swap_rows.keys_and_spread(spread, {0: 90.0, 3: 10.0, 5: 40.0})
    assert "are not those" in swap_rows.keys_and_spread(spread, {0: 90.0, 3: 50.0, 5: 40.0})


def test_errors_are_sorted_by_whether_they_go_with_the_spread() -> None:
    errors = {"a": {0: 0.1, 5: 0.2, 3: 0.3}, "b": {0: 0.3, 5: 0.2, 3: 0.1}, "c": {0: 0.1, 5: 0.3, 3: 0.2}}
    said = swap_rows.errors_and_spread({0: 1.0, 3: 3.0, 5: 2.0}, errors)
    assert said.endswith("it rises with that spread for `a`; it falls for `b`; it does neither for `c`.")
    assert "falls" not in swap_rows.errors_and_spread({0: 1.0, 3: 3.0}, {"a": {0: 0.1, 3: 0.3}})


@pytest.mark.usefixtures("a_swap")
def test_a_longer_training_is_told_beside_the_control_that_was_trained_as_long() -> None:
    said = swap_rows.swap_listops()
    head, _, first, *_ = said.splitlines()
    assert head == "| all layers replaced | untrained | 9 steps | repaired |"
    assert first == "| `topk` | +0.20 (0.20 to 0.20) | +0.00 (0.00 to 0.00) | 100% |"
    assert "| `none`, over the original | +0.00 (0.00 to 0.00) | +0.00 (0.00 to 0.00) | – |" in said.splitlines()
    told = " ".join(said.split())
    assert "After 9 steps, not told from the model that was left whole and trained as long: `topk`." in told
    assert "After 9 steps still worse than that model: `linear` and `reformer`." in told
