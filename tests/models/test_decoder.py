"""Models that write follow their formula, and write token by token what they score in one call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported
from attnbench.models.decoder import Decoder, EncoderDecoder
from attnbench.models.encoder import Block, MultiHead
from attnbench.suite.cell import ModelSize

SHAPE = Shape(2, 2, 9, 4)
CROSS = replace(SHAPE, kv_len=13)
SIZE = ModelSize(layers=2, ffn=16, vocab=11)
VOCAB = 11
RUNNABLE = [entry for entry in VARIANTS if not entry.traits.compiled]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def words(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def labelled(entry: Variant) -> str:
    return f"{entry.name}:{entry.settings[0]}".rstrip(":")


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Softmax attention of heads of 4, pair by pair, for x ``(B, N, C)``."""
    parts = []
    for h in range(2):
        mine = slice(4 * h, 4 * h + 4)
        logits = q[..., mine] @ k[..., mine].mT / 2
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        parts.append(logits.softmax(-1) @ v[..., mine])
    return torch.cat(parts, -1)


def norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, (8,))


def after_itself(block: nn.Module, x: Tensor, *, causal: bool) -> Tensor:
    assert isinstance(block, Block)
    assert isinstance(block.layer, MultiHead)
    q, k, v = (norm(x) @ block.layer.qkv.weight.T).split(8, -1)
    allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    return x + attention(q, k, v, allowed.tril() if causal else allowed) @ block.layer.out.weight.T


def after_ffn(block: nn.Module, x: Tensor) -> Tensor:
    up, _, down = block.ffn  # type: ignore[misc, union-attr]
    return x + nn.functional.gelu(norm(x) @ up.weight.T + up.bias) @ down.weight.T + down.bias


def test_a_decoder_follows_its_formula() -> None:
    model, tokens = Decoder("softmax", SHAPE, SIZE).double(), words(9)
    x = model.tokens[0].weight[tokens] + model.position
    for block in model.blocks:
        x = after_ffn(block, after_itself(block, x, causal=True))
    close(model(tokens), model.head(norm(x)))
    assert model(tokens).shape == (2, 9, VOCAB)


def test_an_encoder_decoder_follows_its_formula() -> None:
    model, tokens, source = EncoderDecoder("softmax", CROSS, SIZE).double(), words(9), words(13, seed=1)
    y = model.encoder.tokens[0].weight[source] + model.encoder.position
    for block in model.encoder.blocks:
        y = after_ffn(block, after_itself(block, y, causal=False))
    y = norm(y)
    x = model.decoder.tokens[0].weight[tokens] + model.decoder.position
    for block, cross in zip(model.decoder.blocks, model.cross, strict=True):
        x = after_itself(block, x, causal=True)
        k, v = (y @ cross.crossing.kv.weight.T).split(8, -1)
        x = x + attention(norm(x) @ cross.crossing.q.weight.T, k, v) @ cross.crossing.out.weight.T
        x = after_ffn(block, x)
    close(model(tokens, source), model.decoder.head(norm(x)))


@pytest.mark.parametrize("entry", [one for one in RUNNABLE if one.traits.decode], ids=lambda entry: entry.name)
def test_token_by_token_a_decoder_gives_the_logits_of_one_call(entry: Variant) -> None:
    dtype = torch.float64 if "float64" in entry.traits.dtypes else torch.float32
    model, tokens = Decoder(labelled(entry), SHAPE, SIZE).to(dtype), words(9)
    expected = model(tokens)
    for prompt in (0, 4):
        state = model.begin(tokens[:, :prompt])
        for t in range(prompt, 9):
            logits, state = model.step(state, tokens[:, t : t + 1])
            torch.testing.assert_close(logits, expected[:, t : t + 1], rtol=1e-6, atol=1e-6)


