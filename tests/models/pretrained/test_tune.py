from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnbench.contract.spec import parse_spec
from attnbench.errors import Diverged, Unsupported
from attnbench.harness.swap.tune import Pupil, Rules, tuned
from attnbench.models.pretrained.baseline import baseline_of
from attnbench.models.pretrained.evaluate import layer_errors
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.operators import build_operators
from attnbench.models.pretrained.own_encoder import OwnEncoder
from tests.models.pretrained.models import tiny

RULES = Rules(steps=(0, 2), learning_rate=1e-2, batch=2, what="all", redraw=0)


def pupil(text: str = "", *, own: bool = True, subject: OwnEncoder | None = None) -> Pupil:
    subject = subject or tiny()
    operators = build_operators(parse_spec(text), subject.layers, (0, 1, 2), seed=0) if text else {}
    return Pupil(subject, subject.copy() if own else subject, operators)


def weights(subject: OwnEncoder) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in subject.module.state_dict().items()}


def changed(before: dict[str, torch.Tensor], subject: OwnEncoder) -> set[str]:
    return {name for name, tensor in subject.module.state_dict().items() if not torch.equal(tensor, before[name])}


def test_it_stops_at_each_number_of_steps_once_and_tells_of_every_step() -> None:
    told: list[int] = []
    stops = list(tuned(pupil("performer:features=8"), Trees(24), replace(RULES, steps=(0, 1, 3)), "cpu", told.append))
    assert stops == [0, 1, 3]
    assert told == [1, 2, 3]


def test_without_steps_nothing_is_trained() -> None:
    one = pupil()
    before = weights(one.model)
    assert list(tuned(one, Trees(24), replace(RULES, steps=(0,)), "cpu")) == [0]
    assert not changed(before, one.model)


def test_all_of_the_copy_is_trained_and_nothing_of_the_original() -> None:
    one = pupil("performer:features=8")
    before = weights(one.original)
    list(tuned(one, Trees(24), RULES, "cpu"))
    assert not changed(before, one.original)
    assert changed(before, one.model) >= {"embed.weight", "classify.weight", "blocks.1.to_qkv.weight"}


def test_attention_alone_is_trained_where_that_is_asked() -> None:
    one = pupil("linformer:rank=4")
    before, projection = weights(one.model), one.operators[0].E.clone()
    list(tuned(one, Trees(24), replace(RULES, what="attention"), "cpu"))
    layers = {f"blocks.{place}.{part}.weight" for place in range(3) for part in ("to_qkv", "merge")}
    assert changed(before, one.model) == layers
    assert not torch.equal(one.operators[0].E, projection)


def test_a_variant_alone_is_fitted_to_the_exact_output_and_the_model_stays() -> None:
    subject = tiny()
    one = pupil("linformer:rank=6", own=False, subject=subject)
    base = baseline_of(subject, Trees(24).held_out(4), "cpu")
    before = weights(subject)
    errors = [
        layer_errors(subject, one.operators, base, "cpu")
        for _ in tuned(one, Trees(24), Rules((0, 40), 2e-2, 4, "variant", 0), "cpu")
    ]
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[1].attention < 0.9 * errors[0].attention
    assert not changed(before, subject)


def test_a_variant_without_parameters_cannot_be_fitted() -> None:
    steps = tuned(pupil("performer:features=8", own=False), Trees(24), replace(RULES, what="variant"), "cpu")
    assert next(steps) == 0
    with pytest.raises(Unsupported, match="brings no parameters"):
        next(steps)


def test_the_same_seed_trains_the_same_model_and_another_seed_another() -> None:
    found = []
    for seed in (0, 0, 1):
        one = pupil("performer:features=8")
        list(tuned(one, Trees(24), replace(RULES, seed=seed), "cpu"))
        found.append(one.model.module.state_dict()["classify.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("every", [0, 2])
def test_random_features_are_drawn_anew_where_that_is_asked(every: int) -> None:
    one = pupil("performer:features=8")
    before = one.operators[0].projection.clone()
    state = torch.get_rng_state()
    list(tuned(one, Trees(24), replace(RULES, steps=(3,), redraw=every), "cpu"))
    assert torch.equal(one.operators[0].projection, before) is (every == 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    one = pupil()
    with torch.no_grad():
        one.model.module.classify.weight.fill_(float("nan"))
    with pytest.raises(Diverged, match="step 1 of 2"):
        list(tuned(one, Trees(24), replace(RULES, steps=(2,)), "cpu"))
