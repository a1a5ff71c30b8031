from __future__ import annotations

from dataclasses import replace

import pytest

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.swap.question import Question, Wanted, entries, parse_layers, parse_steps, refuse
from attnbench.harness.swap.tune import Rules
from attnbench.models.pretrained.subject import Layer

RULES = Rules((0, 5), 1e-3, 2, "all", 0)
SHAPE = Shape(1, 2, 16, 8)
LAYERS = (Layer(SHAPE), Layer(SHAPE, "window of 4", "it has a window"), Layer(SHAPE))


def question(**changed: object) -> Question:
    return replace(Question((Spec("performer"),), Wanted(whole=True), 6, RULES), **changed)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("all", Wanted(whole=True)),
        ("each, all", Wanted(whole=True, each=True)),
        ("5,0,5", Wanted(some=(0, 5))),
        ("each,3", Wanted(each=True, some=(3,))),
        ("each/5,all", Wanted(whole=True, each=5)),
        ("each/1,each", Wanted(each=1)),
    ],
)
def test_layers_are_read_as_they_are_written(text: str, wanted: Wanted) -> None:
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


@pytest.mark.parametrize("text", ["", "a", "-1", "1.5", "0,,1", "1000001", "9" * 12])
def test_what_is_no_number_of_steps_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


def test_what_must_change_nothing_is_first_then_the_control_then_the_variants() -> None:
    found = [(entry.label, entry.named, entry.rules.steps) for entry in entries(question(), LAYERS)]
    assert found == [
        ("exact", "all", (0,)),
        ("none", "none", (0, 5)),
        ("mean-value", "all", (0, 5)),
        ("performer", "all", (0, 5)),
    ]


def test_a_layer_that_has_to_stay_is_left_in_place() -> None:
    assert {entry.layers for entry in entries(question(), LAYERS)} == {(0, 2), ()}
    each = entries(question(layers=Wanted(each=True)), LAYERS)
    assert [(entry.label, entry.layers, entry.rules.steps) for entry in each[1:]] == [
        ("mean-value", (0,), (0,)),
        ("mean-value", (2,), (0,)),
        ("performer", (0,), (0,)),
        ("performer", (2,), (0,)),
    ]


def test_every_second_layer_alone_is_every_second_of_those_that_can_be_replaced() -> None:
    layers = (Layer(SHAPE), *LAYERS, Layer(SHAPE))  # of 0 to 4 the third stays
    found = [entry.layers for entry in entries(question(layers=Wanted(each=2)), layers) if entry.label == "performer"]
    assert found == [(0,), (3,)]


def test_without_training_and_where_only_the_variant_is_fitted_there_is_no_control() -> None:
    untrained = question(rules=replace(RULES, steps=(0,)))
    fitted = question(rules=replace(RULES, what="variant"))
    for one in (untrained, fitted):
        assert "none" not in [entry.label for entry in entries(one, LAYERS)]


def test_every_seed_has_its_control_and_no_visit_comes_twice() -> None:
    found = entries(question(seeds=3, variants=(Spec("mean-value"), Spec("performer"))), LAYERS)
    keys = [entry.key for entry in found]
    assert len(keys) == len(set(keys)) == 1 + 3 * 3
    assert [entry.rules.seed for entry in found if entry.label == "none"] == [0, 1, 2]


def test_one_layer_that_was_asked_for_is_another_visit_than_that_of_each() -> None:
    found = entries(question(layers=Wanted(each=True, some=(2,))), LAYERS)
    assert {entry.named for entry in found if entry.label == "performer"} == {"only 2", "0", "2"}


def test_what_cannot_be_answered_is_refused_before_anything_is_trained() -> None:
    refuse(question(), LAYERS, None)
    with pytest.raises(UsageError, match="--windows 5: below 6 no interval"):
        refuse(question(windows=5), LAYERS, None)
    with pytest.raises(UsageError, match="held out has 7"):
        refuse(question(windows=8), LAYERS, 7)
    with pytest.raises(UsageError, match="the model has 3 layers"):
        refuse(question(layers=Wanted(some=(3,))), LAYERS, None)
    with pytest.raises(Unsupported, match="layer 1: it has a window"):
        refuse(question(layers=Wanted(some=(1,))), LAYERS, None)
    with pytest.raises(Unsupported, match="it has a window"):
        refuse(question(), LAYERS[1:2], None)