def test_later_tokens_change_no_earlier_answer() -> None:
    decoder, both = Decoder("linear", SHAPE, SIZE).double(), EncoderDecoder("linear", CROSS, SIZE).double()
    tokens, source = words(9), words(13, seed=1)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    close(decoder(changed)[:, :6], decoder(tokens)[:, :6])
    close(both(changed, source)[:, :6], both(tokens, source)[:, :6])
    assert not torch.allclose(decoder(changed)[:, 6:], decoder(tokens)[:, 6:])


@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.name)
def test_what_is_read_reaches_every_answer_or_the_variant_says_why_not(entry: Variant) -> None:
    tokens, source = words(9), words(9, seed=1)
    if not (entry.traits.cross and entry.traits.causal):
        reason = (
            f"cross-attention: {entry.traits.cross}" if not entry.traits.cross else f"causal: {entry.traits.causal}"
        )
        with pytest.raises(Unsupported) as refused:
            EncoderDecoder(labelled(entry), SHAPE, SIZE)  # 9 and 9 tokens: two sequences all the same
        assert str(refused.value) == reason
        return
    try:
        model = EncoderDecoder(labelled(entry), SHAPE, SIZE)
    except Unsupported:  # with these options
        return
    before = model(tokens, source)
    assert before.shape == (2, 9, VOCAB)
    moved = (model(tokens, words(9, seed=2)) - before).abs().amax(-1)
    assert (moved > 0).all()


def test_a_mixture_with_a_part_that_needs_one_sequence_is_refused_at_equal_lengths_too() -> None:
    with pytest.raises(Unsupported, match="the window needs"):
        EncoderDecoder("per-head:parts=softmax+local", SHAPE, SIZE)


def test_padding_of_what_is_read_changes_nothing() -> None:
    model, tokens, source = EncoderDecoder("softmax", CROSS, SIZE).double(), words(9), words(13, seed=1)
    mask = torch.arange(13) < torch.tensor([[7], [13]])
    padded = model(tokens, source, key_mask=mask)
    close(padded[:1], model(tokens[:1], source[:1, :7]))
    close(padded[1:], model(tokens[1:], source[1:]))


@pytest.mark.parametrize("make", [Decoder, EncoderDecoder])
def test_gradients_reach_every_weight_and_a_seed_repeats_them(make: type[Decoder | EncoderDecoder]) -> None:
    given = [words(9), words(13, seed=1)][: 1 + (make is EncoderDecoder)]
    shape = CROSS if make is EncoderDecoder else SHAPE
    model, again, other = (make("linear", shape, SIZE, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(model(*given), again(*given))
    assert not torch.allclose(model(*given), other(*given))
    model(*given).square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert without == []


def test_building_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    EncoderDecoder("performer:features=8", CROSS, SIZE)
    assert torch.equal(before, torch.get_rng_state())


def test_layers_of_cross_attention_draw_their_own_numbers() -> None:
    model = EncoderDecoder("performer:features=8", CROSS, SIZE)
    first, second = (dict(layer.crossing.operator.named_buffers()) for layer in model.cross)  # type: ignore[union-attr]
    assert first
    assert not any(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["mla", "gated-softmax"])
def test_a_mixer_that_takes_a_source_crosses_with_its_own_projections(name: str) -> None:
    model = EncoderDecoder(name, CROSS, SIZE).double()
    tokens, source = words(9), words(13, seed=1)
    real = torch.arange(13) < torch.tensor([[10], [13]])
    y = model.encoder.read(source, key_mask=real)
    x = model.decoder.placed(model.decoder.embedded(tokens))
    for block, cross in zip(model.decoder.layers, model.cross, strict=True):
        assert isinstance(block, Block)
        x = x + block.layer(norm(x))
        x = x + cross.crossing.operator.dense(norm(x), source=y, key_mask=real)  # type: ignore[operator,union-attr]
        x = x + block.ffn(norm(x))
    close(model(tokens, source, key_mask=real), model.decoder.head(norm(x)))


def test_a_mixer_without_a_source_is_refused() -> None:
    with pytest.raises(Unsupported, match="cross-attention: one recurrence runs over one sequence"):
        EncoderDecoder("gated-delta", CROSS, SIZE)
