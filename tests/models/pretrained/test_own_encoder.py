from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.contract.spec import Spec
from attnbench.errors import Unsupported, UsageError
from attnbench.models.pretrained.evaluate import baseline_of
from attnbench.models.pretrained.listops.small_encoder import WEIGHTS
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.operators import build_operators, replaced
from attnbench.models.pretrained.own_encoder import OwnEncoder
from attnbench.models.pretrained.subject import Exact
from tests.models.pretrained.models import tiny


def test_the_shipped_model_answers_far_above_the_best_constant_answer() -> None:
    subject, windows = OwnEncoder(64), Trees(64).held_out(24)
    found = baseline_of(subject, windows, "cpu")
    right = sum(one.answered.right for one in found.originals if one.answered is not None)
    labels = windows.targets[windows.targets >= 0]
    assert right / found.asked > 2 * float(labels.bincount().max() / len(labels))
    assert WEIGHTS.stat().st_size < 1_000_000


def test_attention_that_is_looked_at_and_left_alone_changes_nothing() -> None:
    subject, tokens = tiny(), Trees(24).held_out(3).tokens
    seen: list[int] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        seen.append(place)
        assert q.shape == k.shape == v.shape == (3, 2, 24, 8)
        return exact()

    untouched, looked_at = subject.read(tokens), subject.read(tokens, look)
    assert seen == [0, 1, 2]
    assert torch.equal(untouched.hidden, looked_at.hidden)
    assert torch.equal(untouched.logits, looked_at.logits)


def test_softmax_attention_put_in_changes_nothing_and_each_layer_matters_by_itself() -> None:
    subject, tokens = tiny(), Trees(24).held_out(2).tokens
    plain = subject.read(tokens).hidden

    def with_variant(name: str, *layers: int) -> Tensor:
        operators = build_operators(Spec(name), subject.layers, layers, seed=0)
        return subject.read(tokens, replaced(operators)).hidden.detach()

    torch.testing.assert_close(with_variant("sdpa", 0, 1, 2), plain, rtol=0, atol=1e-5)
    first, second = with_variant("mean-value", 0), with_variant("mean-value", 1)
    assert not torch.allclose(first, plain, atol=1e-3)
    assert not torch.allclose(first, second, atol=1e-3)


def test_after_an_error_the_model_has_its_own_attention_again() -> None:
    subject, tokens = tiny(), Trees(24).held_out(1).tokens
    plain = subject.read(tokens).hidden

    def fails(*_: object) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        subject.read(tokens, fails)
    assert torch.equal(subject.read(tokens).hidden, plain)


def test_a_model_of_which_a_layer_is_not_reached_is_refused() -> None:
    subject, tokens = tiny(), Trees(24).held_out(1).tokens
    subject.layers = (*subject.layers, subject.layers[0])
    with pytest.raises(Unsupported, match="3 of its 4 attention layers were reached"):
        subject.read(tokens, lambda place, q, k, v, exact: exact())


def test_a_copy_has_weights_of_its_own_and_the_same_digest() -> None:
    subject = tiny()
    other = subject.copy()
    assert other.digest == subject.digest
    with torch.no_grad():
        next(iter(other.module.parameters())).add_(1.0)
    assert OwnEncoder(24, other.module).digest != subject.digest
    assert OwnEncoder(24, subject.module).digest == subject.digest


@pytest.mark.parametrize("length", [3, 129])
def test_windows_that_it_was_not_trained_on_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match="reads trees of 4 to 128 tokens"):
        OwnEncoder(length, tiny().module)
