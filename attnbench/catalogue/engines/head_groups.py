"""Groups of heads of one layer, each with a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract.problem.position_bias import PositionBias


class HeadGroups(nn.Module):
    """Run ``parts[i]`` on the next ``heads[i]`` heads, one after another, and join the outputs along the heads.

    Parts without heads must not be given.
    """

    def __init__(self, parts: Sequence[nn.Module], heads: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.heads = list(heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.joined(lambda part, *x: part(*x, key_mask=key_mask), q, k, v)

    def joined(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        out = [run(part, *x) for part, x in self.split(*inputs)]
        return out[0] if len(out) == 1 else torch.cat(out, 1)

    def split(self, *inputs: Tensor) -> list[tuple[Any, tuple[Tensor, ...]]]:
        slices = zip(*(torch.split(x, self.heads, 1) for x in inputs), strict=True)
        return list(zip(self.parts, slices, strict=True))

    def share(self, bias: PositionBias) -> None:
        """Give each part, and the groups within it, the bias rows of its heads."""
        first = 0
        for part, heads in zip(self.parts, self.heads, strict=True):
            part.position_bias = bias.of_heads(slice(first, first + heads))
            groups = getattr(part, "groups", None)
            if isinstance(groups, HeadGroups):
                groups.share(part.position_bias)
            first += heads

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return tuple(part.begin(*x) for part, x in self.split(q, k, v))

    def step(self, state: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        steps = [part.step(old, *x) for old, (part, x) in zip(state, self.split(q, k, v), strict=True)]
        return torch.cat([out for out, _ in steps], 1), tuple(new for _, new in steps)
