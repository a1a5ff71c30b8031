"""PyTorch's FlexAttention, compiled for one module at a time."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnbench.contract.compiled import on_cpu, out_of_sight
from attnbench.errors import Unsupported

Mod = Callable[..., Tensor]
"""A function of a pair that is compiled into the kernel."""

DTYPES = ("bfloat16", "float16", "float32")
"""Supported dtypes on a CPU."""


class FlexKernel:
    """softmax(q kᵀ / √D) v over the blocks of a block mask, compiled at the first call for each shape and type.

    Only compiled code ever runs. The FLOPs recorded are those of the computed blocks.
    """

    def __init__(self) -> None:
        # Each module gets code of its own: torch.compile gives up after a few shapes of one piece of code.
        own = FunctionType(_attend.__code__.replace(), _attend.__globals__)
        self._compiled = torch.compile(own, dynamic=False, fullgraph=True)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Callable[[], BlockMask],
        *,
        pairs: int | None,
        learned: bool,
        score_mod: Mod | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """``(B, H, N, E)``, from q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)``.

        Args:
            blocks: makes the block mask, if anything is to run.
            pairs: pairs in the computed blocks over all heads of one example, if known.
            learned: gradients are wanted.
            sink: logits ``(H,)`` without a key.

        Raises:
            Unsupported: float64, gradients or a sink on a CPU, which PyTorch does not compile, or no C++ compiler.
        """
        if on_cpu(q.device) and sink is not None:
            raise Unsupported("FlexAttention gives no sums of exponentials on a CPU, of which a sink takes its share")
        if on_cpu(q.device) and (learned or q.dtype == torch.float64):
            raise Unsupported(f"FlexAttention has no {'backward pass' if learned else 'float64'} on a CPU")

        def call() -> Tensor:
            try:
                output: Tensor = self._compiled(q, k, v, score_mod, blocks(), sink)
            except RuntimeError as error:
                if "C++ compiler" not in str(error):
                    raise
                raise Unsupported("FlexAttention is compiled, and there is no working C++ compiler") from error
            return output

        exponentials = q.shape[0] * (pairs or 0)
        D, E = q.shape[3], v.shape[3]
        return out_of_sight(
            call,
            like=q if D == E else q[..., :1].expand(*q.shape[:3], E),
            kernel="flex",
            matmul_flops=None if pairs is None else 2 * (D + E) * exponentials,
            backward_flops=2 * (3 * D + 2 * E) * exponentials,
            exponentials=exponentials,
        )


def added_by_distance(line: Tensor, middle: int) -> Mod:
    """A function that adds ``line`` ``(H, ·)`` at ``middle`` + j - i to the score of query i and key j."""
    return lambda score, b, h, i, j: score + line[h, j - i + middle]


def added_to_key(row: Tensor) -> Mod:
    """A function that adds ``row`` ``(H, ·)`` at j to the scores of key j."""
    return lambda score, b, h, i, j: score + row[h, j]


def sink_at(place: int, logits: Tensor, other: Mod | None) -> Mod:
    """A function that gives the key at ``place`` the logit of each head, ``(H,)``, and changes others by ``other``."""
    if other is None:
        return lambda score, b, h, i, j: torch.where(j == place, logits[h], score)
    return lambda score, b, h, i, j: torch.where(j == place, logits[h], other(score, b, h, i, j))


def everything(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A mask that hides nothing."""
    return i >= 0


def _attend(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, block_mask: BlockMask, sink: Tensor | None
) -> Tensor:
    shared, asked = q.shape[1] != k.shape[1], None if sink is None else AuxRequest(lse=True)
    found: Any = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=shared, return_aux=asked)
    if sink is None:
        output: Tensor = found
        return output
    output, others = found
    return (output * torch.sigmoid(others.lse - sink[:, None])[..., None]).to(output.dtype)
