"""Which blocks BigBird's blocks see, and FlexAttention over them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.engines.flex.kernel import FlexKernel, added_by_distance, everything
from attnbench.errors import Unsupported
from attnbench.position_bias import PositionBias


def random_blocks(draws: Tensor) -> Tensor:
    """Blocks that each block sees by chance, ``(blocks, H, picks)``, from draws ``(blocks, H, r)`` of 0 .. 2^53 - 1.

    Never the first, the last, the block itself or its neighbours; no two alike; every such set is equally likely.
    ``picks`` is at most what blocks 1 and blocks - 2 have to choose from. The other blocks have one less, and where r
    exceeds that, their last pick is void. The rows of the first and the last block mean nothing.
    """
    total, _, wanted = draws.shape
    here = torch.arange(total, device=draws.device)[:, None]
    inside = (here > 1) & (here < total - 2)
    left = (total - 4) - inside.long()
    picks: list[Tensor] = []
    for t in range(min(wanted, total - 4)):
        rank = draws[:, :, t] % (left - t).clamp(min=1)
        if picks:  # a rank among those not yet picked becomes a rank among all
            for taken in torch.stack(picks, -1).sort(-1).values.unbind(-1):
                rank = rank + (rank >= taken)
        picks.append(rank)
    if not picks:
        return draws[:, :, :0]
    ranks = torch.stack(picks, -1)
    before = (here - 2).clamp(min=0)[:, :, None]
    return torch.where(ranks < before, ranks + 1, ranks - before + here[:, :, None] + 2)


def seen_blocks(draws: Tensor) -> Tensor:
    """Whether block I of a head sees block J, ``(H, blocks, blocks)``, from draws ``(blocks, H, r)``."""
    total, heads, _ = draws.shape
    here = torch.arange(total, device=draws.device)
    outer = (here == 0) | (here == total - 1)
    fixed = ((here[:, None] - here).abs() <= 1) | outer[:, None] | outer
    seen = fixed.expand(heads, total, total).clone()
    chosen = random_blocks(draws).transpose(0, 1)
    if total >= 3:
        # Blocks 1 and total - 2 may have one more to choose from.
        seen[:, 1 : total - 1].scatter_(2, chosen[:, 1 : total - 1, : max(0, total - 5)], True)
        for I in {1, total - 2}:
            seen[:, I].scatter_(1, chosen[:, I], True)
    return seen


@lru_cache(maxsize=8)
def seen_pairs(n: int, block: int, wanted: int) -> int:
    """How many pairs of n tokens are seen in one head with ``wanted`` random blocks, whichever these are."""
    total = -(-n // block)
    last = n - (total - 1) * block
    pairs = 0
    for I in range(total):
        fixed = {0, I - 1, I, I + 1, total - 1} & set(range(total)) if 0 < I < total - 1 else range(total)
        blocks = min(total, len(fixed) + wanted)
        pairs += (last if total - 1 == I else block) * ((blocks - 1) * block + last)
    return pairs


class FusedBlocks:
    """BigBird in one kernel of FlexAttention."""

    def __init__(self, block: int) -> None:
        if block % 16:
            raise Unsupported(f"form=flex needs blocks that are a multiple of 16 tokens, not {block}")
        self.block, self.kernel = block, FlexKernel(block)
        self.side = next(size for size in (64, 32, 16) if block % size == 0)
        """Side of the squares into which a GPU divides a block."""
        self._kept: tuple[tuple[object, ...], BlockMask] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, draws: Tensor, position_bias: PositionBias | None) -> Tensor:
        """``(B, H, N, D)`` from q, k, v ``(B, H, N, D)`` and draws for as many blocks as there are, or more.

        Raises:
            Unsupported: gradients in half precision on a GPU for blocks that are no multiple of 32; see also
                :meth:`FlexKernel.__call__`.
        """
        n = q.shape[2]
        inputs, score_mod = [q, k, v], None
        if position_bias is not None:
            inputs.append(position_bias.along(torch.arange(1 - n, n, device=q.device), torch.float32))
            score_mod = added_by_distance(inputs[-1], n - 1)
        learned = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if learned and q.is_cuda and self.block % 32 and q.dtype != torch.float32:
            raise Unsupported(
                "on a GPU the backward pass of form=flex takes half precision in blocks of 32, 64 ... tokens"
            )
        return self.kernel(
            q,
            k,
            v,
            lambda: self._mask(n, draws),
            pairs=q.shape[1] * seen_pairs(n, self.block, draws.shape[2]),
            learned=learned,
            score_mod=score_mod,
            options={"fwd_BLOCK_M": self.side, "fwd_BLOCK_N": self.side},
        )

    def _mask(self, n: int, draws: Tensor) -> BlockMask:
        """The block mask of n tokens, kept as long as length and draws stay the same."""
        known = (n, draws.device, draws.data_ptr(), 0 if draws.is_inference() else draws._version)
        if self._kept is None or self._kept[0] != known:
            with torch.inference_mode(False):  # gradients may be wanted next time
                seen = seen_blocks(draws[: -(-n // self.block)])
                count, index = seen.sum(2).int()[None], (~seen).byte().argsort(dim=2, stable=True).int()[None]
                # Blocks to be asked about are given even where there are none, as a copy: code for a CPU relies on it.
                mask = BlockMask.from_kv_blocks(
                    torch.zeros_like(count),
                    index.clone(),
                    count,
                    index,
                    BLOCK_SIZE=self.block,
                    mask_mod=everything,
                    seq_lengths=(n, n),
                )
            self._kept = known, mask
        return self._kept[1]
