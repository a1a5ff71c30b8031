"""Rotary positions, and models with them or without any."""

from __future__ import annotations

import cmath
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.engines.rotation import Rotary
from attnbench.contract.capabilities import answered
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported
from attnbench.harness.inside.call import prepare
from attnbench.models.decoder import Decoder
from attnbench.models.encoder import Encoder, as_layer
from attnbench.suite.cell import Cell, ModelSize

SHAPE = Shape(batch=2, heads=2, seq_len=12, head_dim=8)
CAUSAL = replace(SHAPE, causal=True)
ROTARY = ModelSize(layers=2, ffn=8, vocab=5, positions="rotary")


def test_a_product_depends_on_the_distance_alone() -> None:
    turn = Rotary(12, 8).double()
    q, k = (torch.randn(8, dtype=torch.float64).expand(1, 1, 12, 8) for _ in range(2))
    logits = (turn(q) @ turn(k).mT)[0, 0]
    for distance in range(-11, 12):
        along = logits.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-6, rtol=0)  # angles are float32
    assert logits[0].std() > 0.1


def test_it_is_the_formula_written_out() -> None:
    x = torch.randn(1, 1, 12, 8, dtype=torch.float64)
    turned = Rotary(12, 8).double()(x)
    for p in (0, 5, 11):
        for i in range(4):
            before, after = (complex(*y[0, 0, p, i::4].tolist()) for y in (x, turned))
            assert abs(after - before * cmath.exp(1j * p * 10_000 ** (-2 * i / 8))) < 1e-5


def test_lengths_are_kept() -> None:
    x = torch.randn(1, 1, 12, 8)
    torch.testing.assert_close(Rotary(12, 8)(x).norm(dim=-1), x.norm(dim=-1))


def test_an_odd_width_has_no_pairs() -> None:
    with pytest.raises(Unsupported, match="head_dim 7 is odd"):
        Rotary(4, 7)


def test_a_mixer_has_nothing_to_turn() -> None:
    with pytest.raises(Unsupported, match="a mixer has none"):
        as_layer("fnet", SHAPE, rotary=True)


def test_a_layer_of_shared_heads_turns_both() -> None:
    layer = as_layer("softmax", Shape(batch=2, heads=4, kv_heads=2, seq_len=12, head_dim=8), rotary=True)
    assert layer(torch.randn(2, 12, 32)).shape == (2, 12, 32)


def test_models_differ_in_positions_and_in_no_other_weight() -> None:
    models = {
        kind: Encoder("softmax", SHAPE, ModelSize(layers=1, ffn=8, vocab=5, positions=kind))  # type: ignore[arg-type]  # from the table
        for kind in ("learned", "sinusoid", "rotary", "none")
    }
    states = {kind: model.state_dict() for kind, model in models.items()}
    assert "position" not in states["rotary"]
    for kind, state in states.items():
        for name in states["none"]:
            assert torch.equal(state[name], states["none"][name]), (kind, name)
    tokens = torch.randint(5, (2, 12))
    outputs = [model(tokens) for model in models.values()]
    assert len({tuple(out.flatten().tolist()) for out in outputs}) == 4


def test_without_positions_the_order_of_tokens_does_not_matter_and_with_rotary_it_does() -> None:
    tokens = torch.randint(5, (1, 12))
    for kind, same in (("none", True), ("rotary", False)):
        model = Encoder("softmax", SHAPE, ModelSize(layers=1, ffn=8, vocab=5, positions=kind)).double()  # type: ignore[arg-type]  # from the table
        gap = (model(tokens) - model(tokens.flip(1))).abs().max()
        assert (gap < 1e-12) == same


# Token by token


def goes_on(module: Any, given: Tensor, prompt: int) -> None:
    """What follows a prompt, one step after the other, is what the whole sequence gives in one call."""
    expected, state = module(given), module.begin(given[:, :prompt])
    for t in range(prompt, 12):
        out, state = module.step(state, given[:, t : t + 1])
        torch.testing.assert_close(out, expected[:, t : t + 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "entry",
    [one for one in VARIANTS if one.traits.decode and one.kind == "operator" and not one.traits.compiled],
    ids=lambda entry: entry.name,
)
def test_token_by_token_a_layer_gives_what_it_gives_for_the_whole_sequence(entry: Variant) -> None:
    dtype = torch.float64 if "float64" in entry.traits.dtypes else torch.float32
    layer = as_layer(f"{entry.name}:{entry.settings[0]}".rstrip(":"), CAUSAL, rotary=True).to(dtype)
    x = torch.randn(2, 12, 16, dtype=dtype)
    for prompt in (0, 5):
        goes_on(layer, x, prompt)


@pytest.mark.parametrize("changes", [{"heads": 4, "kv_heads": 2}, {"heads": 4, "kv_heads": 1}, {"added_tokens": 3}])
def test_so_does_one_whose_heads_are_shared_or_that_adds_tokens(changes: dict[str, int]) -> None:
    shape = replace(CAUSAL, **changes)  # type: ignore[arg-type]  # from the table
    goes_on(as_layer("softmax", shape, rotary=True).double(), torch.randn(2, 12, shape.C, dtype=torch.float64), 5)


@pytest.mark.parametrize("variant", ["softmax", "stack:linear+softmax", "snapkv:prompt=7,budget=4,window=2"])
def test_a_decoder_answers_its_prompt_and_writes_what_it_scores(variant: str) -> None:
    model, tokens = Decoder(variant, CAUSAL, ROTARY).double(), torch.randint(5, (2, 12))
    expected = model(tokens)
    out, state = answered(model, tokens[:, :7])
    torch.testing.assert_close(out, expected[:, 6:7])
    for t in range(7, 12):
        out, state = model.step(state, tokens[:, t : t + 1])
        torch.testing.assert_close(out, expected[:, t : t + 1])


def test_the_passes_that_take_steps_give_what_one_call_gives() -> None:
    cell = Cell("x", "s", parse_spec("softmax"), CAUSAL, level="model", model=ROTARY, architecture="decoder")
    expected = prepare(cell).run()
    torch.testing.assert_close(prepare(replace(cell, pass_="stepwise")).run(), expected)
    torch.testing.assert_close(prepare(replace(cell, pass_="decode")).run(), expected[:, -1:])
    generated = prepare(replace(cell, pass_="generate", shape=replace(CAUSAL, seq_len=8), new_tokens=4)).run()
    torch.testing.assert_close(generated, expected[:, 7:])


def test_no_place_is_beyond_the_length() -> None:
    layer = as_layer("softmax", CAUSAL, rotary=True)
    state = layer.begin(torch.randn(2, 12, 16))  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        layer.step(state, torch.randn(2, 1, 16))  # type: ignore[operator]
