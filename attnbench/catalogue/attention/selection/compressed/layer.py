"""A base of layers with heads that read one head of keys, values too: queries, tokens, and the way back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.decoding.ring import Ring
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.rotation import angles, rotate
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported, UsageError

ROWS = 64
"""Fewest queries of a tile."""
EPS = 1e-6


class CompressedState(NamedTuple):
    """The state of decoding."""

    window: Ring
    """The last tokens, as keys that are values too; the ring's values have no width."""
    pending: Tensor
    """``(B, slots, ·)``, parts of entries, slots for one or two runs; token j is in slot j mod slots."""
    entries: Cache
    """One for every closed run; the cache's values are the keys of an index, if there is one."""
    run: int

    @property
    def overwrites(self) -> tuple[str, ...]:
        return ("pending",)

    def unused(self) -> tuple[Tensor, ...]:
        """The slots of tokens still to come in the open run, and before the first run is closed all others."""
        t, run = self.window.length, self.run
        open_ = t // run * run % self.pending.shape[1]
        free = self.pending[:, open_ + t % run : open_ + run]
        return (free, self.pending[:, run:]) if t < run else (free,)


class CompressedLayer(nn.Module):
    """Maps of x ``(B, N, C)`` to queries and tokens, and of the heads' readings to the output.

    Args:
        shape: H heads of queries, which read one head of width D.
        name: of the variant, for errors.
        window: nearest tokens that are seen one by one.
        q_rank: width of the queries' latent; None: 2·D, at most C.
        rope_dim: channels that are turned; None: D/8.

    Raises:
        UsageError: ``rope_dim`` is odd, or more than D.
        Unsupported: D is 1, and rotary positions turn pairs.
    """

    def __init__(self, shape: Shape, name: str, window: int, q_rank: int | None, rope_dim: int | None) -> None:
        super().__init__()
        C, D = shape.C, shape.D
        if D < 2:
            raise Unsupported("rotary positions turn pairs of channels, and head_dim is 1")
        self.H, self.D, self.P = shape.H, D, rope_dim or max(2, D // 16 * 2)
        if self.P % 2 or self.P > D:
            raise UsageError(f"{name}: option rope_dim={self.P} must be even and at most head_dim, {D}")
        self.causal, self.room, self.window = shape.causal, shape.N, window
        rank = q_rank or min(2 * D, C)
        self.q_down = nn.Linear(C, rank, bias=False)
        self.q_norm = nn.RMSNorm(rank, eps=EPS)
        self.q_up = nn.Linear(rank, C, bias=False)
        self.kv = nn.Linear(C, D, bias=False)
        self.kv_norm = nn.RMSNorm(D, eps=EPS)
        self.sink = nn.Parameter(torch.zeros(shape.H))
        self.out = nn.Linear(C, C, bias=False)

    def _latent(self, x: Tensor) -> Tensor:
        """The queries' latent ``(B, n, q_rank)``, in the accumulator: its norm and that of the queries multiply the
        gradient at a token of zeros by 1 / EPS together, which is beyond float16."""
        dtype = accumulator(x.dtype)
        latent = linear(x.to(dtype), self.q_down.weight.to(dtype))
        return rms_norm(latent, latent.shape[2:], self.q_norm.weight.to(dtype), EPS)

    def _queries(self, latent: Tensor, first: int) -> Tensor:
        q = torch.unflatten(self.q_up(latent.to(self.q_up.weight.dtype)), 2, (self.H, self.D)).transpose(1, 2)
        return self._turned(rms_norm(q, (self.D,), eps=EPS), first)

    def _tokens(self, x: Tensor, first: int) -> Tensor:
        """Keys that are values too, ``(B, n, D)``."""
        return self._turned(self.kv_norm(self.kv(x))[:, None], first)[:, 0]

    def _turned(self, x: Tensor, first: int, step: int = 1) -> Tensor:
        """x ``(B, H, n, D)``, the last channels turned by the places ``first``, ``first`` + ``step``, and so on."""
        kept, moved = torch.split(x, [self.D - self.P, self.P], -1)
        cos, sin = (part[::step] for part in angles(first, step * x.shape[2], moved))
        return torch.cat([kept, rotate(moved, cos, sin).to(x.dtype)], -1)

    def _seen_near(self, rows: slice, near: slice, device: torch.device) -> Tensor:
        """The pairs of queries and tokens seen one by one, ``(rows, tokens)`` bool."""
        i, j = (torch.arange(part.start, part.stop, device=device) for part in (rows, near))
        distance = i[:, None] - j
        seen = distance.abs() < self.window
        return seen & (distance >= 0) if self.causal else seen

    def _near(self, rows: slice, N: int) -> slice:
        return slice(
            max(0, rows.start - self.window + 1), rows.stop if self.causal else min(N, rows.stop + self.window - 1)
        )

    def _joined(self, y: Tensor, first: int) -> Tensor:
        """The output of all heads ``(B, H, n, D)``, turned back by the places of the queries."""
        kept, moved = torch.split(y, [self.D - self.P, self.P], -1)
        cos, sin = angles(first, y.shape[2], moved)
        back = torch.cat([kept, rotate(moved, cos, -sin).to(y.dtype)], -1)
        out: Tensor = self.out(back.transpose(1, 2).flatten(2).to(self.out.weight.dtype))
        return out


def normed(y: Tensor) -> Tensor:
    """y over its root mean square, for dense forms."""
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()


def turned_by_formula(y: Tensor, places: Tensor, P: int) -> Tensor:
    """y ``(B, n, D)``, its last P channels turned in complex numbers, for dense forms."""
    D = y.shape[-1]
    angle = places[:, None] * 10000.0 ** (-torch.arange(0, P, 2, device=y.device, dtype=y.dtype) / P)
    pairs = torch.complex(y[..., D - P : D - P // 2], y[..., D - P // 2 :])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([y[..., : D - P], pairs.real, pairs.imag], -1)
