"""Linformer: keys and values are projected along the sequence to a fixed number of rows."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.errors import Unsupported
from attnbench.shape import Shape
from attnbench.variant import No, Traits, register


@register(
    "linformer",
    family="low rank",
    source="Wang et al. 2020, arXiv:2006.04768",
    formula="softmax(Q (E K)ᵀ / √d) (F V),  E, F ∈ ℝ^(r×m)",
    cost="O(n·R·d)",
    time_exponent=1.0,
    memory_exponent=1.0,
    traits=Traits(
        target="learned",
        target_with=(("projection", "mean-pool", "softmax"),),
        causal=No("each projected row mixes keys from the whole sequence, so every output sees the future"),
        cross=True,
        key_padding=True,
        stochastic=True,
        rows_sum_to_one=False,
    ),
    settings=("rank=4", "rank=4,sharing=unshared", "rank=4,projection=mean-pool"),
)
class Linformer(nn.Module):
    """Attention to R learned mixtures of all keys, fixed maximum length.

    Wang et al. 2020, equation 7: ``softmax(Q (E K)ᵀ / √D) (F V)`` with E and F of size R × M. The projections are
    learned; before training they are drawn from N(0, 1/R), the Johnson-Lindenstrauss distribution of the paper's
    theorem 1, so that an error against softmax attention says nothing until they are fitted.

    q is ``(B, H, N, D)``, k and v are ``(B, H, M, D)``. The projections have M = ``shape.M`` columns; fewer keys use
    the first columns, without rescaling. Padded keys and values are set to zero before the projection. Each query
    then still attends to all R rows, which is exactly what it does on the shorter input.

    ``sharing``: ``unshared`` has one E and one F for each head, ``headwise`` one E and one F for all heads,
    ``key-value`` one E = F for all heads. The paper's fourth setting, one E for all layers, does the same work in each
    layer as ``key-value``; only its parameters are counted once.

    ``projection=mean-pool`` is the paper's pooling: row r of E = F averages the r-th of R runs of real keys whose
    lengths differ by at most one. It has no parameters and no longest length, and padding is cut out before the runs
    are formed.

    Not here: redrawing E in each step, and projections that differ in R from layer to layer (section 4 of the paper).

    Raises:
        Unsupported: rank above M, which would lengthen the sequence; mean pooling with separate projections; in
            ``forward``, more keys than E has columns.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int, Field(ge=1, description="rows R that keys and values are projected to")] = 256,
        sharing: Annotated[
            Literal["unshared", "headwise", "key-value"], Field(description="which projections are one and the same")
        ] = "key-value",
        projection: Annotated[
            Literal["learned", "mean-pool"], Field(description="learned matrix, or averages of runs of keys")
        ] = "learned",
    ) -> None:
        super().__init__()
        if rank > shape.M:
            raise Unsupported(f"rank {rank} is above the {shape.M} keys: the projection would lengthen the sequence")
        if projection == "mean-pool" and sharing != "key-value":
            raise Unsupported("mean pooling is one projection for heads, keys and values: sharing must be key-value")
        self.rank = rank
        self.E: nn.Parameter | None = None
        self.F: nn.Parameter | None = None
        if projection == "learned":
            size = (shape.H, rank, shape.M) if sharing == "unshared" else (rank, shape.M)
            self.E = nn.Parameter(torch.randn(size) * rank**-0.5)
            if sharing != "key-value":
                self.F = nn.Parameter(torch.randn(size) * rank**-0.5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Args as for every operator; at most ``shape.M`` keys unless ``projection=mean-pool``."""
        if self.E is None:
            return self._pooled(q, k, v, key_mask)
        M = k.shape[2]
        if self.E.shape[-1] < M:
            raise Unsupported(f"{M} keys, but the projection was made for at most {self.E.shape[-1]}")
        if key_mask is not None:
            padded = ~key_mask[:, None, :, None]
            k, v = k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)
        E = self.E[..., :M]
        F = E if self.F is None else self.F[..., :M]
        return scaled_dot_product_attention(q, _project(E, k), _project(F, v))

    def _pooled(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if key_mask is None:
            rank = min(self.rank, k.shape[2])
            return scaled_dot_product_attention(q, _mean_pool(k, rank), _mean_pool(v, rank))
        member = _runs(key_mask, self.rank)
        length = member.sum(-1)[:, None, :, None]
        total = [torch.einsum("brm,bhmd->bhrd", member.to(x.dtype), x) for x in (k, v)]
        k, v = (x / length.clamp(min=1) for x in total)
        filled = (length > 0).transpose(-1, -2)
        # With no real key every row is zero: attending to all of them gives 0, to none gives NaN on some devices.
        return scaled_dot_product_attention(q, k, v, attn_mask=filled | ~filled.any(-1, keepdim=True))


def _project(E: Tensor, x: Tensor) -> Tensor:
    """E ``(R, M)`` or ``(H, R, M)`` times x ``(B, H, M, D)``."""
    # einsum folds the axes that share E into the columns of one product; matmul would repeat E for each of them.
    return torch.einsum("hrm,bhmd->bhrd" if E.ndim == 3 else "rm,bhmd->bhrd", E, x)


def _mean_pool(x: Tensor, rank: int) -> Tensor:
    """Averages of ``rank`` runs along axis 2; the first ``length % rank`` runs are one longer than the others."""
    short, longer = divmod(x.shape[2], rank)
    if longer == 0:
        return torch.unflatten(x, 2, (rank, short)).mean(3)
    cut = longer * (short + 1)
    head = torch.unflatten(x[:, :, :cut], 2, (longer, short + 1)).mean(3)
    tail = torch.unflatten(x[:, :, cut:], 2, (rank - longer, short)).mean(3)
    return torch.cat((head, tail), dim=2)


def _runs(key_mask: Tensor, rank: int) -> Tensor:
    """``(B, R, M)`` bool: which keys are in which run of :func:`_mean_pool` over each row's real keys only.

    With fewer real keys than ``rank`` each is a run and the remaining runs are empty.
    """
    keys = key_mask.sum(-1, keepdim=True)
    runs = keys.clamp(min=1, max=rank)
    short, longer = keys // runs, keys % runs
    position = key_mask.cumsum(-1) - 1
    cut = longer * (short + 1)
    run = torch.where(position < cut, position // (short + 1), longer + (position - cut) // short.clamp(min=1))
    return (run[:, None, :] == torch.arange(rank, device=run.device)[:, None]) & key_mask[:, None, :]
