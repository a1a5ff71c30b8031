from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from attnbench.contract.traits import ABILITIES, Knob, No, Rounds, TraitChanges, Traits

WRONG: dict[str, list[Any]] = {
    "target": ["exact", "Softmax", None, True],
    "exact": ["yes", 1, None],
    "meets": ["keys", None, "no keys"],
    "causal": ["yes", "", 0, None],
    "cross": ["no"],
    "key_padding": [None],
    "stochastic": ["seed"],
    "rows_sum_to_one": [1.0],
    "decode": ["step"],
    "bias": ["alibi"],
    "mask": ["prefix", None],
    "documents": ["ragged", None],
    "q_start": [0],
    "sink": ["learned"],
    "shares": ["itself", True, None],
    "reads": [("beta",), "beta", None],
    "heads_apart": ["together", None],
    "v_dim": ["wide", None],
    "longer": [3],
    "permutable": [No("no reason is given for a flag")],
    "dtypes": ["float32", ("float8",), ["float32"], None],
    "compiled": [2],
    "rounds_together": [1],
    "rounds": ["q_block", Rounds(["q_block"]), Rounds(("two\nlines",))],  # type: ignore[arg-type]
    "emulated": [None, "two\nlines"],
    "exact_with": ["window={n}", ["window={n}"], (3,)],
    "converges_with": [None, ("features",)],
    "knob": ["features", Knob("two\nlines"), Knob("features", step=0), Knob("features", step=True)],
    "reads_ahead": [None, "two\nlines"],
    "baseline": [None, "two\nlines"],
    "own_form": [None, "two\nlines"],
    "cost": [None, 2, "two\nlines"],
    "given": [{"kernel=relu": {}}, ("kernel=relu",), (("kernel=relu", "other"),)],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_a_value_outside_the_type_of_a_trait_is_told_with_the_choices(field: str, value: Any) -> None:
    problem = Traits(**{field: value}).problem()
    assert problem is not None
    assert problem.startswith(f"Traits({field}={value!r}): ")


def test_every_trait_has_a_rule_and_the_defaults_keep_it() -> None:
    assert WRONG.keys() == {field.name for field in fields(Traits)}
    assert Traits().problem() is None


@pytest.mark.parametrize(
    ("traits", "problem"),
    [
        (Traits(exact=True, target="other"), "what equals softmax attention has target='softmax'"),
        (Traits(decode=True, causal=No("it has no order")), "only what is causal can decode"),
        (Traits(given=(("kernel=relu", {"targt": "other"}),)), "no trait; did you mean 'target'?"),
        (Traits(given=(("kernel=relu", {"target": "exact"}),)), "given 'kernel=relu', Traits(target='exact'): choose"),
        (Traits(given=(("kernel=relu", {"given": ()}),)), "claims 'given', which is no trait"),
    ],
)
def test_claims_that_exclude_each_other_are_told(traits: Traits, problem: str) -> None:
    assert problem in str(traits.problem())


def test_a_form_of_its_own_both_ways_is_given_last() -> None:
    first, last = ("kernel=relu", {"target": "other"}), ("causal=false", {"own_form": "two passes"})
    assert Traits(given=(first,), own_form_both_ways="two passes") == Traits(given=(first, last))
    assert replace(Traits(given=(last,)), decode=True).given == (last,)
    problem = Traits(own_form_both_ways="two\nlines").problem()
    assert problem == "given 'causal=false', Traits(own_form='two\\nlines'): give one line of text"


def test_an_ability_is_true_or_has_a_reason() -> None:
    for traits in (Traits(), Traits(causal=False, cross=False, key_padding=False, decode=False, bias=False)):
        for ability in ABILITIES:
            value = getattr(traits, ability)
            assert value is True or (isinstance(value, No) and len(value) > 10)
    assert Traits(cross=False).cross == "not defined for this variant"


def test_what_is_printed_of_traits_is_what_was_said() -> None:
    assert repr(Traits(target="other", decode=True)) == "Traits(target='other', decode=True)"


def test_a_claim_with_an_option_may_be_any_but_further_options() -> None:
    changes = {name: one.__forward_arg__ for name, one in TraitChanges.__annotations__.items()}
    assert changes == {field.name: field.type for field in fields(Traits) if field.name != "given"}
