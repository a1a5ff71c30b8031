from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnbench.contract.spec import parse_spec
from attnbench.errors import UsageError
from attnbench.harness.swap import request as asked
from attnbench.harness.swap.question import Question, Wanted
from attnbench.harness.swap.request import Foreseen, foresee
from attnbench.harness.swap.swap import Place, Watcher, swap
from attnbench.harness.swap.tune import Rules
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.models.pretrained.subject import Intercept, Reading
from tests.models.pretrained.models import tiny

RULES = Rules((0, 2), 1e-3, 3, "all", 0)
QUESTION = Question((parse_spec("local:window=8"),), Wanted(whole=True, each=True), 6, RULES)


class Counted(OwnEncoder):
    """Counts the windows that it reads."""

    read_so_far = 0

    def read(self, tokens: Tensor, intercept: Intercept | None = None) -> Reading:
        type(self).read_so_far += 0 if torch.is_grad_enabled() else len(tokens)
        return super().read(tokens, intercept)


def seen(out: Path, question: Question = QUESTION, *, fresh: bool = False) -> Foreseen:
    return foresee(question, tiny(), Trees(24), Place(out, fresh), Watcher())


def test_nothing_is_written(tmp_path: Path) -> None:
    assert seen(tmp_path).visits == 1 + 3 + 2 * 3
    assert not list(tmp_path.iterdir())


def test_the_windows_that_are_foreseen_are_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(QUESTION, rules=replace(RULES, steps=(0,)))
    wanted = seen(tmp_path, asked).windows_read
    monkeypatch.setattr(Counted, "read_so_far", 0)
    swap(asked, Counted(24, tiny().module), Trees(24), Place(tmp_path))
    assert Counted.read_so_far == wanted


def test_windows_of_a_training_count_for_every_visit_that_is_trained(tmp_path: Path) -> None:
    assert seen(tmp_path).windows_trained == 3 * 2 * 3  # none, mean-value and local, two steps of three windows each
    assert seen(tmp_path, replace(QUESTION, seeds=4)).windows_trained == 4 * 3 * 2 * 3


def test_time_is_that_of_all_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "_seconds_of_a_window", lambda *_: 0.5)
    found = seen(tmp_path)
    assert found.seconds == 0.5 * (found.windows_read + 3 * found.windows_trained)


def test_what_is_there_is_not_foreseen_again_unless_all_starts_anew(tmp_path: Path) -> None:
    swap(QUESTION, tiny(), Trees(24), Place(tmp_path))
    again = seen(tmp_path)
    assert (again.resumed, again.windows_read, again.windows_trained, again.seconds) == (again.visits, 0, 0, 0)
    more = seen(tmp_path, replace(QUESTION, variants=(*QUESTION.variants, parse_spec("local:window=4"))))
    assert (more.visits - more.resumed, more.windows_trained) == (1 + 3, 2 * 3)
    assert seen(tmp_path, fresh=True).resumed == 0


def test_memory_is_that_of_weights_and_of_what_is_trained_four_times(tmp_path: Path) -> None:
    whole = sum(one.numel() for one in tiny().module.parameters())
    part = sum(one.numel() for one in tiny().of_attention())
    for rules, numbers in (
        (replace(RULES, steps=(0,)), whole),
        (RULES, whole + 4 * whole),
        (replace(RULES, what="attention"), whole + (whole - part) + 4 * part),
        (replace(RULES, what="variant"), whole),
    ):
        assert seen(tmp_path, replace(QUESTION, rules=rules)).weight_bytes == 4 * numbers


def test_what_cannot_be_asked_is_refused_here_as_well(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--windows 5: below 6"):
        seen(tmp_path, replace(QUESTION, windows=5))
