from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.cli import options
from attnbench.cli.signature import completed
from attnbench.errors import UsageError
from attnbench.harness.swap.loss import measure_loss
from attnbench.harness.swap.request import Foreseen, SwapRequest, variants_of
from attnbench.models.pretrained import models
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.models.pretrained.subject import Intercept, ModelOutput
from tests.models.pretrained.models import tiny
from tests.models.pretrained.test_swap import QUICK, ask, forget

pytestmark = pytest.mark.usefixtures("forks")


class Counted(OwnEncoder):
    """Counts the windows that it reads."""

    read_so_far = 0

    def read(self, tokens: Tensor, intercept: Intercept | None = None) -> ModelOutput:
        type(self).read_so_far += 0 if torch.is_grad_enabled() else len(tokens)
        return super().read(tokens, intercept)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setattr(models, "OwnEncoder", tiny)


def asked(out: Path, *more: str, **changed: Any) -> SwapRequest:
    given = {**QUICK, "layers": "all,each", "batch": 3, "out": out, **changed}
    return SwapRequest.of("listops", variants_of(["local:window=8", *more], ()), completed(options.SwapOptions, given))


def seen(out: Path, *more: str, **changed: Any) -> Foreseen:
    return asked(out, *more, **changed).foresee()[1]


def test_nothing_is_written_and_memory_is_that_of_weights_and_of_what_is_trained_four_times(tmp_path: Path) -> None:
    whole = sum(one.numel() for one in tiny().module.parameters())
    part = sum(one.numel() for one in tiny().of_attention())
    for changed, numbers in (
        ({"steps": "0"}, whole),
        ({}, whole + 4 * whole),
        ({"train": "attention"}, whole + (whole - part) + 4 * part),
        ({"train": "variant"}, whole),
    ):
        assert seen(tmp_path, **changed).weight_bytes == 4 * numbers
    assert not list(tmp_path.iterdir())


def test_the_windows_that_are_foreseen_are_those_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = asked(tmp_path, steps="0")
    _, wanted = one.foresee()
    with one.worker() as worker:
        _, plan = one.plan(worker)
    forget()
    monkeypatch.setattr(models, "OwnEncoder", lambda length: Counted(length, tiny().module))
    monkeypatch.setattr(Counted, "read_so_far", 0)
    for cell in plan.cells:
        measure_loss(cell)
    forget()
    assert Counted.read_so_far == wanted.windows_read


def test_windows_of_a_training_count_for_every_variant_that_is_trained(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert found.rows == 1 + 3 * 2 + 2 * 3
    assert found.windows_trained == 3 * 2 * 3  # none, mean-value and local, two steps of three windows each
    assert found.seconds == found.window_s * (found.windows_read + 3 * found.windows_trained) > 0
    assert seen(tmp_path, seeds=4).windows_trained == 4 * 3 * 2 * 3


def test_what_is_there_is_not_foreseen_again_unless_all_starts_anew(tmp_path: Path) -> None:
    ask(tmp_path, "local:window=8", layers="all,each", batch=3)
    again = seen(tmp_path)
    assert (again.resumed, again.windows_read, again.windows_trained, again.seconds) == (again.rows, 0, 0, 0)
    more = seen(tmp_path, "local:window=4")
    assert (more.rows - more.resumed, more.windows_trained) == (2 + 3, 2 * 3)
    assert seen(tmp_path, fresh=True).resumed == 0


def test_what_cannot_be_asked_is_refused_here_as_well(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--windows 5: below 6"):
        seen(tmp_path, windows=5)
    with pytest.raises(UsageError, match="--layers 7: the model has 3 layers"):
        seen(tmp_path, layers="7")
