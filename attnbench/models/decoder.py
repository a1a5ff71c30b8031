"""Models that write: a decoder, whose answer to a token is the next one, and one that also reads other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.task import Form
from attnbench.models.crossing import Crossing, Taking, as_crossing, crossing
from attnbench.models.encoder import Block, Encoder, seeds, tied
from attnbench.suite.cell import ModelSize


class Decoder(Encoder):
    """The blocks of :class:`~attnbench.models.encoder.Encoder` with causal attention: tokens to logits of the token
    after each.

    It takes a whole sequence in one call, as in training, or one token after the other, as when it writes; both give
    the same logits.

    Args:
        variant: a name, text such as ``performer:features=64``, or a Spec; or several, which the layers have in turn.
        shape: the shape of attention in each layer, which is causal whatever it says; N is the longest sequence.
        size: layers, FFN width, vocabulary, positions and dropout.
        seed: seed of all weights and of the variants' random numbers.

    Raises:
        UsageError: unknown variant or option, or a value out of range.
        Unsupported: the variant has no causal form, or does not allow this shape.
    """

    at_once = True

    def __init__(
        self, variant: str | Spec | Sequence[str | Spec], shape: Shape, size: ModelSize | None = None, *, seed: int = 0
    ) -> None:
        size = size or ModelSize()
        form = Form((size.vocab,), size.vocab, per_token=True)
        super().__init__(variant, replace(shape, kv_len=None, causal=True), size, form=form, seed=seed)

    @property
    def layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def begin(self, tokens: Tensor) -> Any:
        """The state after the tokens ``(B, n)``, n >= 0."""
        return self._begun(tokens)[1]

    def prompted(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """Logits ``(B, 1, vocab)`` of what follows the tokens ``(B, n)``, n >= 1, and the state after them."""
        x, state = self._begun(tokens)
        logits: Tensor = self.head(self.norm(x[:, -1:]))
        return logits, state

    def _begun(self, tokens: Tensor) -> tuple[Tensor, Any]:
        x, states = self.placed(self.embedded(tokens)), []
        for block in self.layers:
            x, state = block.begin(x)
            states.append(state)
        return x, (tokens.shape[1], tuple(states))

    def step(self, state: Any, token: Tensor) -> tuple[Tensor, Any]:
        """Logits ``(B, n, vocab)`` of what follows each of the next tokens ``(B, n)``, and the state after them."""
        place, states = state
        x, after = self.placed(self.embedded(token), place), []
        for block, before in zip(self.layers, states, strict=True):
            x, state = block.step(before, x)
            after.append(state)
        logits: Tensor = self.head(self.norm(x))
        return logits, (place + token.shape[1], tuple(after))


class CrossAttention(nn.Module):
    """Cross attention with a residual connection: ``x + crossing(LayerNorm(x), y)``."""

    def __init__(self, crossing: Crossing | Taking, width: int, size: ModelSize) -> None:
        super().__init__()
        self.crossing = crossing
        self.before = nn.LayerNorm(width)
        self.drop = nn.Dropout(size.dropout) if size.dropout else nn.Identity()

    def forward(self, x: Tensor, y: Tensor, key_mask: Tensor | None) -> Tensor:
        """x ``(B, N, C)`` attends to y ``(B, M, C)``, whose ``key_mask`` ``(B, M)`` is True where a token is real."""
        z: Tensor = x + self.drop(self.crossing(self.before(x), y, key_mask=key_mask))
        return z


class EncoderDecoder(nn.Module):
    """An encoder that reads M tokens, and a decoder of N tokens whose layers also attend to the encoder's output.

    After Vaswani et al. 2017, arXiv:1706.03762, section 3.1, with the blocks of
    :class:`~attnbench.models.encoder.Encoder`:
    in each block of the decoder, causal attention to its own tokens, cross attention, then the feed-forward layer. All
    three kinds of attention are the variant's. The two halves share no weights. A position bias belongs to the
    attention of a sequence to itself, as in Raffel et al. 2020, arXiv:1910.10683; cross attention has none.

    Args:
        variant: a name, text such as ``performer:features=64``, or a Spec.
        shape: N tokens to write, M to read, and the sizes of attention in each layer, whatever its causality.
        size: of the encoder and of the decoder: each has so many layers.
        seed: seed of all weights and of the variants' random numbers.

    Raises:
        UsageError: unknown variant or option, or a value out of range.
        Unsupported: the variant has no causal form or no cross-attention, or does not allow this shape.
    """

    def __init__(self, variant: str | Spec, shape: Shape, size: ModelSize | None = None, *, seed: int = 0) -> None:
        super().__init__()
        size = size or ModelSize()
        spec = variant if isinstance(variant, Spec) else parse_spec(variant)
        of_encoder, of_decoder, own, *of_layers = seeds(seed, 3 + size.layers)
        reading = replace(shape, seq_len=shape.M, kv_len=None, causal=False, mask="none")
        form = Form((size.vocab,), size.vocab, per_token=True)
        operators = [crossing(spec, shape, seed=layer_seed) for layer_seed in of_layers]
        self.encoder = Encoder(spec, reading, size, form=form, seed=of_encoder)
        self.encoder.head = nn.Identity()  # type: ignore[assignment]  # nobody asks for its answers
        self.decoder = Decoder(spec, shape, size, seed=of_decoder)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(own)
            crossings = [as_crossing(operator, spec, shape) for operator in operators]
            tied(*crossings)
            self.cross = nn.ModuleList(CrossAttention(one, shape.C, size) for one in crossings)
        self.eval()

    def forward(self, tokens: Tensor, source: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Logits ``(B, N, vocab)`` of the token after each.

        Args:
            tokens: ``(B, N)``, whole numbers below ``vocab``: the sequence to write.
            source: ``(B, M)``, the same: the sequence to read.
            key_mask: ``(B, M)``, True where a token of ``source`` is real.
        """
        read = self.encoder(source, key_mask=key_mask)
        x = self.decoder.placed(self.decoder.embedded(tokens))
        for block, cross in zip(self.decoder.layers, self.cross, strict=True):
            x = block.fed(cross(block.attended(x, None), read, key_mask))
        logits: Tensor = self.decoder.head(self.decoder.norm(x))
        return logits
