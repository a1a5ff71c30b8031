from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Diverged, Unsupported
from attnbench.models.pretrained import evaluate as evaluating
from attnbench.models.pretrained.evaluate import Baseline, baseline_of, evaluate, layer_errors
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.operators import build_operators
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.models.pretrained.subject import Windows
from tests.models.pretrained import properties
from tests.models.pretrained.models import tiny


@pytest.fixture
def subject() -> OwnEncoder:
    return tiny()


@pytest.fixture
def base(subject: OwnEncoder) -> Baseline:
    return baseline_of(subject, Trees(24).held_out(5), "cpu")


def swapped(subject: OwnEncoder, text: str, *layers: int) -> dict[int, nn.Module]:
    return build_operators(parse_spec(text), subject.layers, layers or (0, 1, 2), seed=0)


def test_the_model_itself_agrees_with_itself_in_everything(subject: OwnEncoder, base: Baseline) -> None:
    found = evaluate(subject, {}, base, "cpu")
    assert found.losses == pytest.approx(base.losses)
    assert (found.top1_agreement, found.neighbours) == (1.0, 1.0)
    assert found.kl == pytest.approx(0.0, abs=1e-9)
    assert found.hidden_error == pytest.approx(0.0, abs=1e-6)
    assert found.cosine == pytest.approx(1.0)


def test_losses_answers_and_divergence_are_those_of_their_formulas(subject: OwnEncoder, base: Baseline) -> None:
    found = evaluate(subject, swapped(subject, "mean-value"), base, "cpu")
    tokens, targets = base.windows.tokens, base.windows.targets
    operators = swapped(subject, "mean-value")
    with torch.no_grad():
        after = subject.read(tokens, lambda place, q, k, v, exact: operators[place](q, k, v)).logits
    assert after is not None
    losses = [
        float(nn.functional.cross_entropy(after[i], targets[i], ignore_index=NO_LABEL)) for i in range(len(tokens))
    ]
    assert found.losses == pytest.approx(losses, rel=1e-5)
    asked = targets != NO_LABEL
    assert found.accuracy == pytest.approx(float((after.argmax(-1) == targets)[asked].double().mean()))
    properties.the_divergence_is_that_of_its_formula(subject, operators, base)


def test_features_of_a_model_without_answers_are_compared_all_the_same(subject: OwnEncoder) -> None:
    class Mute(OwnEncoder):
        def read(self, tokens: Tensor, intercept: object = None) -> object:
            from dataclasses import replace

            return replace(super().read(tokens, intercept), logits=None)

    mute = Mute(24, subject.module)
    base = baseline_of(mute, Trees(24).held_out(5), "cpu")
    assert base.losses is None
    found = evaluate(mute, swapped(mute, "mean-value"), base, "cpu")
    assert (found.losses, found.accuracy, found.kl) == (None, None, None)
    assert found.hidden_error > 0.01
    assert found.cosine < 1


def test_features_are_compared_all_the_same_if_no_answer_is_wanted(subject: OwnEncoder) -> None:
    windows = Trees(24).held_out(5)
    base = baseline_of(subject, Windows(windows.tokens, torch.full_like(windows.targets, NO_LABEL)), "cpu")
    assert base.losses is None
    found = evaluate(subject, swapped(subject, "mean-value"), base, "cpu")
    assert (found.losses, found.accuracy, found.kl) == (None, None, None)
    assert found.hidden_error > 0.01


def test_few_windows_have_no_neighbours(subject: OwnEncoder) -> None:
    base = baseline_of(subject, Trees(24).held_out(2), "cpu")
    assert evaluate(subject, {}, base, "cpu").neighbours is None


def test_some_of_many_log_probabilities_are_kept_and_the_divergence_is_close(
    subject: OwnEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = Trees(24).held_out(8)
    whole = baseline_of(subject, windows, "cpu")
    monkeypatch.setattr(evaluating, "_MOST_KEPT", 150)
    part = baseline_of(subject, windows, "cpu")
    assert (whole.step, part.step > 1) == (1, True)
    operators = swapped(subject, "mean-value")
    all_of_it, some = (evaluate(subject, operators, base, "cpu") for base in (whole, part))
    assert some.kl == pytest.approx(all_of_it.kl, rel=0.7)
    assert (some.losses, some.top1_agreement) == (all_of_it.losses, all_of_it.top1_agreement)


def test_the_error_of_a_layer_is_that_on_the_untouched_models_own_q_k_v(subject: OwnEncoder, base: Baseline) -> None:
    assert layer_errors(subject, {}, base, "cpu") == (None, None)
    exact, _ = layer_errors(subject, swapped(subject, "softmax"), base, "cpu")
    mean, trivial = layer_errors(subject, swapped(subject, "mean-value"), base, "cpu")
    local, _ = layer_errors(subject, swapped(subject, "local:window=16"), base, "cpu")
    assert exact is not None
    assert mean is not None
    assert local is not None
    assert exact < 1e-5
    assert mean == pytest.approx(trivial, rel=1e-5)
    assert 1e-3 < local < mean


def test_a_variant_that_gives_nan_is_no_number(subject: OwnEncoder, base: Baseline) -> None:
    class Nothing(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return v * math.nan

    with pytest.raises(Diverged, match="NaN"):
        evaluate(subject, {1: Nothing()}, base, "cpu")


def test_each_layer_has_random_features_of_its_own(subject: OwnEncoder) -> None:
    operators = swapped(subject, "performer:features=8")
    properties.each_layer_has_random_features_of_its_own(operators)
    drawn = [one.projection for one in operators.values()]
    again = [one.projection for one in swapped(subject, "performer:features=8").values()]
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))


def test_what_a_variant_shares_among_layers_is_shared(subject: OwnEncoder) -> None:
    found = swapped(subject, "linformer:rank=4,sharing=layerwise")
    assert found[0].E is found[1].E is found[2].E


@pytest.mark.parametrize(
    ("text", "reason"), [("fnet", "a mixer replaces the projections"), ("linformer:rank=64", "rank 64 is above the 24")]
)
def test_what_cannot_be_put_in_is_refused_with_the_reason(subject: OwnEncoder, text: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        swapped(subject, text)


def test_a_causal_layer_refuses_what_is_not_causal(subject: OwnEncoder) -> None:
    from dataclasses import replace

    causal = [replace(layer, shape=Shape(1, 2, 24, 8, causal=True)) for layer in subject.layers]
    with pytest.raises(Unsupported, match="causal: "):
        build_operators(Spec("linformer"), causal, (0,), seed=0)
