from __future__ import annotations

from typing import Any

import pytest
import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Diverged, Unsupported
from attnbench.harness.swap.loss import Pupil, PupilTraining
from attnbench.models.pretrained.evaluate import baseline_of, layer_errors
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.operators import build_operators
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.models.pretrained.subject import Text, Windows
from attnbench.suite.cell import Cell, Pretrained
from tests.models.pretrained.models import tiny


def pupil(text: str = "", *, own: bool = True, subject: OwnEncoder | None = None) -> Pupil:
    subject = subject or tiny()
    operators = build_operators(parse_spec(text), subject.layers, (0, 1, 2), seed=0) if text else {}
    return Pupil(subject, subject.copy() if own else subject, operators)


def tuning(
    one: Pupil,
    last: int = 2,
    *,
    text: Text | None = None,
    rate: float = 1e-2,
    batch: int = 2,
    redraw: int = 0,
    **more: Any,
) -> PupilTraining:
    rules = Pretrained("listops", "", 6, last, rate, redraw)
    shape = Shape(batch=batch, heads=2, seq_len=24, head_dim=8)
    cell = Cell("s", "s", parse_spec("sdpa"), shape, "pretrained", pretrained=rules, **more)
    return PupilTraining(one, text or Trees(24), cell, [])


def weights(subject: OwnEncoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in subject.module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], subject: OwnEncoder) -> set[str]:
    return {name for name, tensor in subject.module.state_dict().items() if not torch.equal(tensor, before[name])}


def test_it_goes_on_from_one_number_of_steps_to_the_next_and_tells_of_every_step() -> None:
    told: list[int] = []
    stopped, whole = tuning(pupil("performer:features=8"), 3), tuning(pupil("performer:features=8"), 3)
    for steps in (0, 1, 3):
        stopped.advance(steps, told.append)
    whole.advance(3)
    assert told == [1, 2, 3]
    assert not changed(weights(whole.pupil.model), stopped.pupil.model)


def test_without_steps_nothing_is_trained() -> None:
    one = pupil()
    before = weights(one.model)
    tuning(one).advance(0)
    assert not changed(before, one.model)


def test_all_of_the_copy_is_trained_and_nothing_of_the_original() -> None:
    one = pupil("performer:features=8")
    before = weights(one.original)
    tuning(one).advance(2)
    assert not changed(before, one.original)
    assert changed(before, one.model) >= {"embed.weight", "classify.weight", "blocks.1.to_qkv.weight"}


def test_attention_alone_is_trained_where_that_is_asked() -> None:
    one = pupil("linformer:rank=4")
    before, projection = weights(one.model), one.operators[0].E.clone()
    tuning(one, train="attention").advance(2)
    layers = {f"blocks.{place}.{part}.weight" for place in range(3) for part in ("to_qkv", "merge")}
    assert changed(before, one.model) == layers
    assert not torch.equal(one.operators[0].E, projection)


def test_a_variant_alone_is_fitted_to_the_exact_output_and_the_model_stays() -> None:
    subject = tiny()
    one = pupil("linformer:rank=6", own=False, subject=subject)
    base = baseline_of(subject, Trees(24).held_out(4), "cpu")
    before = weights(subject)
    training = tuning(one, 40, rate=2e-2, batch=4, train="variant")
    errors = []
    for steps in (0, 40):
        training.advance(steps)
        errors.append(layer_errors(subject, one.operators, base, "cpu")[0])
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[1] < 0.9 * errors[0]
    assert not changed(before, subject)
    assert all(parameter.requires_grad for parameter in subject.module.parameters()), "the next cell may train them"


def test_a_variant_without_parameters_cannot_be_fitted() -> None:
    training = tuning(pupil("performer:features=8", own=False), train="variant")
    training.advance(0)
    with pytest.raises(Unsupported, match="brings no parameters"):
        training.advance(2)


def test_the_same_seed_trains_the_same_model_and_another_seed_another() -> None:
    found = []
    for seed in (0, 0, 1):
        one = pupil("performer:features=8")
        tuning(one, seed=seed).advance(2)
        found.append(one.model.module.state_dict()["classify.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("every", [0, 2])
def test_random_features_are_drawn_anew_where_that_is_asked(every: int) -> None:
    one = pupil("performer:features=8")
    before = one.operators[0].projection.clone()
    state = torch.get_rng_state()
    tuning(one, 3, redraw=every).advance(3)
    assert torch.equal(one.operators[0].projection, before) is (every == 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    one = pupil()
    with torch.no_grad():
        one.model.module.classify.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="step 1 of 2"):
        tuning(one).advance(2)


def test_without_an_answer_that_is_wanted_there_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    text, batch = Trees(24), Trees(24).batch(0, 0, 2)
    nothing = Windows(batch.tokens, torch.full_like(batch.targets, NO_LABEL))
    monkeypatch.setattr(text, "batch", lambda seed, step, size: nothing)
    with pytest.raises(Unsupported, match="predicts nothing, so that it has no loss"):
        tuning(pupil(), text=text).advance(2)


def test_its_moments_count_as_memory_of_a_cache() -> None:
    training = tuning(pupil())
    assert not list(training.buffers())
    training.advance(1)
    assert sum(one.numel() for one in training.buffers()) >= 2 * training.trained > 0
