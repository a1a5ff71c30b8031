"""The bound of low-rank attention: the exact matrix, truncated."""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register

_BLOCK = 24
"""Columns by which a Krylov space grows: fewer waste the products, more need a larger space.

A product with 24 columns takes no longer than one with 16: float64 kernels with AVX2 work on 24 at a time.
"""

_FIRST = 3
"""Size of the space, as a multiple of the rank, at which it is first checked."""

_REST = 1e-9
"""Growth, by a quarter, ends once it gains less than this share of the rest; later growth gains even less."""


@register(
    "oracle-lowrank",
    family="reference",
    source="Eckart and Young 1936; this project's reference line",
    formula="O = P_R·V, P_R the best rank-R approximation of P = softmax(Q·Kᵀ/√D)",
    cost="O(n³)",
    memory_exponent=2.0,
    traits=Traits(
        mask=No("truncating the singular values puts weight on hidden pairs"),
        meets="all keys",
        causal=No("truncating the singular values puts weight above the diagonal: rows would see the future"),
        rows_sum_to_one=False,
        bias=True,
        permutable=True,
        exact_with=("rank={n}",),
    ),
    settings=("rank=3",),
)
class OracleLowRank(nn.Module):
    """The best weights of rank R: reference line of low-rank methods.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. The singular value decomposition of P, one head at
    a time, in float64 whatever the inputs are. No matrix of rank R is nearer to P in the Frobenius norm, so none has a
    smaller expected error over white values; for a given V, a matrix chosen to suit it may be nearer.

    ``rank`` >= min(N, M) gives exact attention. With a key mask, padded keys are left out, and in self-attention padded
    queries as well (their rows are 0), since both would use up rank.
    """

    def __init__(
        self, shape: Shape, *, rank: Annotated[int, Field(ge=1, description="rank R of the approximation")] = 64
    ) -> None:
        super().__init__()
        self.position_bias = position_bias(shape)
        self.rank = rank
        self.cross = shape.cross

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        output = torch.zeros_like(q, dtype=torch.float64)
        for b, h in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])):
            keys = torch.ones(k.shape[2], dtype=torch.bool, device=q.device) if key_mask is None else key_mask[b]
            rows = torch.ones(q.shape[2], dtype=torch.bool, device=q.device) if self.cross else keys
            logits = q[b, h].double() @ k[b, h].double().mT / math.sqrt(q.shape[-1])
            if self.position_bias is not None:
                logits = logits + self.position_bias(slice(0, q.shape[2]), slice(0, k.shape[2]), torch.float64)[h]
            logits = logits[rows][:, keys]
            if logits.numel():
                U, s, Wt = torch.linalg.svd(logits.softmax(-1), full_matrices=False)
                terms = zip(U.mT[: self.rank], s[: self.rank], Wt[: self.rank], strict=True)
                nearest = sum((sigma * torch.outer(u, w) for u, sigma, w in terms), torch.zeros_like(logits))
                output[b, h, rows] = nearest @ v[b, h, keys].double()
        return output.to(v.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        logits = (q.double() * q.shape[-1] ** -0.5) @ k.double().mT
        if self.position_bias is not None:
            logits = logits + self.position_bias(slice(0, q.shape[2]), slice(0, k.shape[2]), torch.float64)
        if key_mask is not None:
            logits = logits.masked_fill(~key_mask[:, None, None], torch.finfo(torch.float64).min)
        matrix = logits.softmax(-1)
        if key_mask is not None:
            seen = key_mask.any(1, keepdim=True) if self.cross else key_mask
            matrix = matrix.masked_fill(~seen[:, None, :, None], 0)
        # A decomposition of numbers that are not finite raises; the other heads are unchanged.
        lost = ~matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        matrix, v64 = matrix.masked_fill(lost, 0), v.double().masked_fill(lost, torch.nan)
        if self.rank >= min(matrix.shape[-2:]):
            return torch.matmul(matrix, v64).to(v.dtype)
        if matrix.requires_grad:
            # Function.apply has no annotations in torch.
            nearest = [_Truncate.apply(head, self.rank) for head in matrix.flatten(0, 1)]  # type: ignore[no-untyped-call]
            return torch.matmul(torch.stack(nearest).view_as(matrix), v64).to(v.dtype)
        return _apply_truncated(matrix, v64, self.rank).to(v.dtype)


def _apply_truncated(matrix: Tensor, v: Tensor, rank: int) -> Tensor:
    """P_R·V as U·(Uᵀ·(P·V)) or P·(W·(Wᵀ·V)), from only the R leading singular vectors of the shorter side."""
    heads = matrix.flatten(0, 1)
    if matrix.shape[-2] <= matrix.shape[-1]:
        U = torch.unflatten(torch.stack([leading(head, rank) for head in heads]), 0, matrix.shape[:2])
        return torch.matmul(U, U.mT @ (matrix @ v))
    W = torch.unflatten(torch.stack([leading(head.mT, rank) for head in heads]), 0, matrix.shape[:2])
    return torch.matmul(matrix, W @ (W.mT @ v))


def leading(matrix: Tensor, rank: int) -> Tensor:
    """The R leading left singular vectors ``(n, R)`` of P ``(n, m)``, n <= m.

    They come from a Krylov space of P·Pᵀ, which grows block by block and stays orthogonal, until the rest of P falls by
    less than one part in 10^9. Products with V then agree with those of the best vectors to about 1e-8. If that would
    take no less time, all n eigenvectors are computed.
    """
    n, m = matrix.shape
    most = n // 2
    if most < _FIRST * rank:
        return _of_all(matrix, rank)
    start = torch.randn(m, _BLOCK, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    own = torch.linalg.qr(matrix @ start.to(matrix.device)).Q
    space, small = matrix.new_empty(n, most + _BLOCK), matrix.new_zeros(most + _BLOCK, most + _BLOCK)
    whole, kept, size, check = matrix.square().sum(), matrix.new_zeros(()), 0, _FIRST * rank
    while size + _BLOCK <= most:
        block, known = slice(size, size + _BLOCK), slice(0, size + _BLOCK)
        space[:, block] = own
        image = matrix @ (matrix.mT @ own)
        for _ in range(2):  # the second time for the rounding errors of the first
            along = space[:, known].mT @ image
            small[known, block] += along
            image -= space[:, known] @ along
        own = torch.linalg.qr(image).Q
        size += _BLOCK
        if size >= check:
            squares, vectors = torch.linalg.eigh(small[known, known], UPLO="U")
            before, kept = kept, squares[-rank:].sum()
            if kept - before <= _REST * (whole - kept) + torch.finfo(matrix.dtype).eps * whole:
                return torch.matmul(space[:, known], vectors[:, -rank:])
            check = size * 5 // 4
    return _of_all(matrix, rank)


def _of_all(matrix: Tensor, rank: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(matrix @ matrix.mT).eigenvectors
    return vectors[:, -rank:]


class _Truncate(torch.autograd.Function):
    """P -> P_R, with a derivative that stays finite if singular values below the cut coincide.

    Autograd through the decomposition divides by the difference of every two squared singular values. In the derivative
    of P_R itself, only pairs across the cut remain. With U, s, W the decomposition, A = Uᵀ·dP·W and i <= R < j,
    entry (i, j) of Uᵀ·dP_R·W is (s_i² A_ij + s_i s_j A_ji) / (s_i² - s_j²), and (j, i) likewise; entries with both
    indices up to R are those of A, and those with both above are 0. The map is its own adjoint.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, rank: int) -> Tensor:
        U, s, Wt = torch.linalg.svd(matrix, full_matrices=False)
        ctx.save_for_backward(U, s, Wt)
        ctx.rank = rank
        return torch.matmul(U[:, :rank] * s[:rank], Wt[:rank])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        U, s, Wt = ctx.saved_tensors
        R = ctx.rank
        head, tail = U[:, :R], U[:, R:]
        left, right = head.mT @ grad, grad @ Wt[:R].mT
        above, below = left @ Wt[R:].mT, tail.mT @ right
        kept, cut = s[:R, None], s[None, R:]
        gap = (kept.square() - cut.square()).clamp_min(torch.finfo(s.dtype).tiny)
        same, swapped = cut.square() / gap, kept * cut / gap
        # Directions outside the thin U and W are pairs with a singular value of 0; left and right hold their share.
        flat = head @ (left + (same * above + swapped * below.mT) @ Wt[R:])
        rest = (right - head @ (head.mT @ right) + tail @ (same.mT * below + swapped.mT * above.mT)) @ Wt[:R]
        return flat + rest, None
