"""Tokens that a layer adds are read like others, and stand in no output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import SuiteError, Unsupported, UsageError
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.models.added_tokens import AddedTokens
from attnbench.models.decoder import Decoder
from attnbench.models.encoder import Encoder, MultiHead, as_layer
from attnbench.suite.cell import ModelSize
from attnbench.suite.messages import Origin
from attnbench.suite.schema import Suite

SHAPE = Shape(2, 2, 11, 4, added_tokens=3)
RUNNABLE = [entry for entry in VARIANTS if not entry.traits.compiled]


def draw(n: int = 11) -> Tensor:
    return torch.randn(2, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def added(variant: str, shape: Shape = SHAPE) -> AddedTokens:
    layer = as_layer(variant, shape, seed=5).double()
    assert isinstance(layer, AddedTokens)
    return layer


def test_global_tokens_that_are_added_see_all_and_are_seen_by_all() -> None:
    """Longformer with three added global tokens, written out pair by pair."""
    layer, x = added("longformer:window=2,global_tokens=3"), draw()
    inner = layer.layer
    assert isinstance(inner, MultiHead)
    i = torch.arange(14)
    of_sequence = (i[:, None] - i).abs() <= 2
    allowed = of_sequence | (i < 3) | (i[:, None] < 3)
    longer = torch.cat([layer.tokens.expand(2, -1, -1), x], 1)
    q, k, v = (longer @ inner.qkv.weight.T).split(8, -1)
    heads = []
    for h in range(2):
        mine = slice(4 * h, 4 * h + 4)
        logits = (q[..., mine] @ k[..., mine].mT / 2).masked_fill(~allowed, -torch.inf)
        heads.append(logits.softmax(-1) @ v[..., mine])
    expected = (torch.cat(heads, -1) @ inner.out.weight.T)[:, 3:]
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.name)
def test_a_layer_gives_what_it_gives_for_the_longer_sequence(entry: Variant) -> None:
    spec = f"{entry.name}:{entry.settings[0]}".rstrip(":")
    dtype = torch.float64 if "float64" in entry.traits.dtypes else torch.float32
    layer, x = added(spec).to(dtype), draw().to(dtype)
    longer = as_layer(spec, replace(SHAPE, seq_len=14, added_tokens=0), seed=5).to(dtype)
    whole = torch.cat([layer.tokens.expand(2, -1, -1), x], 1)
    torch.testing.assert_close(layer(x), longer(whole)[:, 3:])


def test_padding_changes_nothing_and_added_tokens_are_never_padding() -> None:
    layer, x = added("softmax"), draw()
    mask = torch.arange(11) < torch.tensor([[6], [11]])
    padded = layer(x, key_mask=mask)
    torch.testing.assert_close(padded[:1, :6], layer(x[:1, :6]))
    torch.testing.assert_close(padded[1:], layer(x[1:]))
    nothing = layer(x, key_mask=torch.zeros(2, 11, dtype=torch.bool))
    assert nothing.abs().min() > 0  # there are still the tokens that were added


def test_a_causal_layer_decodes_with_them() -> None:
    for variant in ("softmax", "linear", "gla"):
        layer, x = added(variant, replace(SHAPE, causal=True)), draw()
        state = layer.begin(x[:, :4])
        for t in range(4, 11):
            out, state = layer.step(state, x[:, t : t + 1])
            torch.testing.assert_close(out, layer(x)[:, t : t + 1])


def test_a_decoder_with_them_writes_what_it_scores() -> None:
    model = Decoder("softmax", SHAPE, ModelSize(layers=2, ffn=8, vocab=7)).double()
    tokens = torch.randint(7, (2, 11))
    state, logits = model.begin(tokens[:, :0]), []
    for t in range(11):
        one, state = model.step(state, tokens[:, t : t + 1])
        logits.append(one)
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens))


def test_they_are_learned_and_every_layer_has_its_own() -> None:
    model = Encoder("longformer:window=2,global_tokens=3", SHAPE, ModelSize(layers=2, ffn=8, vocab=7))
    first, second = (block.layer.tokens for block in model.blocks)
    assert first.shape == (3, 8)
    assert not torch.equal(first, second)
    model(torch.randint(7, (2, 11))).square().sum().backward()
    assert all(tokens.grad.abs().max() > 0 for tokens in (first, second))


def test_parameters_that_layers_share_are_shared_behind_them_too() -> None:
    model = Encoder("linformer:rank=4,sharing=layerwise", SHAPE, ModelSize(layers=2, ffn=8, vocab=7))
    first, second = (block.layer.layer.operator for block in model.blocks)
    assert first.E is second.E


def test_attention_alone_has_no_place_for_them() -> None:
    with pytest.raises(Unsupported, match="tokens are added by a layer"):
        build("longformer", SHAPE)
    with pytest.raises(UsageError, match="--added-tokens 2: that is a matter of layers; add --level layer or model"):
        CompareQuestion(["softmax", "linear"], 8, axes={"added_tokens": 2}, device="cpu").prepare()
    sweep = {"name": "w", "matrix": {"variant": "softmax", "seq_len": 8, "added_tokens": 2}}
    said = "'added_tokens' does nothing at level operator; remove it or write level: layer"
    with pytest.raises(SuiteError, match=said):
        Suite.of({"name": "s", "sweeps": [sweep]}, Origin("x.yaml"))


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_their_number_is_whole(wrong: int) -> None:
    with pytest.raises(UsageError, match="added_tokens must be a whole number of at least 0"):
        Shape(added_tokens=wrong)
