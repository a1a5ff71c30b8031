"""transformers' BigBird: window, global and random blocks. Random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register


@register(
    "peer.bigbird",
    family="fixed pattern",
    source="transformers, BigBirdBlockSparseAttention",
    formula="softmax over the blocks {I - 1, I, I + 1} ∪ {first, last} ∪ r random ones; first and last rows over all",
    cost="O(n·(5 + r)·B·d)",
    traits=Traits(
        causal=No("the last block is global: every token sees it"),
        cross=No("the window needs queries and keys at the same positions"),
        key_padding=No("not offered by this adapter"),
        stochastic=True,
        dtypes=("float32", "float64"),
    ),
    settings=("block=1,random_blocks=1",),  # check uses 23 tokens
)
class PeerBigBird(nn.Module):
    """transformers' BigBird block-sparse attention: no random blocks at inference, and an n × n matrix.

    This is the core alone, with q ``(B, H, N, D)``. The constructor makes the masks, as the package makes them once per
    model. N must be more than 5 + 2·r whole blocks.

    Where it differs from its formula: outside training every "random" block is block 0, so that its keys, which are
    global already, count 1 + r times. In training, Python loops draw the plan in every call, the same one every time.
    It also always writes out the n × n matrix of weights of every head, asked for or not: memory is O(n²).
    """

    def __init__(
        self,
        shape: Shape,
        *,
        block: Annotated[int, Field(ge=1, description="tokens per block")] = 64,
        random_blocks: Annotated[int, Field(ge=1, description="random blocks that a query block sees")] = 3,
    ) -> None:
        super().__init__()
        from transformers import BigBirdConfig
        from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

        if shape.N % block or shape.N // block <= 5 + 2 * random_blocks:
            raise Unsupported(f"n = {shape.N} is not more than {5 + 2 * random_blocks} whole blocks of {block}")
        self.shape, self.block, self.random_blocks = shape, block, random_blocks
        config = BigBirdConfig(
            hidden_size=shape.C,
            num_attention_heads=shape.H,
            block_size=block,
            num_random_blocks=random_blocks,
            max_position_embeddings=max(shape.N, 4096),
        )
        self.peer: Any = BigBirdBlockSparseAttention(config, seed=0)
        for unused in ("query", "key", "value"):
            setattr(self.peer, unused, None)
        masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(shape.B, shape.N), block)
        for name, mask in zip(("blocked", "band", "rows", "columns"), masks, strict=True):
            self.register_buffer(name, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        B, H, N, D = q.shape
        out: Tensor = self.peer.bigbird_block_sparse_attention(
            q, k, v, self.band, self.rows, self.columns, self.blocked, self.blocked, H, self.random_blocks, D,
            self.block, self.block, B, N, N, seed=0, plan_from_length=None, plan_num_rand_blocks=None,
        )[0]  # fmt: skip
        return out.transpose(1, 2)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        ours = build("bigbird", self.shape, block=self.block, random_blocks=self.random_blocks)
        out: Tensor = ours.dense(q, k, v)  # type: ignore[operator]  # it is a BigBird
        return out
