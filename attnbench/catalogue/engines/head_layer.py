"""A layer of heads between a projection to queries, keys and values, and one of all heads together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.linear.maps import Map
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways


class HeadLayer(nn.Module):
    """A subclass makes both projections, in the order in which it draws its weights."""

    heads: int
    qkv: nn.Linear
    out: Map

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values and the further outputs of ``qkv`` for x ``(B, n, C)``: ``(B, H, n, D)`` each."""
        B, n, C = x.shape
        if n > 1 and forms.on_device(x):  # a kernel would copy the parts of one product
            each = (linear(x, weight) for weight in torch.split(self.qkv.weight, C))
            return tuple(torch.unflatten(y, 2, (self.heads, -1)).transpose(1, 2) for y in each)
        parts = self.qkv(x).view(B, n, self.qkv.out_features // C, self.heads, C // self.heads)
        return tuple(parts.permute(2, 0, 3, 1, 4).unbind())

    def joined(self, y: Tensor) -> Tensor:
        """The output ``(B, n, C)`` from the heads' ``(B, H, n, D)``."""
        return self.out(y.transpose(1, 2).flatten(2))


class CoreLayer(HeadLayer):
    """A layer around its ``core``, the operator that reads gates; a subclass makes what the core reads."""

    core: Any

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and gates ``(B, H, n, ·)`` of x ``(B, n, C)``."""
        raise NotImplementedError

    def finished(self, y: Tensor) -> Tensor:
        """The output of what the heads give ``(B, n, C)``."""
        return self.out(y)

    def begin(self, x: Tensor) -> Any:
        return self.core.begin(*self._parts(x))

    def step(self, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        y, state = self.core.step(state, *self._parts(x))
        return self.finished(y.transpose(1, 2).flatten(2).to(x.dtype)), state


class LayerFromEitherEnd(CoreLayer):
    """A layer whose core is a :class:`~attnbench.catalogue.engines.recurrent.real_tokens.FromEitherEnd`.

    A subclass makes what the core reads, and perhaps more of the output than a projection, with other code as well, for
    :meth:`dense`.
    """

    causal: bool

    def plainly(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v and gates ``(n, H, ·)`` of x ``(n, C)``."""
        raise NotImplementedError

    def plainly_finished(self, y: Tensor) -> Tensor:
        return self.out(y)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        """The formula of the operator within, between projections."""

        def read(side: Tensor, _: int) -> Tensor:
            y: Tensor = self.core.written_out(*(part.transpose(0, 1)[None] for part in self.plainly(side)))[0]
            return y.transpose(0, 1).flatten(1)

        return self.plainly_finished(both_ways(read, x, None, causal=self.causal))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self.finished(both_ways(self._run, x, key_mask, causal=self.causal).to(x.dtype))

    def _run(self, x: Tensor, _: int) -> Tensor:
        y: Tensor = self.core.one_way(*self._parts(x))
        return y.transpose(1, 2).flatten(2)
