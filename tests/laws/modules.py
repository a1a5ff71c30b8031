"""Modules whose names promise what they do not do, as articles show them; and some that keep their promise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract.problem.shape import Shape
from attnbench.models.encoder import as_layer


class AttentionLSTM(nn.Module):
    """An encoder and a decoder "with attention": its weights are a softmax over one number, which is 1."""

    def __init__(self, vocab: int = 30, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.encoder = nn.LSTM(dim, dim, batch_first=True)
        self.score = nn.Linear(dim, 1)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.encoder(self.embedding(tokens))
        weights = self.score(states).softmax(-1)
        return self.out(weights * states)


class LookingBackLSTM(nn.Module):
    """The same with weights over the tokens."""

    def __init__(self, vocab: int = 30, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.encoder = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.encoder(self.embedding(tokens))
        n = tokens.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = (states @ states.mT).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out(weights @ states)


class PerformerLM(nn.Module):
    """A "Performer" that is an ordinary causal Transformer, with a table of 64 positions."""

    def __init__(self, vocab: int = 30, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        n = tokens.shape[1]
        x = self.embedding(tokens) + self.positions(torch.arange(n))
        return self.out(self.blocks(x, mask=nn.Transformer.generate_square_subsequent_mask(n).to(x), is_causal=True))


class LinformerAttention(nn.Module):
    """A "Linformer" that has projections E and F, and then calls standard multi-head attention of all keys."""

    def __init__(self, dim: int = 16, heads: int = 2, rank: int = 8, length: int = 512) -> None:
        super().__init__()
        self.E, self.F = nn.Linear(length, rank), nn.Linear(length, rank)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out: tuple[Tensor, Tensor | None] = self.attention(x, x, x)
        return out


def layer(variant: str, causal: bool = False) -> Callable[[], nn.Module]:
    """A layer around a variant of the catalogue, of 2 heads of width 8, for 512 tokens at most."""
    return lambda: as_layer(variant, Shape(1, 2, 512, 8, causal=causal))


linear_layer = layer("linear", causal=True)
gla_layer = layer("gla", causal=True)
local_layer = layer("local:window=3", causal=True)
performer_layer = layer("performer:features=16")
softmax_layer = layer("softmax")
chunked_layer = layer("chunked")
identity_layer = layer("identity")


class Pooled(nn.Module):
    """One answer for the whole sequence, by one row of weights."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(dim, 1), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        weights = self.score(x)[..., 0].softmax(-1)
        return {"logits": self.out((weights[..., None] * x).sum(1))}


class CausalAttention(nn.Module):
    """Hides the tokens before it in place of those after it, unless told otherwise."""

    def __init__(self, dim: int = 16, past: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.past = nn.Linear(dim, dim), nn.Linear(dim, dim), past

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        y: Tensor = scores.masked_fill(~(seen.tril() if self.past else seen.triu()), -torch.inf).softmax(-1) @ x
        return y


class InPlace(nn.Module):
    """Weights without a softmax, of all pairs, by a product that writes into memory that is there."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights = x.new_zeros(*x.shape[:2], x.shape[1]).baddbmm_(x, x.mT)
        return self.out(weights.relu_() @ x / x.shape[1])  # type: ignore[no-any-return]


class Efficient(nn.Module):
    """Linear attention whose features are softmax: of queries over the width, of keys over the tokens."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y: Tensor = q.softmax(-1) @ (k.softmax(-2).mT @ v)
        return y


class SlidingWindow(nn.Module):
    """Attention to ``near`` tokens on both sides, of all pairs, most of which a mask hides, or of these keys alone."""

    def __init__(self, dim: int = 16, near: int = 3, masked: bool = False) -> None:
        super().__init__()
        self.qkv, self.near, self.masked = nn.Linear(dim, 3 * dim), near, masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.masked:
            i = torch.arange(x.shape[1])
            far = (i[:, None] - i).abs() > self.near
            hidden: Tensor = (q @ k.mT).masked_fill(far, -torch.inf).softmax(-1) @ v
            return hidden
        k, v = (nn.functional.pad(one, (0, 0, self.near, self.near)).unfold(1, 2 * self.near + 1, 1) for one in (k, v))
        return torch.einsum("bnw,bndw->bnd", torch.einsum("bnd,bndw->bnw", q, k).softmax(-1).clone(), v)


class Dropping(nn.Module):
    """Softmax attention, or a layer of each token alone, that drops numbers in eval mode as well."""

    def __init__(self, dim: int = 16, alone: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.alone = nn.Linear(dim, dim), nn.Linear(dim, dim), alone

    def forward(self, x: Tensor) -> Tensor:
        if self.alone:
            return nn.functional.dropout(self.q(x), 0.1)
        weights = nn.functional.dropout((self.q(x) @ self.k(x).mT).softmax(-1), 0.1)
        y: Tensor = weights @ x
        return y


class Guessing(nn.Module):
    """Has random numbers that no seed of torch reaches."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * random.random()
        return y


class Crossed(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * memory
        return y


class LanguageModel(nn.Module):
    """A GRU whose output is a softmax over few words: no weights of keys."""

    def __init__(self, vocab: int = 30, dim: int = 16) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.gru = nn.GRU(dim, dim, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.out(self.gru(self.embedding(tokens))[0]).softmax(-1)
        return y


class Dead(nn.Module):
    """Half of what it has does nothing."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.used, self.unused, self.cancelled = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y + 0 * self.cancelled


class Single(nn.Module):
    """Makes float32 of whatever it is given."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.float())
        return y


class Needs(nn.Module):
    def __init__(self, dim: int, *, heads: int) -> None:
        super().__init__()


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).sum()


def not_a_module() -> int:
    return 3


class SequenceFirst(nn.Module):
    """Takes (n, batch, width), as torch's recurrent layers do unless told otherwise."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y
