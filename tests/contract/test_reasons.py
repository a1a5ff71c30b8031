"""Why a variant lacks an ability: what it says of itself must be true of what it computes."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reasons import OF_FAMILY, REASONS
from attnbench.contract.rules import FAMILIES
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.traits import Meets, Traits
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.measure.memory import state_bytes

NAMES = [name for name in VARIANTS.names() if not VARIANTS.get(name).traits.compiled]


def specs(*kinds: str) -> list[str]:
    """The settings of all variants whose queries meet this."""
    every = [f"{name}:{setting}".rstrip(":") for name in NAMES for setting in VARIANTS.get(name).settings]
    return [text for text in every if claims(text).meets in kinds]


def claims(text: str) -> Traits:
    spec = parse_spec(text)
    return VARIANTS.get(spec.name).claims(spec, causal=False)


def inputs(entry: Variant, shape: Shape) -> tuple[Tensor, ...]:
    if entry.kind == "mixer":
        return (torch.randn(shape.B, shape.N, shape.C),)
    return tuple(torch.randn(3, shape.B, shape.H, shape.N, shape.D))


def state_after(module: Any, entry: Variant, n: int) -> int:
    with torch.no_grad():
        return state_bytes(module.begin(*inputs(entry, Shape(1, 2, n, 8, causal=True))))


def grows(text: str) -> bool:
    """Whether what it keeps of four times as many tokens is more than twice as large."""
    entry = VARIANTS.get(parse_spec(text).name)
    small, large = (state_after(build(text, Shape(1, 2, n, 8, causal=True)), entry, n) for n in (10, 40))
    return large > 2 * small


def seen_tokens(text: str, n: int = 12) -> Tensor:
    """Which tokens the last output depends on, ``(n,)`` bool: the values of an operator, the input of a mixer.

    Found by changing each token, since no gradient passes through what is rounded.
    """
    shape = Shape(1, 2, n, 8)
    module, given = build(text, shape), inputs(VARIANTS.get(parse_spec(text).name), shape)

    def last(x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = module(*given[:-1], x)
        return output[..., n - 1, :]

    changed = (torch.where(torch.arange(n)[:, None] == token, -3.0, 1.0) * given[-1] for token in range(n))
    return torch.tensor([not torch.equal(last(x), last(given[-1])) for x in changed])


def test_every_family_and_every_kind_has_its_reasons() -> None:
    assert OF_FAMILY.keys() == set(FAMILIES)
    assert REASONS.keys() == set(get_args(Meets))
    assert {frozenset(reasons) for reasons in REASONS.values()} == {frozenset(("bias", "mask", "sink"))}


@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_left_without_a_reason(name: str) -> None:
    traits = VARIANTS.get(name).traits
    for ability in ("bias", "mask", "q_start", "sink"):
        assert getattr(traits, ability) != getattr(Traits, ability)


@pytest.mark.parametrize("text", [text for text in specs("state") if claims(text).decode])
def test_what_all_queries_read_does_not_grow_with_the_tokens(text: str) -> None:
    assert not grows(text)


@pytest.mark.parametrize("text", [text for text in specs("all keys") if claims(text).decode])
def test_whoever_weighs_every_key_keeps_every_key(text: str) -> None:
    assert grows(text)


def test_a_cache_and_a_sum_are_told_apart() -> None:
    assert grows("softmax")
    assert not grows("linear")


@pytest.mark.parametrize("text", specs("state"))
def test_a_sum_is_cheaper_than_all_pairs(text: str) -> None:
    spec = parse_spec(text)
    assert "n²" not in (claims(text).cost or VARIANTS.get(spec.name).cost)


@pytest.mark.parametrize("text", specs("all keys"))
def test_a_weight_for_every_pair_costs_as_many_and_leaves_none_out(text: str) -> None:
    assert re.search("n[²³]", claims(text).cost or VARIANTS.get(parse_spec(text).name).cost)
    assert seen_tokens(text).all()


@pytest.mark.parametrize("text", specs("nothing"))
def test_whoever_meets_nothing_depends_on_its_own_token_alone(text: str) -> None:
    assert seen_tokens(text).tolist() == [False] * 11 + [True]


@pytest.mark.parametrize("text", ["local:window=3", "topk:keys=3", "graph"])
def test_whoever_chooses_keys_leaves_others_out(text: str) -> None:
    assert claims(text).meets == "chosen keys"
    assert not seen_tokens(text).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_mixer_has_no_later_queries_for_a_reason_of_mathematics_and_an_operator_for_none(name: str) -> None:
    entry = VARIANTS.get(name)
    if not entry.traits.q_start:
        assert ("the same tokens" in entry.traits.q_start) == (entry.kind == "mixer")


def test_a_variant_may_have_a_reason_of_its_own() -> None:
    assert Spec("clustered").name in NAMES
    assert "one row of weights" in str(VARIANTS.get("clustered").traits.mask)
