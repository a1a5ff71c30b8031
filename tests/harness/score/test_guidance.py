"""The guided-attention loss is its formula, reaches every operator, and moves attention to the diagonal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Unsupported
from attnbench.harness.score import loop
from attnbench.harness.score.loop import answers_loss, calls_of, guidance, guided_loss, implied_weights, penalty, train
from attnbench.harness.score.score import score
from attnbench.models.encoder import Encoder
from attnbench.suite.cell import Cell, ModelSize, Training
from tests.harness.score.models import First
from tests.harness.score.models import cell as scored

SHAPE = Shape(8, 2, 12, 8)


def encoder(variant: str = "softmax") -> Encoder:
    return Encoder(variant, SHAPE, ModelSize(2, 16, positions="sinusoid"), form=First.form)


def by_hand(weights: torch.Tensor, real: list[int], g: float) -> float:
    """Row by row and key by key."""
    B, H, N, M = weights.shape
    rows = []
    for b in range(B):
        for h in range(H):
            for i in range(real[b]):
                far = [1 - math.exp(-((i / N - j / M) ** 2) / (2 * g * g)) for j in range(M)]
                rows.append(sum(float(weights[b, h, i, j]) * far[j] for j in range(M)))
    return sum(rows) / len(rows)


@pytest.mark.parametrize("g", [0.1, 0.2])
def test_the_loss_is_its_formula_and_padded_queries_have_no_part(g: float) -> None:
    weights = torch.randn(2, 3, 7, 7, dtype=torch.float64).softmax(-1)
    assert float(guided_loss(weights, width=g)) == pytest.approx(by_hand(weights, [7, 7], g))
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    weights = weights.masked_fill(~mask[:, None, None], 0.0)
    assert float(guided_loss(weights, mask, width=g)) == pytest.approx(by_hand(weights, [7, 4], g))


def test_the_diagonal_costs_nothing_and_what_is_farther_costs_more() -> None:
    assert float(guided_loss(torch.eye(9).expand(1, 1, 9, 9))) == 0.0
    costs = penalty(9, 9)
    assert torch.equal(costs, costs.T)
    assert (costs[0].diff() > 0).all()
    assert float(costs.max()) < 1
    # Of other lengths the diagonal goes from corner to corner.
    assert float(penalty(4, 8)[2, 4]) == 0.0


@pytest.mark.parametrize("variant", ["softmax", "performer:features=8", "local:window=2", "linear"])
def test_the_weights_are_those_that_the_operator_applies(variant: str) -> None:
    model = encoder(variant)
    tokens = torch.randint(4, (3, 12))
    mask = torch.arange(12) < torch.tensor([[12], [9], [5]])
    with calls_of(model) as calls:
        model(tokens, key_mask=mask)
    model(tokens)  # is not kept any more
    assert len(calls) == 2
    for call in calls:
        weights = implied_weights(call)
        values = torch.randn_like(call.k)
        expected = call.operator(call.q, call.k, values, key_mask=mask)
        assert torch.allclose(weights @ values, expected, atol=1e-4)
        assert weights.masked_select(~mask[:, None, None]).abs().max() == 0


def test_its_gradient_reaches_the_projections_of_queries_and_keys_and_no_others() -> None:
    model = encoder()
    with calls_of(model) as calls:
        model(torch.randint(4, (3, 12)))
    guidance(calls).backward()
    grad = model.blocks[1].layer.qkv.weight.grad
    assert grad is not None
    of_q, of_k, of_v = grad.chunk(3)
    assert of_q.abs().max() > 0
    assert of_k.abs().max() > 0
    assert of_v.abs().max() == 0
    assert model.head[0].weight.grad is None


def diagonality(model: Encoder) -> float:
    with torch.no_grad(), calls_of(model) as calls:
        model(First().batch(5, 0, 16).tokens)
        found = float(guidance(calls))
        assert len(calls) > 2  # its own calls are among them now, and are not asked again
        return found


def test_a_guided_training_attends_nearer_to_the_diagonal_than_one_that_is_not() -> None:
    rules = Training(steps=30, learning_rate=2e-2, evaluations=1)
    found = {}
    for guide in (0.0, 5.0):
        model = encoder()
        before = diagonality(model)
        train(model, First(), Cell("s", "w", Spec("softmax"), SHAPE, training=replace(rules, guide=guide)))
        found[guide] = diagonality(model) / before
    assert found[5.0] < 0.6
    assert found[0.0] > 0.8


def test_the_loss_of_a_step_is_that_of_the_answers_and_so_much_of_it() -> None:
    model, examples = encoder(), First().batch(0, 0, 8)
    plain, guided = (answers_loss("cpu", guide)(model, examples, 0).item() for guide in (0.0, 3.0))
    with calls_of(model) as calls:
        model(examples.tokens)
    assert guided - plain == pytest.approx(3 * guidance(calls).item(), rel=1e-4)


def test_without_guidance_nothing_is_computed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "guidance", lambda calls: pytest.fail("guided all the same"))
    answers_loss("cpu")(encoder(), First().batch(0, 0, 8), 0)


def test_a_mixer_cannot_be_guided_and_a_cell_without_guidance_keeps_its_id() -> None:
    with pytest.raises(Unsupported, match="guide: fnet replaces the layer"):
        score(scored("fnet", guide=1.0))
    plain = scored()
    assert plain.training is not None
    guided = replace(plain, training=replace(plain.training, guide=1.0))
    assert guided.cell_id != plain.cell_id
