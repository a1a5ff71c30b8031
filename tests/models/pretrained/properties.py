"""What must hold of a swap. Its tests call these functions, and test_mutants.py shows what makes each of them fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.reference import relative_error
from attnbench.contract.spec import parse_spec
from attnbench.contract.task import NO_LABEL
from attnbench.errors import Unsupported
from attnbench.models.pretrained.evaluate import Baseline, evaluate
from attnbench.models.pretrained.loading import Around, TokenText
from attnbench.models.pretrained.operators import Operators, build_operators, replaced
from attnbench.models.pretrained.subject import Exact, Subject
from attnbench.results.record import Record


def the_bridge_computes_what_the_model_did(model: Any, put_into: Callable[[nn.Module], None], tokens: Tensor) -> None:
    """With the bridge in the place of its own attention, a model of the library has the same last features."""
    with torch.no_grad():
        expected = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
        put_into(model)
        found = model(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    assert relative_error(found, expected) <= 1e-5


def padding_moves_no_real_token(model: Any, real: Tensor) -> None:
    """Left and right padding, hidden by a mask, leave the logits of ``real`` (1, N) as they were."""
    with torch.no_grad():
        expected = model(input_ids=real).logits
        for left in (False, True):
            pad = torch.zeros(1, 5, dtype=torch.int64)
            ids = torch.cat([pad, real] if left else [real, pad], 1)
            mask = (ids != 0).long()
            rows = slice(5, None) if left else slice(0, real.shape[1])
            found = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
            torch.testing.assert_close(found[:, rows], expected, rtol=1e-4, atol=1e-4)


def it_is_refused(make: Callable[[], object], said: str) -> None:
    """The refusal names the cause."""
    with pytest.raises(Unsupported, match=said):
        make()


def softmax_of_what_is_seen_is_what_each_layer_answers(subject: Subject, tokens: Tensor) -> None:
    """softmax(q·k/√D)·v of what an intercept gets, beside the layer's own answer."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if subject.layers[place].shape.causal:
            n = logits.shape[-1]
            logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        seen.append((logits.softmax(-1) @ v, exact()))
        return seen[-1][1]

    with torch.no_grad():
        subject.read(tokens, look)
    assert seen
    for ours, theirs in seen:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def without_attention(subject: Subject, tokens: Tensor, *layers: int) -> Tensor:
    """The last features with ``mean-value`` in these layers."""
    operators = build_operators(parse_spec("mean-value"), subject.layers, layers, seed=0)
    with torch.no_grad():
        return subject.read(tokens, replaced(operators)).hidden


def each_layer_can_be_replaced_alone(subject: Subject, tokens: Tensor) -> None:
    """The second layer alone moves the model, and moves it otherwise than the first."""
    with torch.no_grad():
        plain = subject.read(tokens).hidden
    first, second = without_attention(subject, tokens, 0), without_attention(subject, tokens, 1)
    for other in (first, plain):
        assert not torch.allclose(second, other, atol=1e-3)


def attention_is_called_once_a_layer_in_a_training_step(calls: Sequence[object], layers: int) -> None:
    """Neither fewer, nor again in the backward pass."""
    assert len(calls) == layers


def each_layer_has_random_features_of_its_own(operators: Operators) -> None:
    """Equal ones would make errors that add up."""
    drawn: list[Any] = [one.projection for one in operators.values()]
    assert not torch.equal(drawn[0], drawn[1])


def the_controls_stand_in_the_rows(rows: Sequence[Record], steps: Sequence[int]) -> None:
    """Softmax attention, ``mean-value``, and ``none`` trained as long."""
    found = {(row.sweep, row.label, row.tuned) for row in rows}
    assert ("exact", "sdpa", 0) in found
    for step in steps:
        assert {("together", "none", step), ("together", "mean-value", step)} <= found


def what_is_held_out_is_the_end_and_never_trained_on() -> None:
    """The text has the tokens 1000, 1001 … 1999, so that a token says where it stands."""
    text = TokenText("t", list(range(1000, 2000)), 10, Around("next"))
    assert text.most == 10
    held = text.held_out(10).tokens
    assert held.min() >= 1900
    trained = torch.cat([text.batch(0, step, 4).tokens for step in range(60)])
    assert trained.max() < 1900
    assert len(trained[:90].unique()) == 900, "an epoch is every window once"


def the_divergence_is_that_of_its_formula(subject: Subject, operators: Operators, base: Baseline) -> None:
    """KL(p ‖ q) with p of the untouched model: the mean over answers of a window, then over windows."""
    found = evaluate(subject, operators, base, "cpu")
    tokens, asked = base.windows.tokens, base.windows.targets != NO_LABEL
    with torch.no_grad():
        before, after = subject.read(tokens).logits, subject.read(tokens, replaced(operators)).logits
    assert before is not None
    assert after is not None
    p, q = before.double().softmax(-1), after.double().softmax(-1)
    divergence = (p * (p / q).log()).sum(-1)
    windows = [float(of[here].mean()) for of, here in zip(divergence, asked, strict=True)]
    assert found.kl == pytest.approx(sum(windows) / len(windows), rel=1e-4)
    assert found.kl > 0
