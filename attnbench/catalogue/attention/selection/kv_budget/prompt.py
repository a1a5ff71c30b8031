"""Softmax attention that answers a prompt exactly, and lets later queries read a part of the prompt's keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.catalogue.engines.tiling import budget, row_blocks
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Scalar
from attnbench.contract.traits import No, Traits
from attnbench.errors import UsageError

Budget = Annotated[
    int | None, Field(ge=1, description="tokens of the prompt that are kept; none: 256, or what ratio leaves")
]
Ratio = Annotated[float | None, Field(ge=0, lt=1, description="share of the prompt that is dropped, instead of budget")]
Prompt = Annotated[
    int | None, Field(ge=1, description="tokens of the prompt; none: the whole sequence, or what begin is given")
]

_DEFAULT = 256
_OPEN_END = "without prompt=, a whole sequence is a prompt, and none of its tokens follows the eviction"

OF_ALL = Traits(
    decode=True,
    bias=No("keys are chosen by logits without a bias"),
    shares="by itself",
    permutable=True,
    exact_with=("prompt=5,budget={n}", "prompt=9,ratio=0.0"),
)
"""The claims of all. A sequence without a prompt is answered exactly, so that its order does not matter."""


class AfterPrompt(nn.Module):
    """Softmax attention, where queries from ``prompt`` on read part of the keys before it.

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. Without causality nothing follows
    anything, and all are answered exactly.

    Raises:
        UsageError: ``budget`` and ``ratio`` are both given.
    """

    def __init__(self, shape: Shape, *, budget: Budget = None, ratio: Ratio = None, prompt: Prompt = None) -> None:
        super().__init__()
        if budget is not None and ratio is not None:
            raise UsageError("budget and ratio both say how many tokens are kept; remove one of them")
        self.causal, self.capacity = shape.causal, shape.M
        self.budget, self.ratio, self.prompt = budget, ratio, prompt

    def tokens_kept(self, prompt: int) -> int:
        if self.ratio is not None:
            return prompt - int(self.ratio * prompt)
        return min(prompt, self.budget or _DEFAULT)

    @classmethod
    def claims(cls, traits: Traits, options: Mapping[str, Scalar]) -> Traits:
        """Steps agree with the whole sequence if the prompt's end is given."""
        return traits if options.get("prompt") is not None else replace(traits, decode=No(_OPEN_END))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        N = q.shape[2]
        if not self.causal or self.prompt is None or self.prompt >= N:
            return self._exact(q, k, v, key_mask=key_mask)
        prompt = self.prompt
        first = self._exact(
            *(x[:, :, :prompt] for x in (q, k, v)), key_mask=None if key_mask is None else key_mask[:, :prompt]
        )
        return torch.cat((first, self.continued(q, k, v, prompt, key_mask)), 2)

    def _exact(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None) -> Tensor:
        if key_mask is None:
            return attend(q, k, v, causal=self.causal)
        real = key_mask[:, None, None]

        def seen(queries: slice) -> Tensor:
            return real & earlier(queries, k.shape[2], q.device) if self.causal else real

        return attend_where(q, k, v, seen)

    @abstractmethod
    def continued(self, q: Tensor, k: Tensor, v: Tensor, prompt: int, key_mask: Tensor | None) -> Tensor:
        """The outputs ``(B, H, N - prompt, E)`` of the queries behind the prompt; arguments as of ``forward``."""

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        pairs = visible_pairs(q, k, self.causal, key_mask).expand(-1, q.shape[1], -1, -1).clone()
        if self.causal and self.prompt is not None and self.prompt < q.shape[2]:
            read = self.read(q.detach(), k.detach(), v.detach(), key_mask)
            pairs[:, :, self.prompt :] &= of_query_heads(read, q.shape[1])
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        return masked_attention(q, k, v, pairs)

    @abstractmethod
    def read(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """By the formula, the pairs ``(B, K, N - prompt, N)`` that the queries behind the prompt read.

        It need not look at causality and padding.
        """


def earlier(queries: slice, keys: int, device: torch.device) -> Tensor:
    """A mask ``(1, 1, n, m)`` of the pairs whose query comes no earlier than the key."""
    places = torch.arange(queries.start, queries.stop, device=device)
    return (torch.arange(keys, device=device) <= places[:, None])[None, None]


_ROWS = 512
"""Queries in a call with a mask."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """Softmax attention of q ``(B, H, n, D)`` to k ``(B, K, m, D)`` and v ``(B, K, m, E)``, which are not repeated.

    ``mask`` is ``(1 or B, 1 or K, n, m)`` bool, True if a query sees a key; each query must see one.
    """
    (B, H, n, D), K = q.shape, k.shape[1]
    if H == K:
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    if n == 1 or (mask is None and not causal):
        return scaled_dot_product_attention(q.reshape(B, K, -1, D), k, v, mask).reshape(B, H, n, -1)
    if q.is_cuda:
        if mask is not None and mask.shape[1] == K > 1:
            mask = mask.repeat_interleave(H // K, 1)
        return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)
    # On a CPU torch would repeat keys and values in memory.
    of_group = torch.unflatten(q, 1, (K, -1)).unbind(2)
    return torch.stack([attend(one, k, v, mask, causal=causal) for one in of_group], 2).flatten(1, 2)


def attend_where(q: Tensor, k: Tensor, v: Tensor, seen: Callable[[slice], Tensor]) -> Tensor:
    """:func:`attend`, some queries after the other; a query that sees no key gives 0.

    ``seen`` maps a range of n queries to the keys that they see, ``(1 or B, 1 or K, n, m)`` bool.
    """
    outputs = []
    for queries in row_blocks(q.shape[2], _ROWS):
        mask = seen(queries)
        some = mask.any(-1, keepdim=True)
        # Queries without a key see all of them instead, so that no kernel meets an empty row and makes NaN of it.
        out = attend(q[:, :, queries], k, v, mask | ~some)
        if some.shape[1] > 1:
            some = some.repeat_interleave(q.shape[1] // k.shape[1], 1)
        outputs.append(out.masked_fill(~some, 0))
    return torch.cat(outputs, 2)


def received(q: Tensor, k: Tensor, real: Tensor | None) -> Tensor:
    """The sum over queries of the probability that each gives a key, ``(B, K, G, P)``, in float32 at least.

    Args:
        q: ``(B, H, m, D)``, the queries of the last m of P tokens; padded ones give nothing.
        k: ``(B, K, P, D)``. Head h of the queries reads head h // G, G = H / K.
        real: ``(B, P)`` bool, True for a real token.

    Memory is O(P), a few rows of probabilities at a time.
    """
    (B, H, m, D), (K, P) = q.shape, k.shape[1:3]
    dtype = accumulator(q.dtype)
    rows, keys = torch.unflatten(q.to(dtype) * D**-0.5, 1, (K, -1)), k.to(dtype)
    total = keys.new_zeros(B, K, H // K, P)
    for some in row_blocks(m, max(1, budget("kv_budget.received", q.device) // max(1, B * H * P))):
        stop = P - m + some.stop
        logits = torch.matmul(rows[:, :, :, some].flatten(2, 3), keys[:, :, :stop].mT)
        logits = torch.unflatten(logits, 2, (H // K, -1))
        places = torch.arange(P - m + some.start, stop, device=q.device)
        later = torch.arange(stop, device=q.device) > places[:, None]
        if real is not None:
            later = later | ~real[:, None, None, None, :stop]
        weights = logits.masked_fill_(later, hidden(dtype)).softmax(-1)
        if real is not None:
            weights = weights * real[:, None, None, places, None]
        total[..., :stop] += weights.sum(-2)
    return total


def probabilities(q: Tensor, k: Tensor, key_mask: Tensor | None) -> Tensor:
    """All probabilities of a prompt, ``(B, K, G, P, P)``, with rows of 0 for padded queries: for dense forms."""
    logits = torch.einsum("bkgid,bkjd->bkgij", torch.unflatten(q, 1, (k.shape[1], -1)), k) * q.shape[3] ** -0.5
    pairs = visible_pairs(q, k, True, key_mask)[:, :, None]
    weights: Tensor = logits.masked_fill(~pairs, torch.finfo(logits.dtype).min).softmax(-1) * pairs
    if key_mask is not None:
        weights = weights * key_mask[:, None, None, :, None]
    return weights
