"""What stands around variants is tested: put something wrong in its place, and a test of it fails."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.catalogue.engines import test_rotary as rotary
from tests.catalogue.engines import test_value_groups as groups
from tests.figures.pictures import test_density as density
from tests.harness.score import test_guidance as guidance
from tests.models import test_added_tokens as added
from tests.models import test_decoder as decoder
from tests.models import test_fewer_queries as fewer

_spec = importlib.util.spec_from_file_location("wrong_layers", Path(__file__).with_name("wrong_layers.py"))
assert _spec is not None
assert _spec.loader is not None
wrong = importlib.util.module_from_spec(_spec)
sys.modules["wrong_layers"] = wrong
_spec.loader.exec_module(wrong)

DENSITY = ("attnbench.figures.pictures.density", "tests.figures.pictures.test_density")

# What is wrong, whose place it takes, and the test that fails then.
FAULTS: list[tuple[str, list[str], Callable[[], None]]] = [
    (
        "TurnedByPlaceZero",
        ["attnbench.models.encoder.MultiHead"],
        lambda: rotary.test_so_does_one_whose_heads_are_shared_or_that_adds_tokens({"heads": 4, "kv_heads": 2}),
    ),
    (
        "TurnedByPlaceZero",
        ["attnbench.models.encoder.MultiHead"],
        lambda: rotary.test_a_decoder_answers_its_prompt_and_writes_what_it_scores("stack:linear+softmax"),
    ),
    (
        "PromptNotCounted",
        ["attnbench.models.encoder.MultiHead"],
        lambda: rotary.test_so_does_one_whose_heads_are_shared_or_that_adds_tokens({"added_tokens": 3}),
    ),
    (
        "GroupsInRound",
        ["attnbench.catalogue.engines.shared_heads.ValueGroups"],
        lambda: groups.test_a_head_reads_the_queries_and_keys_of_its_group("gla"),
    ),
    (
        "GroupsInRound",
        ["attnbench.catalogue.engines.shared_heads.ValueGroups"],
        lambda: groups.test_token_by_token_it_gives_what_the_whole_sequence_gives("kda"),
    ),
    (
        "CutFromTheEnd",
        ["attnbench.models.encoder.AddedTokens"],
        added.test_global_tokens_that_are_added_see_all_and_are_seen_by_all,
    ),
    (
        "MaskedFromTheEnd",
        ["attnbench.models.encoder.AddedTokens"],
        added.test_padding_changes_nothing_and_added_tokens_are_never_padding,
    ),
    (
        "divided_by_the_stride",
        ["attnbench.models.fewer_queries.means"],
        fewer.test_it_is_dense_attention_of_the_mean_queries_to_all_keys,
    ),
    ("with_padding", ["attnbench.models.fewer_queries.means"], fewer.test_padding_changes_nothing),
    (
        "OfTheFirstToken",
        ["attnbench.models.encoder.FewerQueries"],
        fewer.test_it_is_dense_attention_of_the_mean_queries_to_all_keys,
    ),
    (
        "distance_in_tokens",
        ["attnbench.harness.score.loop.penalty"],
        lambda: guidance.test_the_loss_is_its_formula_and_padded_queries_have_no_part(0.2),
    ),
    (
        "distance_in_tokens",
        ["attnbench.harness.score.loop.penalty", "tests.harness.score.test_guidance.penalty"],
        guidance.test_the_diagonal_costs_nothing_and_what_is_farther_costs_more,
    ),
    (
        "with_padded_queries",
        ["tests.harness.score.test_guidance.guided_loss"],
        lambda: guidance.test_the_loss_is_its_formula_and_padded_queries_have_no_part(0.2),
    ),
    (
        "AttendsToItself",
        ["attnbench.models.decoder.CrossAttention"],
        decoder.test_an_encoder_decoder_follows_its_formula,
    ),
    (
        "PaddingIsRead",
        ["attnbench.models.decoder.CrossAttention"],
        decoder.test_padding_of_what_is_read_changes_nothing,
    ),
    (
        "with_one_length",
        [f"{module}.gaussian" for module in DENSITY],
        density.test_softmax_over_the_two_lengths_is_the_kernel_of_the_distance,
    ),
    (
        "with_one_length",
        [f"{module}.gaussian" for module in DENSITY],
        lambda: density.test_every_estimate_is_right_on_average("positive"),
    ),
    (
        "distances_of_vectors",
        [f"{module}.rays" for module in DENSITY],
        density.test_softmax_over_the_two_lengths_is_the_kernel_of_the_distance,
    ),
]


@pytest.mark.parametrize(("name", "places", "test"), FAULTS, ids=[f"{i}-{fault[0]}" for i, fault in enumerate(FAULTS)])
def test_what_is_wrong_fails_a_test(
    name: str, places: list[str], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    test()  # what it stands for passes
    for place in places:
        monkeypatch.setattr(place, getattr(wrong, name))
    with pytest.raises(AssertionError):
        test()


def test_everything_wrong_is_found_by_a_test() -> None:
    made = {name for name, thing in vars(wrong).items() if getattr(thing, "__module__", "") == "wrong_layers"}
    assert made == {name for name, _, _ in FAULTS}
