"""BigBird attention: random, window and global blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.blocks.selection import BlockPairs, BlockSelection
from attnbench.catalogue.engines.flex.block_mask import Seen
from attnbench.catalogue.engines.flex.flex_attention import DTYPES
from attnbench.catalogue.engines.flex.pair_pattern import FlexPattern, Form
from attnbench.catalogue.engines.patterns.bands import blocks_per_tile, full_rows
from attnbench.catalogue.engines.patterns.keys import Gathered, SharedKeys
from attnbench.catalogue.engines.patterns.pattern_softmax import attend
from attnbench.catalogue.engines.patterns.tiles import Blocks, Keys, Tile, batches
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register
from attnbench.errors import Unsupported

_ONE_LENGTH = "form=flex compiles a kernel for each length, and padding makes one of every example; form=torch takes it"


@register(
    "bigbird",
    family="fixed pattern",
    also=("memory",),
    source="Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D",
    formula="softmax over the blocks {I - 1, I, I + 1} ∪ {first, last} ∪ r random ones; first and last rows over all",
    cost="O(n·(5 + r)·B·d)",
    memory_exponent=1.0,
    fused="bigbird:form=flex,block={block},random_blocks={random_blocks}",
    traits=Traits(
        causal=No("the last block is global: every token sees it"),
        cross=No("the blocks need queries and keys at the same positions"),
        bias=True,
        longer=No("random blocks are drawn for the length that it is made for"),
        stochastic=True,
        exact_with=("block={n}", "block=1,random_blocks={n}"),
        knob=Knob("random_blocks", step=1),
        given=(
            ("random_blocks=0", {"stochastic": False, "longer": True}),
            ("form=flex", {"key_padding": No(_ONE_LENGTH), "compiled": True, "dtypes": DTYPES}),
        ),
    ),
    settings=("block=3,random_blocks=1", "block=2,random_blocks=3"),
)
class BigBird(nn.Module):
    """BigBird (ITC): random, window and global blocks.

    Tokens are cut into blocks; the last may be shorter. The queries of block I take one softmax over the keys of blocks
    I - 1, I, I + 1, the first, the last, and r = ``random_blocks`` others, drawn without repetition for each head and
    block. The queries of the first and the last block see everything. Where fewer blocks are left than random ones are
    wanted, all are seen: up to 4 + r blocks, this is exact attention.

    The draws are uniform and fixed in the constructor, up to shape.N tokens; a shorter sequence uses the same random
    numbers over fewer blocks. With ``key_mask``, each sequence is cut into blocks up to its last real token, so that
    padding at the end changes nothing (this reads the mask's lengths, a synchronisation on CUDA); rows beyond give 0.
    The defaults are the paper's.

    Differs from the authors' code: there random blocks can coincide with window or global ones, whose keys then count
    twice, and a sequence must be a whole number of blocks.

    q, k, v: ``(B, H, N, D)`` -> ``(B, H, N, D)``. Time N·(7 + r)·block·D: two blocks are for the global rows.

    ``form=flex`` is the same in one kernel of FlexAttention. It is compiled at the first call, and computes blocks of
    128 × 128 pairs that hold some of the pattern's; in these it asks which pairs count.

    Raises:
        Unsupported: in ``forward``, more blocks than ``shape.N`` has; with ``form=flex``, padding, and float64 or
            gradients on a CPU.
    """

    draws: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        random_blocks: Annotated[int, Field(ge=0, description="random blocks that a query block sees")] = 3,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        self.block = block
        self.flex = FlexPattern(f"bigbird, block={block}, {random_blocks}", form)
        self.position_bias = position_bias(shape)
        # Blocks first: with the same seed a shorter shape draws the same numbers for the blocks that it has.
        self.register_buffer("draws", torch.randint(2**53, (-(-shape.N // block), shape.H, random_blocks)))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        real = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        whole, bias = slice(0, q.shape[2]), self.position_bias
        added = None if bias is None else bias(whole, whole, q.dtype)
        examples = []
        for b, mask in enumerate(real):
            n = int(mask.nonzero().amax()) + 1 if mask.any() else 0
            allowed = torch.zeros(*q.shape[1:3], k.shape[2], dtype=torch.bool, device=q.device)
            for h in range(q.shape[1]):
                for I, seen in enumerate(self._plan(h, -(-n // self.block))):
                    for J in seen:
                        rows, columns = (slice(x * self.block, min(n, (x + 1) * self.block)) for x in (I, J))
                        allowed[h, rows, columns] = True
            examples.append(masked_attention(q[b], k[b], v[b], allowed & mask, added))
        return torch.stack(examples)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if -(-q.shape[2] // self.block) > len(self.draws):
            raise Unsupported(f"random blocks were drawn for {len(self.draws) * self.block} tokens, not {q.shape[2]}")
        if key_mask is None:
            draws, bias = self.draws, self.position_bias
            if not self.flex.may_run(q):
                return self._plain(q, k, v)
            known = draws.data_ptr(), 0 if draws.is_inference() else draws._version
            return self.flex.attend(self._plain, self._seen, q, k, v, bias=bias, known=known)
        if self.flex.form == "flex":
            raise Unsupported(_ONE_LENGTH)
        return self._plain(q, k, v, key_mask)

    def _seen(self, q: Tensor) -> Seen:
        n, size = q.shape[2], self.block
        total = -(-n // size)
        head, row, column = seen_blocks(self.draws[:total, : q.shape[1]]).nonzero(as_tuple=True)
        pairs = BlockPairs(size, size, head * total + row, column)
        return BlockSelection((1, q.shape[1], n), False, (pairs,)).seen()

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # blocks are gathered whole
        if key_mask is None:
            return attend(q, k, v, self._tiles(q), position_bias=self.position_bias)
        position = torch.arange(1, key_mask.shape[1] + 1, device=key_mask.device)
        lengths: list[int] = (key_mask * position).amax(1).tolist()
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for n in sorted(set(lengths) - {0}):
            rows = [b for b, length in enumerate(lengths) if length == n]
            x, y, z = (x[rows, :, :n] for x in (q, k, v))
            out[rows, :, :n] = attend(
                x, y, z, self._tiles(x), key_mask=key_mask[rows, :n], position_bias=self.position_bias
            )
        return out

    def _plan(self, head: int, total: int) -> Iterator[set[int]]:
        """The blocks that each of ``total`` blocks sees; random ones are picked one by one from a list of the rest."""
        for I in range(total):
            seen = set(range(total)) & {0, I - 1, I, I + 1, total - 1}
            left = sorted(set(range(total)) - seen)
            if I in (0, total - 1):
                yield set(range(total))
                continue
            for draw in self.draws[I, head].tolist():
                if left:
                    seen.add(left.pop(draw % len(left)))
            yield seen

    def _tiles(self, q: Tensor) -> Iterator[Tile]:
        n, size = q.shape[2], self.block
        total = -(-n // size)
        if total <= 3:
            yield from full_rows(q, Blocks(0, n))
            return
        last = (total - 1) * size
        # A short last block cannot be gathered together with whole ones.
        short: tuple[Keys, ...] = (SharedKeys(Blocks(last, n - last)),) if n % size else ()
        if short:
            yield from full_rows(q, Blocks(0, size))
            yield from full_rows(q, Blocks(last, n - last))
        else:
            yield from full_rows(q, Blocks(0, size, 2, last))
        chosen = random_blocks(self.draws[:total, : q.shape[1]])
        here = torch.arange(total, device=q.device)
        columns = [here - 1, here, here + 1, here * 0, *(() if short else (here * 0 + total - 1,))]
        seen = torch.stack(columns, 1)[:, None].expand(-1, chosen.shape[1], -1)
        table = torch.cat([seen, chosen], 2).transpose(0, 1).contiguous()
        # Blocks 1 and total - 2 have a global block in their window, so that one more is left to choose from.
        yield Tile(Blocks(size, size), (Gathered(table[:, 1:2, 1:], size), *short), by_head=bool(short))
        table, before_last = table[:, :, : len(columns) + total - 5], table[:, total - 2 : total - 1]
        # One head at a time, since its blocks are gathered many times over and then stay in the cache. The copies do
        # not stay there, so that a tile may be larger than where keys are read in place.
        most = blocks_per_tile(q, total - 4, size * (n % size + table.shape[2] * size) // 2, least=2)
        for t, count in batches(2, total - 2, most):
            keys = Gathered(table[:, t : t + count], size)
            yield Tile(Blocks(t * size, size, count, size), (keys, *short), by_head=bool(short))
        keys = Gathered(torch.cat([before_last[:, :, :2], before_last[:, :, 3:]], 2), size)
        yield Tile(Blocks(last - size, size), (keys, *short), by_head=bool(short))


def random_blocks(draws: Tensor) -> Tensor:
    """Blocks that each block sees by chance, ``(blocks, H, picks)``, from draws ``(blocks, H, r)`` of 0 .. 2^53 - 1.

    Never the first, the last, the block itself or its neighbours; no two alike; every such set is equally likely.
    ``picks`` is at most the number of choices of blocks 1 and blocks - 2. The other blocks have one less, and if r
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
    """A mask ``(H, blocks, blocks)`` of the blocks J that block I of a head sees, from draws ``(blocks, H, r)``."""
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
