"""PyTorch's own fused attention, as thin as it can be wrapped."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from attnbench.catalogue.engines.decoding.kv_cache import CachedDecoding, Unequal, last_row
from attnbench.catalogue.engines.decoding.pages import Paged
from attnbench.catalogue.engines.fused_softmax import EXTRA
from attnbench.catalogue.engines.masks import seeing
from attnbench.catalogue.engines.tiling import row_blocks
from attnbench.contract.problem.position_bias import PositionBias, position_bias
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible, masked
from attnbench.contract.variant import EXACT, register
from attnbench.errors import Unsupported

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

_ROWS = 512
"""Queries in a call with a mask of places: half of the work for a window of as many keys is in vain."""


@register(
    "sdpa",
    family="exact",
    source="PyTorch scaled_dot_product_attention; Dao et al. 2022, arXiv:2205.14135, algorithms 2 and 4",
    formula="O = softmax(Q·Kᵀ/√D)·V",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(
        EXACT,
        baseline="one call of scaled_dot_product_attention, which with padding gets a boolean mask and not is_causal",
    ),
    settings=("", "backend=math", "page=4"),
)
class Sdpa(CachedDecoding, nn.Module):
    """PyTorch's fused softmax attention (FlashAttention and its kin).

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. Memory is O(n) in the fused
    kernels and O(n²) in ``math``. With ``auto`` PyTorch chooses; the results name what ran. On a CPU no fused kernel
    takes values of another width than keys.

    A key mask becomes PyTorch's boolean mask, ``(B, 1, 1, M)``. PyTorch refuses one together with ``is_causal``: it
    wants all pairs written out, ``(B, 1, N, M)``, which costs O(n²) memory; flash on a GPU takes no mask at all. A bias
    of the positions costs as much, and a CPU trains a learned one only in ``math``. A query that sees no key gives 0 on
    a CPU, and on a GPU what PyTorch's kernel makes of it.

    Where heads share keys and values, a GPU is told so by ``enable_gqa``. Elsewhere that repeats keys and values in
    memory: a call without causality gets the queries of such heads as one sequence instead, and a causal one answers
    them one head after another.

    PyTorch has no masks of places but the whole N × M one, all of whose pairs are computed. Here documents get a call
    each. With any other mask, and for queries that start behind the first key, as those of a step of several tokens do,
    512 queries at a time get a call with the keys that some of them sees, and a mask of these pairs where not all of
    them see all. On a GPU that is not PyTorch's fastest kernel, which takes no mask.

    Nor does PyTorch have a sink. Here it is a first key with a value of 0, whose logit comes of 8 more columns; if
    causal, a query that is not asked for stands before the others, so that all of them see it. A decoding step with a
    sink is made of plain products.

    With ``page`` decoding keeps keys and values as a server does (Kwon et al. 2023, arXiv:2309.06180): in pages of so
    many tokens out of a pool ``(P, K, page, D)``, which lie in no order, with a table of those of each sequence. A step
    gathers them first, by one copy of keys and values: PyTorch's ``varlen_attn`` takes a ``block_table``, but only with
    FlashAttention-3, which PyTorch does not bring. If the sequences of a batch have unequal lengths (``padding``), the
    longest gives the size, and a boolean mask hides what lies behind the others' ends. Forward, nothing changes.

    Differs from PyTorch's own call: without a bias, a mask of places or a sink in nothing. As there, what padded tokens
    hold must be finite: a weight of 0 makes NaN of NaN.

    Raises:
        Unsupported: in ``forward``, the chosen ``backend`` cannot run on this device, dtype or shape; nothing else
            runs in its place.
    """

    at_once = unequal = True

    def __init__(
        self,
        shape: Shape,
        *,
        backend: Annotated[
            Literal["auto", "math", "flash", "efficient", "cudnn"],
            Field(description="the kernel that must run; auto: PyTorch chooses"),
        ] = "auto",
        page: Annotated[
            int, Field(ge=0, description="tokens in a page of the cache that decoding keeps; 0: no pages")
        ] = 0,
    ) -> None:
        super().__init__()
        self.causal, self.capacity, self.visible = shape.causal, shape.M, masked(shape)
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)
        self.backend, self.page = backend, page

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if self.visible is None:
            return self._whole(q, k, v, key_mask)
        if self.visible.mask.kind != "document" or self.visible.start:
            return self._by_rows(self.visible, q, k, v, key_mask)
        outputs, start = [], 0
        while start < q.shape[2]:
            one = slice(*self.visible.mask.span(start, q.shape[2], causal=False))
            its_mask = None if key_mask is None else key_mask[:, one]
            outputs.append(self._whole(q[:, :, one], k[:, :, one], v[:, :, one], its_mask))
            start = one.stop
        return torch.cat(outputs, 2)

    def _by_rows(self, visible: Visible, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        N, M = q.shape[2], k.shape[2]
        some = None if key_mask is None else visible.seeing(key_mask, N)
        outputs = []
        for queries in row_blocks(N, _ROWS):
            keys, every = visible.seen_by_some(queries, M), visible.seen_by_all(queries, M)
            seen = None if keys == every else visible.pairs(queries, keys, M, q.device)[None, None]
            if key_mask is not None and some is not None:
                real = key_mask[:, None, None, keys]
                # Queries without a key see all of them instead, so that no kernel meets an empty row and makes NaN.
                seen = (real if seen is None else real & seen) | ~some[:, :, queries]
            if self.position_bias is not None:
                places = slice(visible.start + queries.start, visible.start + queries.stop)
                added = self.position_bias(places, keys, q.dtype)[None]
                seen = added if seen is None else added.masked_fill(~seen, -torch.inf)
            outputs.append(self._attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], seen, causal=False))
        output = torch.cat(outputs, 2)
        return output if some is None else output.masked_fill(~some, 0)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if self.position_bias is not None:
            return self._with_bias(self.position_bias, q, k, v, key_mask)
        if key_mask is None:
            return self._attend(q, k, v, causal=self.causal)
        seen = key_mask[:, None, None]
        if self.causal:
            seen = seen & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return self._attend(q, k, v, seen, causal=False)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """A cache of keys and values, in pages if ``page`` says so."""
        return Paged.of(k, v, self.capacity, self.page) if self.page else super().begin(q, k, v)

    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        rows = q.shape[2]
        if self.sink is not None and rows <= _ROWS:
            return super().step(state, q, k, v)  # not a copy of the cache for a key more
        state = state.append(k, v)
        if isinstance(state, Unequal):
            return self._attend(q, state.cache.keys, state.cache.values, state.seen(rows), causal=False), state
        if rows > 1:
            visible = replace(self.visible or Visible(causal=True), start=state.length - rows)
            return self._by_rows(visible, q, state.keys, state.values, None), state
        # PyTorch aligns is_causal at the first key, which would then be the only one that a lone query sees.
        row = None if self.position_bias is None else last_row(self.position_bias, state.length, q.dtype)[None]
        first = self.first_seen(state)
        if first:
            row = None if row is None else row[..., first:]
            return self._attend(q, state.keys[:, :, first:], state.values[:, :, first:], row, causal=False), state
        return self._attend(q, state.keys, state.values, row, causal=False), state

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, page: int = 0, **_: object) -> int:
        """A token's key and value in each head, and its part of a number in the table of its pages."""
        return shape.K * (shape.D + shape.E) * width + (-(-8 // page) if page else 0)

    def _with_bias(self, bias: PositionBias, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """PyTorch's only way: bias and all masks in one tensor of H x N x M numbers."""
        N, M = q.shape[2], k.shape[2]
        added = bias(slice(0, N), slice(0, M), q.dtype)[None]
        hidden = torch.ones(N, M, dtype=torch.bool, device=q.device).triu(1) if self.causal else None
        seen = None
        if key_mask is not None:
            seen = seeing(key_mask, self.causal)
            padded = ~key_mask[:, None, None]
            # Queries without a key see all of them instead, so that no kernel meets an empty row and makes NaN of it.
            hidden = (padded if hidden is None else padded | hidden) & seen
        if hidden is not None:
            below = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
            added = added.add_(below) if seen is None else added + below
        output = self._attend(q, k, v, added, causal=False)
        return output if seen is None else output.masked_fill(~seen, 0)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool) -> Tensor:
        """The mask is ``(1 or B, 1 or H, 1 or N, M)``."""
        if self.sink is None:
            return self._unsunk(q, k, v, mask, causal=causal)
        (D, E), scale = (q.shape[3], v.shape[3]), q.shape[3] ** -0.5
        columns = self.sink.logit.to(q.dtype)[:, None, None] / scale
        q = torch.cat((q, columns.expand(*q.shape[:3], 1), q.new_zeros(*q.shape[:3], EXTRA - 1)), -1)
        first = torch.zeros_like(k[:, :, :1])
        k = torch.cat((pad(first, (0, EXTRA)), pad(k, (0, EXTRA))), 2)
        k[:, :, 0, D] = 1
        v = pad(v, (0, EXTRA if E == D else 0, 1, 0))
        if mask is not None:
            mask = pad(mask, (1, 0), value=mask.dtype == torch.bool)
        if causal:
            q = pad(q, (0, 0, 1, 0))
        return self._unsunk(q, k, v, mask, causal=causal, scale=scale)[:, :, int(causal) :, :E]

    def _unsunk(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None = None
    ) -> Tensor:
        (B, H, N, D), K = q.shape, k.shape[1]
        if H == K or q.is_cuda:
            return self._fused(q, k, v, mask, causal=causal, scale=scale)
        if not causal and (mask is None or mask.shape[1] == mask.shape[2] == 1):
            rows = q.reshape(B, K, -1, D)
            return self._fused(rows, k, v, mask, causal=False, scale=scale).reshape(B, H, N, -1)
        of_group = torch.unflatten(q, 1, (K, -1)).unbind(2)
        masks = (mask,) * len(of_group)
        if mask is not None and mask.shape[1] == H:
            masks = torch.unflatten(mask, 1, (K, -1)).unbind(2)
        parts = [
            self._fused(one, k, v, its, causal=causal, scale=scale) for one, its in zip(of_group, masks, strict=True)
        ]
        return torch.stack(parts, 2).flatten(1, 2)

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
    ) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        if self.backend == "auto":
            return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=shared)
        # PyTorch says in warnings why a kernel cannot run.
        with warnings.catch_warnings(record=True) as told, sdpa_kernel(BACKENDS[self.backend]):
            warnings.simplefilter("always")
            try:
                return scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=shared)
            except RuntimeError as error:
                if "No viable backend" not in str(error) and "No available kernel" not in str(error):
                    raise
        why = "; ".join(str(warning.message).partition(" (Triggered")[0] for warning in told)
        raise Unsupported(
            f"backend {self.backend} cannot run {str(q.dtype).removeprefix('torch.')} on {q.device.type}"
            + (f": {why}" if why else "")
        )
