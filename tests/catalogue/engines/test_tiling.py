"""How much fits a cache: one table, asked by whoever cuts something into pieces."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
import torch

import attnbench
from attnbench.catalogue.engines import tiling
from attnbench.catalogue.engines.tiling import TUNED, Tuned, budget

FOLDER = Path(attnbench.__file__).parent / "catalogue"
SOURCES = [path for room in ("engines", "attention") for path in sorted((FOLDER / room).rglob("*.py"))]


GUESSED = {
    *("blocks.scores", "flex.places", "gathered.listed", "kv_budget.received", "noise.rows", "pair_scores.hidden")
}
"""Numbers of new work that nobody has tuned yet."""


def test_each_number_is_used_by_whom_it_is_named_after_and_says_when_it_was_tuned() -> None:
    asked = {
        work: path.relative_to(FOLDER)
        for path in SOURCES
        for work in re.findall(r'budget\("([\w.]+)"', path.read_text(encoding="utf-8"))
    }
    assert asked.keys() == TUNED.keys()
    shared = {
        "gathered.listed",
        "linear.features",
        "patterns.scores",
        "patterns.short_example",
    }  # what cuts for several asks
    for work, path in asked.items():
        user = work.partition(".")[0]
        assert user in (*path.parts, path.stem) or work in shared
        assert [*(FOLDER / "engines").glob(f"{user}*"), *(FOLDER / "attention").glob(f"*/{user}*")]
        assert work in GUESSED or date.fromisoformat(TUNED[work].tuned)
    assert {work for work, one in TUNED.items() if one.tuned == "guessed"} == GUESSED


def test_nobody_keeps_a_budget_of_his_own() -> None:
    """A power of two of 64 Ki or more is how a number of cached entries was written wherever one was found."""
    power = re.compile(r"(?:1 << |2 ?\*\* ?)(1[6-9]|2\d)\b")
    found = {path.relative_to(FOLDER).as_posix() for path in SOURCES if power.search(path.read_text(encoding="utf-8"))}
    # Of which the second counts multiplications, and the third bytes of a GPU's memory.
    assert found == {
        "engines/tiling.py",
        "engines/products.py",
        "engines/linear/fused.py",
    }


@pytest.mark.parametrize(
    ("cores", "threads", "share"), [(None, 8, 1), (1, 1, 1), (1, 8, 8), (2, 1, 1), (2, 2, 1), (2, 3, 1), (2, 8, 4)]
)
def test_a_cpu_s_budget_grows_with_the_caches_in_use(
    cores: int | None, threads: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TUNED, "topk.logits", Tuned(10, cores, 99))
    monkeypatch.setattr(tiling, "threads", lambda: threads)
    assert budget("topk.logits", torch.device("cpu")) == 10 * share
    assert budget("topk.logits", torch.device("meta")) == 99
