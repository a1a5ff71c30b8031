"""PyTorch's compiler of attention kernels."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attnbench.catalogue.attention.exact.flex.window_mask import PlacePattern, Places, WindowPattern
from attnbench.catalogue.engines import masks
from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding
from attnbench.catalogue.engines.flex.block_mask import BLOCK
from attnbench.catalogue.engines.flex.flex_attention import DTYPES, FlexKernel, added_by_distance, added_to_key, sink_at
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.tiling import learned
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import exact_attention, masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.sink import sink_of
from attnbench.contract.problem.visible import Visible, masked
from attnbench.contract.variant import EXACT, No, register
from attnbench.errors import Unsupported, UsageError

_NO_STEP = "with a window it has whole sequences only; local decodes and keeps no more than the window"
_SAME_PLACES = "the window needs queries and keys at the same positions"
_OWN_MASK = "its window is a mask already; remove the window"

_FORWARD_ONLY: dict[str, Any] = (
    {"compute_q_blocks": False} if "compute_q_blocks" in inspect.signature(BlockMask.from_kv_blocks).parameters else {}
)
"""Leave out the parts of a block mask for gradients: making them takes longer than a decoding step."""


@register(
    "flex",
    family="exact",
    source="PyTorch flex_attention; Dong et al. 2024, arXiv:2412.05496, section 3",
    formula="O = softmax(Q·Kᵀ/√D)·V, over the window {j : |i - j| <= w} ∪ {0 … g - 1} if one is given",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(
        EXACT,
        dtypes=DTYPES,
        compiled=True,
        baseline="one call of flex_attention, compiled, with a block mask, and with padding a function of the key",
        given=(
            (
                "window",
                {
                    "exact": False,
                    "permutable": False,
                    "cross": No(_SAME_PLACES),
                    "decode": No(_NO_STEP),
                    "mask": No(_OWN_MASK),
                    "documents": No(_OWN_MASK),
                    "q_start": No(_OWN_MASK),
                },
            ),
        ),
    ),
)
class Flex(CachedDecoding, nn.Module):
    """PyTorch's FlexAttention: one kernel compiled for the shape.

    q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` -> ``(B, H, N, E)``. Causality is a block mask: blocks
    of 128 × 128 above the diagonal are skipped, and those below it are computed without a mask. A key mask and a bias
    are functions of a pair, compiled into the kernel; a key mask is asked in every block that is computed. Memory is
    O(n). A query that sees no key gives 0; what padded tokens hold must be finite. A decoding step reads only the
    blocks of the cache that are filled.

    A sink is one more key behind the others, with a value of 0, whose logit is a function of its place: code for a CPU
    gives no sums of exponentials from which its share could be taken. In a cache it is the first key.

    With ``window`` w, token i sees i - w .. i + w, as in ``local``. With ``global_tokens`` g as well, the first g
    tokens see every token and are seen by all, as in ``longformer``. If causal, token i sees only those of these tokens
    up to i. Blocks without a pair that is seen are skipped.

    It is compiled at the first call for each shape and type, which takes seconds to a minute. The sizes are constants,
    which is faster than one kernel for all sizes. Only compiled code ever runs.

    Differs from the paper: the blocks to compute are listed from the lengths, not found by asking the mask about every
    pair, which takes O(n²) memory.

    Raises:
        Unsupported: float64 or gradients on a CPU, which PyTorch does not compile there, or no C++ compiler; a window
            with M != N or in decoding.
        UsageError: ``global_tokens`` without ``window``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        window: Annotated[
            int | None, Field(ge=1, description="tokens seen on each side; causal: before; none: all")
        ] = None,
        global_tokens: Annotated[int, Field(ge=0, description="first tokens that are global beside a window")] = 0,
    ) -> None:
        super().__init__()
        if window is None and global_tokens:
            raise UsageError("flex: global_tokens stand beside a window; give window as well")
        if window is not None and shape.cross:
            raise Unsupported(_SAME_PLACES)
        if window is not None and masked(shape) is not None:
            raise Unsupported(_OWN_MASK)
        self.causal, self.capacity = shape.causal, shape.M
        self.windows = None if window is None else WindowPattern(window, global_tokens, shape.causal)
        self.visible = Visible.of(shape) if window is None else None
        self.pattern: PlacePattern = self.windows or Places(Visible.of(shape))
        self.position_bias, self.sink = position_bias(shape), sink_of(shape)
        self.kernel = FlexKernel()

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (N, M), windows = (q.shape[2], k.shape[2]), self.windows
        sink = None if self.sink is None else self.sink.logit
        if self.visible is not None:
            bias, seen = self.position_bias, self.visible
            return exact_attention(q, k, v, causal=seen, key_mask=key_mask, bias=bias, sink=sink).to(q.dtype)
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        allowed = masks.visible_pairs(q, k, self.causal, key_mask)
        if windows is not None:
            i, j = torch.arange(N, device=q.device)[:, None], torch.arange(M, device=q.device)
            special = (i < windows.global_tokens) | (j < windows.global_tokens)
            allowed = allowed & (((i - j).abs() <= windows.window) | special)
        bias = self.position_bias
        added = None if bias is None else bias(slice(0, N), slice(0, M), q.dtype)
        return masked_attention(q, k, v, allowed, added, sink)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (N, M), pattern, sink = (q.shape[2], k.shape[2]), self.pattern, self.sink is not None
        start = 0 if self.visible is None else self.visible.start
        score_mod, backward = None, learned(q, k, v, *self.parameters())
        if self.position_bias is not None:
            distances = torch.arange(1 - N - start, M - start + sink, device=q.device)
            score_mod = added_by_distance(self.position_bias.along(distances, accumulator(q.dtype)), N - 1)
        if self.sink is not None:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
            score_mod = sink_at(M, self.sink.logit.to(accumulator(q.dtype)), score_mod)

        def blocks() -> BlockMask:
            # Blocks are given even if nothing is masked: without them, the code for a CPU holds all scores at once.
            return pattern.block_mask(N, M, q.device, key_mask, sink=sink)

        pairs = pattern.pairs(N, M, sink=sink)
        output = self.kernel(q, k, v, blocks, pairs=q.shape[1] * pairs, learned=backward, score_mod=score_mod)
        if key_mask is None:
            return output
        return output.masked_fill(~pattern.seeing(key_mask, N), 0)

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Cache:
        """The state after q ``(B, H, n, D)``, k and v ``(B, K, n, ·)``, n >= 0; a sink is its first key."""
        if self.sink is None:
            return super().begin(q, k, v)
        return Cache.of(pad(k, (0, 0, 1, 0)), pad(v, (0, 0, 1, 0)), self.capacity + 1)

    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        """q ``(B, H, 1, D)``, k and v ``(B, K, 1, ·)``; the kernel gets the whole cache and its filled length."""
        if self.windows is not None:
            raise Unsupported(_NO_STEP)
        state = state.append(k, v)
        n, room, ahead = state.length, state.k.shape[2], int(self.sink is not None)
        # The kernel reads whole blocks: it multiplies anything behind the last value by a weight of 0.
        state.v[:, :, n : -(-n // BLOCK) * BLOCK] = 0
        if self.first_seen(state._replace(length=n - ahead)):
            raise Unsupported(_NO_STEP)
        score_mod = None
        if self.position_bias is not None:
            place = n - 1 - ahead
            row = self.position_bias(slice(place, place + 1), slice(0, room - ahead), torch.float32)[:, 0]
            score_mod = added_to_key(pad(row, (ahead, 0)))
        if self.sink is not None:
            score_mod = sink_at(0, self.sink.logit.float(), score_mod)

        def blocks() -> BlockMask:
            numbers = [[n // BLOCK], [int(n % BLOCK > 0)]]
            first, count = torch.tensor(numbers, dtype=torch.int32, device=q.device)[:, None, None]
            every = torch.arange(-(-room // BLOCK), dtype=torch.int32, device=q.device)[None, None, None]
            length = torch.tensor(n, device=q.device)
            after = ((every + first[..., None]) % every.shape[-1]).to(torch.int32)
            return BlockMask.from_kv_blocks(
                count,
                after,
                first,
                every,
                BLOCK_SIZE=BLOCK,
                mask_mod=lambda b, h, i, j: j < length,
                seq_lengths=(1, room),
                **_FORWARD_ONLY,
            )

        pairs, backward = q.shape[1] * min(room, -(-n // BLOCK) * BLOCK), learned(q, k, v, *self.parameters())
        return self.kernel(q, state.k, state.v, blocks, pairs=pairs, learned=backward, score_mod=score_mod), state
