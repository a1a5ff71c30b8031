from __future__ import annotations

from dataclasses import replace

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.swap.described import ModelFacts
from attnbench.harness.swap.swap_question import LayerChoice, SwapQuestion, parse_layers, parse_steps
from attnbench.models.pretrained.subject import Layer
from attnbench.suite.cell import Pretrained
from attnbench.suite.expand import expand

SHAPE = Shape(1, 2, 16, 8)
LAYERS = (Layer(SHAPE), Layer(SHAPE, "window of 4", "it has a window"), Layer(SHAPE))
MODEL = ModelFacts(LAYERS, None, 1000, 100, 0.0)
QUESTION = SwapQuestion("m", (Spec("performer"),), LayerChoice(whole=True), 16, "", 6, (0, 5), 1e-3, 2, "all", 0, 1)


def question(**changed: object) -> SwapQuestion:
    return replace(QUESTION, **changed)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("all", LayerChoice(whole=True)),
        ("each, all", LayerChoice(whole=True, each=True)),
        ("5,0,5", LayerChoice(some=(0, 5))),
        ("each,3", LayerChoice(each=True, some=(3,))),
        ("each/5,all", LayerChoice(whole=True, each=5)),
        ("each/1,each", LayerChoice(each=1)),
    ],
)
def test_layers_are_read_as_they_are_written(text: str, wanted: LayerChoice) -> None:
    assert parse_layers(text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("some", "'some' is no layer"),
        ("", "'' is no layer"),
        ("all,2", "exclude"),
        ("each/0", "'each/0' is no layer"),
        ("each/x", "is no layer"),
        ("each,each/2", "each and each/2 exclude each other"),
    ],
)
def test_what_is_no_layer_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_layers(text)


def test_steps_are_sorted_and_each_counts_once() -> None:
    assert parse_steps("100,0, 10,10") == (0, 10, 100)


@pytest.mark.parametrize("text", ["", "a", "-1", "1.5", "0,,1"])
def test_what_is_no_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


def test_too_many_steps_are_refused_by_their_option() -> None:
    with pytest.raises(UsageError, match="--steps must lie between 0 and 1000000, got 1000001"):
        question(steps=parse_steps("0,1000001")).suite(MODEL)


def test_what_must_change_nothing_is_first_then_the_control_then_the_variants() -> None:
    exact, *others = expand(question().suite(MODEL))
    assert (exact.sweep, exact.variant.name, exact.replaced, exact.tuned) == ("exact", "sdpa", "all", 0)
    labels = ("none", "mean-value", "performer")
    assert [(one.variant.name, one.tuned) for one in others] == [(label, steps) for label in labels for steps in (0, 5)]
    assert {one.pretrained for one in others} == {Pretrained("m", "", 6, 5, 1e-3, 0)}


def test_a_cell_has_the_sizes_of_the_model_and_the_batch_of_its_training() -> None:
    layers = (Layer(replace(SHAPE, heads=4, causal=True), sharing=2),)
    for cell in expand(question().suite(replace(MODEL, layers=layers))):
        shape = cell.shape
        assert (shape.H, shape.K, shape.D, shape.N, shape.B, shape.causal) == (4, 2, 8, 16, 2, True)


def test_a_layer_that_has_to_stay_is_left_in_place() -> None:
    each = [one for one in expand(question(layers=LayerChoice(each=True)).suite(MODEL)) if one.sweep == "each"]
    assert [(one.variant.name, one.replaced, one.tuned) for one in each] == [
        (label, place, 0) for label in ("mean-value", "performer") for place in ("0", "2")
    ]


def test_every_second_layer_alone_is_every_second_of_those_that_can_be_replaced() -> None:
    model = replace(MODEL, layers=(Layer(SHAPE), *LAYERS, Layer(SHAPE)))  # of 0 to 4 the third stays
    found = expand(question(layers=LayerChoice(each=2)).suite(model))
    assert [one.replaced for one in found if one.variant.name == "performer"] == ["0", "3"]


def test_without_training_and_where_only_the_variant_is_fitted_there_is_no_control() -> None:
    for one in (question(steps=(0,)), question(train="variant")):
        assert "none" not in [cell.variant.name for cell in expand(one.suite(MODEL))]


def test_every_seed_has_its_control_and_no_cell_comes_twice() -> None:
    found = expand(question(seeds=3, variants=(Spec("mean-value"), Spec("performer"))).suite(MODEL))
    assert len(found) == 1 + 3 * 3 * 2
    assert [one.seed for one in found if one.variant.name == "none" and one.tuned] == [0, 1, 2]


def test_one_layer_that_was_asked_for_is_another_cell_than_that_of_each() -> None:
    found = expand(question(layers=LayerChoice(each=True, some=(2,))).suite(MODEL))
    assert {(one.sweep, one.replaced) for one in found if one.variant.name == "performer"} == {
        *(("each", "0"), ("each", "2"), ("together", "2"))
    }


def test_what_cannot_be_answered_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UsageError, match="held out has 7"):
        question(windows=8).suite(replace(MODEL, most=7))
    with pytest.raises(UsageError, match="the model has 3 layers"):
        question(layers=LayerChoice(some=(3,))).suite(MODEL)
    with pytest.raises(Unsupported, match="layer 1: it has a window"):
        question(layers=LayerChoice(some=(1,))).suite(MODEL)
    with pytest.raises(Unsupported, match="it has a window"):
        question().suite(replace(MODEL, layers=LAYERS[1:2]))
