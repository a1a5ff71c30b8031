"""Models around an attention variant: a layer with projections, and the Long Range Arena's encoder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.stack import turns
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import taken
from attnbench.catalogue.engines.rotation import Rotary
from attnbench.contract.capabilities import Decoding, answered
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.task import NO_LABEL, Form
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.models.added_tokens import AddedTokens
from attnbench.models.crossing import as_crossing, crossing
from attnbench.models.fewer_queries import FewerQueries, means, remaining
from attnbench.suite.cell import ModelSize
from attnbench.text import quantity


class MultiHead(nn.Module):
    """A mixer made of an operator: x ``(B, N, C)`` to q, k and v, the operator, and back.

    q is ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)``. The projections have no bias, as in the Long Range
    Arena. They are C × H·D, C × K·D, C × K·E and H·E × C; q, k and v come from one product. They are strided views of
    its result: an operator that wants them contiguous pays for the copy itself, as it would in a real model.

    Args:
        rotary: turn q and k by their places first. Its state then holds the place of the next token.
    """

    at_once = True

    def __init__(self, operator: nn.Module, shape: Shape, *, rotary: bool = False) -> None:
        super().__init__()
        self.operator = operator
        self.rotary = Rotary(shape.N, shape.D) if rotary else None
        self.sizes = (shape.H, shape.D), (shape.K, shape.D), (shape.K, shape.E)
        self.qkv = nn.Linear(shape.C, sum(heads * width for heads, width in self.sizes), bias=False)
        self.out = nn.Linear(shape.H * shape.E, shape.C, bias=False)
        for weight in (*self._parts(self.qkv.weight.detach(), 0), self.out.weight):
            nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend over x ``(B, N, C)``; ``key_mask`` is ``(B, N)``, True where a token is real."""
        return self._joined(self.operator(*self._projected(x), key_mask=key_mask))

    def begin(self, x: Tensor) -> Any:
        """State after the tokens x ``(B, n, C)``, for an operator that decodes."""
        return self._placed(x.shape[1], cast(Decoding, self.operator).begin(*self._projected(x)))

    def prompted(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs for the tokens x ``(B, n, C)``, n >= 1, and the state after them, of one projection."""
        y, state = answered(self.operator, *self._projected(x))
        return self._joined(y), self._placed(x.shape[1], state)

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        """The next tokens x ``(B, n, C)``: their outputs and the state after them."""
        place, state = (0, state) if self.rotary is None else state
        y, state = taken(self.operator, state, *self._projected(x, place))
        return self._joined(y), self._placed(place + x.shape[1], state)

    def _placed(self, place: int, state: Any) -> Any:
        return state if self.rotary is None else (place, state)

    def _projected(self, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        parts = zip(self._parts(self.qkv(x), -1), self.sizes, strict=True)
        q, k, v = (y.view(*x.shape[:2], *size).transpose(1, 2) for y, size in parts)
        return (q, k, v) if self.rotary is None else (self.rotary(q, first), self.rotary(k, first), v)

    def _parts(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        return torch.split(x, [heads * width for heads, width in self.sizes], dim)

    def _joined(self, y: Tensor) -> Tensor:
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def as_layer(variant: str | Spec, shape: Shape, *, seed: int = 0, rotary: bool = False) -> nn.Module:
    """A whole attention layer, ``(B, N, C)`` to ``(B, N, C)``: a mixer as it is, an operator in :class:`MultiHead`.

    The variant is the one that ``build(variant, shape, seed=seed)`` makes; with ``shape.added_tokens`` it is made for
    so many more, in an :class:`~attnbench.models.added_tokens.AddedTokens`. With ``shape.query_stride`` above 1 the
    layer is a :class:`~attnbench.models.fewer_queries.FewerQueries`, and its output as long as ``shape.outputs``.

    Args:
        rotary: turn q and k by their places (:class:`attnbench.catalogue.engines.rotation.Rotary`).

    Raises:
        UsageError: unknown variant or option, or a value out of range.
        Unsupported: cross-attention, rotary positions of a mixer, or the mathematics does not allow this shape; with
            ``query_stride`` also causality, a bias, rotary positions, added tokens, and a variant without
            cross-attention.
    """
    spec = variant if isinstance(variant, Spec) else parse_spec(variant)
    mixer = VARIANTS.get(spec.name).kind == "mixer"
    if shape.cross or shape.q_start:
        raise Unsupported("a layer attends to its own input: kv_len must equal seq_len; use level operator")
    if shape.query_stride > 1:
        return _with_fewer_queries(spec, shape, seed, rotary=rotary)
    if shape.added_tokens:
        if shape.mask != "none":
            raise Unsupported("mask: tokens that are added would take the places of others")
        longer = replace(shape, seq_len=shape.N + shape.added_tokens, kv_len=None, added_tokens=0)
        layer = as_layer(spec, longer, seed=seed, rotary=rotary)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds(seed, 2)[1])
            return AddedTokens(layer, shape).eval()
    module = build(spec, shape, seed=seed)
    if mixer and rotary:
        raise Unsupported("rotary positions turn q and k, and a mixer has none; choose learned or sinusoid positions")
    if mixer:
        return module
    with torch.random.fork_rng(devices=[]):
        # Another seed than the variant's own, whose numbers already made its random projections.
        torch.default_generator.manual_seed(seeds(seed, 1)[0])
        return MultiHead(module, shape, rotary=rotary).eval()


def _with_fewer_queries(spec: Spec, shape: Shape, seed: int, *, rotary: bool) -> nn.Module:
    reasons = {
        "causal: a query made of several tokens would know the later ones": shape.causal,
        "bias: a query made of several tokens has no one position": shape.bias != "none",
        "mask: a query made of several tokens has no one position": shape.mask != "none",
        "added_tokens: no output would be that of a token that was added": shape.added_tokens > 0,
        "rotary positions: a query made of several tokens has no one position": rotary,
    }
    for reason, here in reasons.items():
        if here:
            raise Unsupported(f"query_stride and {reason}")
    fewer = replace(shape, seq_len=shape.outputs, kv_len=shape.N)
    operator = crossing(spec, fewer, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds(seed, 1)[0])
        return FewerQueries(as_crossing(operator, spec, shape), shape.query_stride).eval()


class Encoder(nn.Module):
    """The encoder of the Long Range Arena: tokens to logits, for the sequence or for each token.

    From Tay et al. 2021, arXiv:2011.04006. By default the sizes are those of the released text configuration: 4 layers
    and a feed-forward width of 1024; its width 256 and 4 heads come from ``shape``. To a token embedding from N(0, 1)
    the model adds a position embedding: a learned one, which starts from N(0, 0.02²) or from sinusoids of unit size, or
    fixed sinusoids. With rotary positions q and k of each layer are turned instead. Each block is
    ``x + layer(LayerNorm(x))`` then ``x + FFN(LayerNorm(x))`` with GELU (erf form). A final LayerNorm follows, then the
    mean over the real tokens, unless each token has an answer, then a hidden ReLU layer as wide as the FFN and the
    logits. The embeddings of a token's parts are concatenated, and so are the means of two sequences.

    Unlike the released configuration there is no CLS token, whose pooling would make attention N + 1 long, and by
    default no dropout. Every layer's variant has a seed of its own; all other weights depend only on seed and sizes.

    Args:
        variant: a name, text such as ``performer:features=64``, or a Spec; or several, which the layers have in turn:
            ``["gla", "gla", "gla", "sdpa"]`` for a stack with softmax attention in every fourth layer.
        shape: the shape of attention in each layer; N is the longest input.
        size: layers, FFN width, vocabulary, positions and dropout.
        form: the model's inputs and answers; by default tokens of ``size.vocab`` and two classes of sequences.
        seed: seed of all weights and of the variants' random numbers.

    Raises:
        UsageError: unknown variant or option, or a value out of range.
        Unsupported: as for :func:`as_layer`.
    """

    def __init__(
        self,
        variant: str | Spec | Sequence[str | Spec],
        shape: Shape,
        size: ModelSize | None = None,
        *,
        form: Form | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        size = size or ModelSize()
        self.form = form or Form((size.vocab,), 2)
        self.query_stride = shape.query_stride
        if self.form.per_token and shape.query_stride > 1:
            raise Unsupported("query_stride: each token has an answer, and there are fewer outputs than tokens")
        own, *of_layers = seeds(seed, 1 + size.layers)
        self.position: Tensor | None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(own)
            parts = len(self.form.vocab)
            widths = [shape.C // parts + (part < shape.C % parts) for part in range(parts)]
            self.tokens = nn.ModuleList(
                nn.Embedding(ids, width) for ids, width in zip(self.form.vocab, widths, strict=True)
            )
            start = 0.02 * torch.randn(shape.N, shape.C)  # drawn in any case: all other weights stay the same
            if size.positions in ("sinusoid", "trained-sinusoid"):
                start = sinusoids(shape.N, shape.C)
            if size.positions == "sinusoid":
                self.register_buffer("position", start, persistent=False)
            else:
                learned = size.positions in ("learned", "trained-sinusoid")
                self.register_parameter("position", nn.Parameter(start) if learned else None)
            rotary, lengths = size.positions == "rotary", [shape]
            while len(lengths) < size.layers:
                lengths.append(replace(shape, seq_len=lengths[-1].outputs, kv_len=None))
            layers = [
                (spec, as_layer(spec, at, seed=one, rotary=rotary))
                for spec, at, one in zip(in_turn(variant, size.layers), lengths, of_layers, strict=True)
            ]
            for spec in dict(layers):
                tied(*(layer for other, layer in layers if other == spec))
            self.blocks = nn.ModuleList(Block(layer, shape.C, size) for _, layer in layers)
            self.norm = nn.LayerNorm(shape.C)
            self.head = nn.Sequential(
                nn.Linear(self.form.towers * shape.C, size.ffn), nn.ReLU(), nn.Linear(size.ffn, self.form.classes)
            )
        self.eval()

    def forward(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Logits ``(B, classes)``, or ``(B, N, classes)`` where each token has an answer.

        Args:
            tokens: whole numbers below ``vocab``: ``(B, N)``; ``(B, N, P)`` for P parts; ``(B, 2, N)`` for two towers.
            key_mask: ``(B, N)`` or ``(B, 2, N)``, True where a token is real.
        """
        logits: Tensor = self.head(self.read(tokens, key_mask=key_mask))
        return logits

    def read(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Features that answers are made from: ``(B, N, C)``, or ``(B, towers · C)`` for answers about sequences."""
        towers = self.form.towers
        if towers > 1:
            tokens = tokens.flatten(0, 1)
            key_mask = None if key_mask is None else key_mask.flatten(0, 1)
        x = self.in_context(self.embedded(tokens), key_mask)
        if self.form.per_token:
            return x
        for _ in self.blocks:
            key_mask = remaining(key_mask, self.query_stride)
        if key_mask is None:
            pooled = x.mean(1)
        else:
            x = x.masked_fill(~key_mask[:, :, None], 0.0)
            pooled = x.sum(1) / key_mask.sum(1, keepdim=True).clamp(min=1)
        return pooled.reshape(-1, towers * x.shape[-1])

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embed tokens ``(B, N)`` or ``(B, N, P)`` as ``(B, N, C)``, without their positions."""
        if len(self.tokens) == 1:
            whole: Tensor = self.tokens[0](tokens)
            return whole
        return torch.cat([part(ids) for part, ids in zip(self.tokens, tokens.unbind(-1), strict=True)], -1)

    def in_context(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Run embedded tokens ``(B, N, C)`` through all blocks and normalise."""
        x = self.placed(x)
        for block in self.blocks:
            x = block(x, key_mask)
            key_mask = remaining(key_mask, self.query_stride)
        y: Tensor = self.norm(x)
        return y

    def make_room(self, more: int) -> None:
        """Let sequences be longer by so many tokens; weights and earlier places stay the same.

        Raises:
            Unsupported: positions are learned, and there are none for these tokens.
        """
        if isinstance(self.position, nn.Parameter):
            raise Unsupported(
                f"positions are learned for {len(self.position)} tokens; write positions: sinusoid, rotary or none"
            )
        if self.position is not None:
            length, width = self.position.shape
            further = sinusoids(length + more, width)[length:].to(self.position)
            self.position = torch.cat([self.position, further])
        for module in self.modules():
            if isinstance(module, Rotary):
                module.make_room(more)

    def placed(self, x: Tensor, first: int = 0) -> Tensor:
        """Add their positions to embedded tokens ``(B, n, C)``, which stand at ``first`` and after it."""
        return x if self.position is None else x + self.position[first : first + x.shape[1]].to(x.dtype)


def in_turn(variant: str | Spec | Sequence[str | Spec], layers: int) -> list[Spec]:
    """The variant of each layer: one for all of them, or several in turn, also as text: ``stack:3*gla+sdpa``.

    Raises UsageError for a text that is no variant with options, or no variant at all, and Unsupported if some of them
    would have no layer.
    """
    several = [variant] if isinstance(variant, str | Spec) else variant
    if not several:
        raise UsageError("the layers need at least one variant to take in turn")
    specs = [spec for one in several for spec in turns(one if isinstance(one, Spec) else parse_spec(one))]
    if len(specs) > layers and len(set(specs)) > 1:
        few = f"{quantity(layers, 'layer')}"
        raise Unsupported(
            f"a turn of {len(specs)} layers in a model of {few}; name fewer, or give the model more layers"
        )
    return [specs[layer % len(specs)] for layer in range(layers)]


class Block(nn.Module):
    """One layer of a model: ``x + layer(LayerNorm(x))``, then ``x + FFN(LayerNorm(x))``; all of it ``(B, N, C)``."""

    def __init__(self, layer: nn.Module, width: int, size: ModelSize) -> None:
        super().__init__()
        self.layer = layer
        self.before_layer = nn.LayerNorm(width)
        self.before_ffn = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, size.ffn), nn.GELU(), nn.Linear(size.ffn, width))
        self.drop = nn.Dropout(size.dropout) if size.dropout else nn.Identity()
        self.stride = layer.stride if isinstance(layer, FewerQueries) else 1

    def forward(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.fed(self.attended(x, key_mask))

    def attended(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """The first half; if the layer's output is shorter, the means of x are added to it."""
        y: Tensor = self.drop(self.layer(self.before_layer(x), key_mask=key_mask))
        return means(x, self.stride, key_mask) + y

    def fed(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.ffn(self.before_ffn(x)))
        return y

    at_once = True

    def begin(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs for the tokens x ``(B, n, C)``, n >= 0, and the state after them, of a layer that decodes."""
        z = self.before_layer(x)
        if not x.shape[1]:
            return x, cast(Decoding, self.layer).begin(z)
        y, state = answered(self.layer, z)
        return self.fed(x + self.drop(y)), state

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs for the next tokens x ``(B, n, C)``, and the state after them."""
        y, state = taken(self.layer, state, self.before_layer(x))
        return self.fed(x + self.drop(y)), state


def sinusoids(length: int, width: int) -> Tensor:
    """Positions ``(length, width)`` as sines and cosines of unit size (Vaswani et al. 2017, section 3.5).

    Columns 2i and 2i + 1 are the sine and cosine of position / 10000^(2i / width).
    """
    half = torch.arange((width + 1) // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10_000.0 ** (-2 * half / width)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width].float()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the answers that are asked for; logits ``(..., classes)``, labels ``(...)``."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=NO_LABEL)


def _innermost(layer: nn.Module) -> nn.Module:
    if isinstance(layer, AddedTokens):
        layer = layer.layer
    if isinstance(layer, FewerQueries):
        layer = layer.crossing
    while isinstance(inner := getattr(layer, "operator", None), nn.Module):
        layer = inner
    return layer


def tied(first: nn.Module, *others: nn.Module) -> None:
    """Let all layers share each parameter that the variant's ``tied`` names."""
    source, *targets = map(_innermost, (first, *others))
    for name in getattr(source, "tied", ()):
        for target in targets:
            setattr(target, name, getattr(source, name))


def seeds(seed: int, count: int) -> list[int]:
    """``count`` seeds made from one."""
    # Not from torch, which has no random numbers to give while shapes are only being traced.
    source = random.Random(seed)
    return [source.getrandbits(31) for _ in range(count)]
