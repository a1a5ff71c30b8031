"""Faults planted in the swap, and for each the property, asserted by another test, that no longer holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")

from attnbench.contract.spec import parse_spec
from attnbench.harness.swap.swap_question import SwapQuestion
from attnbench.models.pretrained import bridge, evaluate, language_model, models, operators, own_encoder
from attnbench.models.pretrained.bridge import Session, put_into
from attnbench.models.pretrained.evaluate import baseline_of
from attnbench.models.pretrained.language_model import LanguageModel
from attnbench.models.pretrained.loading import TokenText
from attnbench.models.pretrained.models import Trees
from attnbench.models.pretrained.subject import Windows
from tests.models.pretrained import families, properties
from tests.models.pretrained.models import tiny
from tests.models.pretrained.test_swap import ask

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own making

CAUGHT = (AssertionError, pytest.fail.Exception)
"""How an assertion fails, and how ``pytest.raises`` does where nothing is raised."""
N = 24
Property = Callable[[], None]
Plant = Callable[[pytest.MonkeyPatch], None]


def tokens() -> Tensor:
    return torch.randint(4, 61, (2, N), generator=torch.Generator().manual_seed(3))


def made(name: str) -> Any:
    return families.make(families.FAMILIES[name])


# The properties, as their own tests ask for them.


def bridged() -> None:
    properties.the_bridge_computes_what_the_model_did(made("Llama"), put_into, tokens())


def scaled() -> None:
    properties.the_bridge_computes_what_the_model_did(made("Granite"), put_into, tokens())


def seen() -> None:
    properties.softmax_of_what_is_seen_is_what_each_layer_answers(LanguageModel("m", made("OPT"), N), tokens())


def padded() -> None:
    model = made("Llama")
    put_into(model)
    properties.padding_moves_no_real_token(model, tokens()[:1, :10])


def refused(name: str) -> Property:
    builder, said = families.REFUSED[name]
    return lambda: properties.it_is_refused(lambda: LanguageModel(name, families.make(builder), N), said)


def reached() -> None:
    one = LanguageModel("m", made("Llama"), N)
    one.module.set_attn_implementation("sdpa")
    properties.it_is_refused(
        lambda: properties.without_attention(one, tokens(), 0, 1, 2), "0 of its 3 attention layers were reached"
    )


def reached_in_the_own_encoder() -> None:
    one = tiny()
    one.layers = (*one.layers, one.layers[0])
    properties.it_is_refused(
        lambda: properties.without_attention(one, Trees(N).held_out(1).tokens, 0), "3 of its 4 attention layers"
    )


def told_apart() -> None:
    properties.each_layer_can_be_replaced_alone(LanguageModel("m", made("ALBERT"), N), tokens())


def called_once() -> None:
    model = made("Llama")
    model.gradient_checkpointing_enable()
    put_into(model)
    properties.attention_is_called_once_a_layer_in_a_training_step(families.calls_of_a_step(model, tokens()), 3)


def own_features() -> None:
    built = operators.build_operators(parse_spec("performer:features=8"), tiny().layers, (0, 1, 2), seed=0)
    properties.each_layer_has_random_features_of_its_own(built)


def divergence() -> None:
    subject = tiny()
    base = baseline_of(subject, Trees(N).held_out(5), "cpu")
    built = operators.build_operators(parse_spec("mean-value"), subject.layers, (0, 1, 2), seed=0)
    properties.the_divergence_is_that_of_its_formula(subject, built, base)


@pytest.fixture
def controls(tmp_path: Path, forks: None, monkeypatch: pytest.MonkeyPatch) -> Property:
    monkeypatch.setattr(models, "OwnEncoder", tiny)

    def hold() -> None:
        found = ask(tmp_path, "local:window=8", fresh=True)
        properties.the_controls_stand_in_the_rows(found, (0, 2))

    return hold


# The faults.


def no_mask_function(patch: pytest.MonkeyPatch) -> None:
    bridge.register()
    patch.delitem(families.transformers.AttentionMaskInterface._global_mapping, bridge.NAME)


def nothing_counted(patch: pytest.MonkeyPatch) -> None:
    for module in (language_model, own_encoder):
        patch.setattr(module, "count_calls", lambda seen, layers: "")


def scale_not_folded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bridge, "folded", lambda query, scaling: query)


def scale_not_folded_for_the_variant(patch: pytest.MonkeyPatch) -> None:
    """The layer's own answer is right, but what the variant gets has a quarter of the logits: OPT scales by itself."""

    def unscaled(at: Any) -> Session:
        return Session(lambda place, module, q, *others: at(place, module, q / q.shape[-1] ** 0.5, *others))

    patch.setattr(language_model, "Session", unscaled)


def keyed_by_module(patch: pytest.MonkeyPatch) -> None:
    def keyed(at: Any) -> Session:
        places: dict[int, int] = {}
        return Session(lambda place, module, *others: at(places.setdefault(id(module), place), module, *others))

    patch.setattr(language_model, "Session", keyed)


def changes_let_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bridge, "_CHANGES", {})


def one_seed(patch: pytest.MonkeyPatch) -> None:
    own = operators.build
    patch.setattr(operators, "build", lambda variant, shape, seed: own(variant, shape, seed=0))


def no_control(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SwapQuestion, "trains", False)


def drawn_at_random(patch: pytest.MonkeyPatch) -> None:
    def held_out(self: TokenText, count: int) -> Windows:
        whole = torch.cat([self._train, self._held]).flatten()
        starts = torch.randint(len(whole) - self.length, (count,), generator=torch.Generator().manual_seed(0))
        return self._windows(torch.stack([whole[start : start + self.length] for start in starts]), [0] * count)

    patch.setattr(TokenText, "held_out", held_out)


def repeated_in_turn(patch: pytest.MonkeyPatch) -> None:
    """Head h of the queries reads head h mod K of the keys."""
    patch.setattr(bridge, "of_query_heads", lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1))


def exchanged(patch: pytest.MonkeyPatch) -> None:
    own = evaluate._kl
    patch.setattr(evaluate, "_kl", lambda of, by: own(by, of))


def left_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(families.transformers.LlamaForCausalLM, "gradient_checkpointing_disable", lambda self: None)


MUTANTS: list[tuple[Plant, Property]] = [
    (no_mask_function, padded),
    (nothing_counted, reached),
    (nothing_counted, reached_in_the_own_encoder),
    (scale_not_folded, scaled),
    (scale_not_folded_for_the_variant, seen),
    (keyed_by_module, told_apart),
    *((changes_let_through, refused(name)) for name in ("Gemma 2", "GPT-OSS", "T5")),
    (one_seed, own_features),
    (drawn_at_random, properties.what_is_held_out_is_the_end_and_never_trained_on),
    (repeated_in_turn, bridged),
    (exchanged, divergence),
    (left_on, called_once),
]


@pytest.mark.parametrize(("plant", "hold"), MUTANTS, ids=[plant.__name__ for plant, _ in MUTANTS])
def test_a_fault_makes_the_property_false_that_holds_without_it(
    plant: Plant, hold: Property, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold()
    plant(monkeypatch)
    with pytest.raises(CAUGHT):
        hold()


def test_a_swap_without_its_control_is_found_out(controls: Property, monkeypatch: pytest.MonkeyPatch) -> None:
    controls()
    no_control(monkeypatch)
    with pytest.raises(CAUGHT):
        controls()
