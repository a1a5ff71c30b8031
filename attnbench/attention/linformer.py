"""Linformer: keys and values are projected along the sequence to a fixed number of rows."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.engines.low_rank.segments import Segments, any_real, attend_to_filled, strided_convolution
from attnbench.engines.masks import emptied
from attnbench.errors import Unsupported, UsageError
from attnbench.shape import Shape
from attnbench.variant import Knob, No, Traits, register


@register(
    "linformer",
    family="low rank",
    source="Wang et al. 2020, arXiv:2006.04768, equation 7",
    formula="softmax(Q (E K)ᵀ / √D) (F V),  E, F ∈ ℝ^(R×M)",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="learned",
        causal=No("each projected row mixes keys from the whole sequence, so every output sees the future"),
        stochastic=True,
        rows_sum_to_one=False,
        exact_with=("rank={n},projection=mean-pool", "rank={n},projection=max-pool"),
        knob=Knob("rank"),
        given=(
            ("projection=mean-pool", {"target": "softmax", "stochastic": False, "rows_sum_to_one": True}),
            ("projection=max-pool", {"target": "other", "stochastic": False, "rows_sum_to_one": True}),
            ("projection=jl", {"target": "softmax"}),
        ),
    ),
    settings=(
        "rank=4",
        "rank=4,sharing=unshared",
        "rank=4,projection=mean-pool",
        "rank=4,projection=max-pool",
        "rank=4,projection=conv",
        "rank=4,projection=conv,sharing=unshared",
        "rank=4,projection=jl,delta=0.5",
    ),
)
class Linformer(nn.Module):
    """Attention to R learned mixtures of all keys, fixed maximum length.

    Wang et al. 2020, equation 7: ``softmax(Q (E K)ᵀ / √D) (F V)`` with E and F of size R × M. The projections are
    learned. Before training they are drawn from N(0, 1/R), the Johnson-Lindenstrauss distribution of the paper's
    theorem 1; until they are fitted, an error against softmax attention means nothing.

    q is ``(B, H, N, D)``, k and v are ``(B, H, M, D)``. The projections have M = ``shape.M`` columns; fewer keys use
    the first columns, without rescaling. Padded keys and values are set to zero before the projection. Each query
    then still attends to all R rows, exactly as it does on the shorter input.

    ``sharing``: ``unshared`` has one E and one F for each head, ``headwise`` one E and one F for all heads,
    ``key-value`` one E = F for all heads, and ``layerwise`` the same one in all layers of a model, with its parameters
    counted once.

    Other projections; section 4 of the paper names pooling and convolution:

    - ``projection=mean-pool`` and ``projection=max-pool``: row r is the average or the elementwise maximum of the r-th
      of R runs of real keys whose lengths differ by at most one. No parameters, no maximum length; padding is cut out
      before the runs are formed.
    - ``projection=conv``: a convolution over all D channels with kernel = stride = ceil(M / R), without bias, drawn
      from N(0, 1 / fan-in); zeros after the last key. No maximum length; a block without a real key is hidden.
    - ``projection=jl``: the construction of theorem 2, E = δ·G and F = exp(-δ)·G with G from N(0, 1/R), one for all
      heads. Its logits are of order δ, so that at ordinary inputs all R rows have nearly the same weight.

    Differs from the paper: G is drawn once, not in each step, and R is the same for every layer.

    Raises:
        Unsupported: rank above M, which would lengthen the sequence; separate projections where there is only one; in
            ``forward``, more keys than E or G has columns.
        UsageError: ``delta`` without ``projection=jl``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        rank: Annotated[int, Field(ge=1, description="rows R that keys and values are projected to")] = 256,
        sharing: Annotated[
            Literal["unshared", "headwise", "key-value", "layerwise"],
            Field(description="how many E and F there are: each head its own, two, one, or one for all layers"),
        ] = "key-value",
        projection: Annotated[
            Literal["learned", "mean-pool", "max-pool", "conv", "jl"],
            Field(description="learned matrix, pooling of runs of keys, learned convolution, or random (theorem 2)"),
        ] = "learned",
        delta: Annotated[
            float | None, Field(gt=0, description="δ of projection=jl, by which E is scaled down; none: 1e-6")
        ] = None,
    ) -> None:
        super().__init__()
        if rank > shape.M:
            raise Unsupported(f"rank {rank} is above the {shape.M} keys: the projection would lengthen the sequence")
        if projection in ("mean-pool", "max-pool", "jl") and sharing != "key-value":
            raise Unsupported(f"{projection} is one projection for heads, keys and values: sharing must be key-value")
        if delta is not None and projection != "jl":
            raise UsageError("linformer: delta needs projection=jl; nothing else scales E")
        self.rank, self.projection = rank, projection
        self.tied = ("E",) if sharing == "layerwise" else ()
        self.delta = 1e-6 if delta is None else delta
        self.E: nn.Parameter | None = None
        self.F: nn.Parameter | None = None
        self.G: Tensor
        if projection == "jl":
            self.register_buffer("G", torch.randn(rank, shape.M) * rank**-0.5)
        elif projection in ("learned", "conv"):
            length = -(-shape.M // rank)
            one = (rank, shape.M) if projection == "learned" else (length, shape.D, shape.D)
            size = (shape.H, *one) if sharing == "unshared" else one
            scale = (rank if projection == "learned" else length * shape.D) ** -0.5
            self.E = nn.Parameter(torch.randn(size) * scale)
            if sharing in ("unshared", "headwise"):
                self.F = nn.Parameter(torch.randn(size) * scale)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The same, example by example: real keys and values become R rows, then softmax attention to the rows."""
        out = torch.zeros_like(q)
        for b in range(q.shape[0]):
            real = torch.ones_like(k[b, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask[b]
            if real.any():
                F = self.E if self.F is None else self.F
                keys, values = self._dense_rows(k[b], real, self.E), self._dense_rows(v[b], real, F)
                if self.projection == "jl":
                    keys, values = self.delta * keys, math.exp(-self.delta) * values
                out[b] = (q[b] @ keys.mT * q.shape[-1] ** -0.5).softmax(-1) @ values
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Arguments as for every operator; at most ``shape.M`` keys if ``projection`` is ``learned`` or ``jl``."""
        k, v = emptied(key_mask, k, v)
        if self.E is None and self.projection != "jl":
            runs = Segments(self.rank, k.shape[2], key_mask)
            pool = runs.mean if self.projection == "mean-pool" else runs.max
            return attend_to_filled(q, pool(k), pool(v), runs.filled)
        if self.E is not None and self.projection == "conv":
            filled = None if key_mask is None else any_real(key_mask, self.E.shape[-3])
            keys = strided_convolution(k, self.E)
            return attend_to_filled(q, keys, strided_convolution(v, self.E if self.F is None else self.F), filled)
        E = self._columns(self.G if self.E is None else self.E, k.shape[2])
        F = E if self.F is None else self._columns(self.F, k.shape[2])
        if self.E is None:
            return attend_to_filled(q, self.delta * _project(E, k), math.exp(-self.delta) * _project(F, v), None)
        return attend_to_filled(q, _project(E, k), _project(F, v), None)

    @staticmethod
    def _columns(E: Tensor, M: int) -> Tensor:
        if E.shape[-1] < M:
            raise Unsupported(f"{M} keys, but the projection was made for at most {E.shape[-1]}")
        return E[..., :M]

    def _dense_rows(self, x: Tensor, real: Tensor, W: Tensor | None) -> Tensor:
        """``(H, R, D)`` from x ``(H, M, D)``."""
        if self.projection in ("mean-pool", "max-pool"):
            runs = x[:, real].tensor_split(min(self.rank, int(real.sum())), 1)
            return torch.stack([run.mean(1) if self.projection == "mean-pool" else run.amax(1) for run in runs], 1)
        if W is None or self.projection == "learned":
            return (self.G if W is None else W)[..., real.nonzero()[:, 0]] @ x[:, real]
        c = W.shape[-3]
        rows: dict[int, Tensor | int] = {}
        for t in real.nonzero()[:, 0].tolist():
            rows[t // c] = rows.get(t // c, 0) + x[:, t, None] @ W[..., t % c, :, :]
        return torch.cat([row for row in rows.values() if isinstance(row, Tensor)], 1)


def _project(E: Tensor, x: Tensor) -> Tensor:
    """E ``(R, M)`` or ``(H, R, M)`` times x ``(B, H, M, D)``."""
    # einsum folds the axes that share E into the columns of one product; matmul would repeat E for each of them.
    return torch.einsum("hrm,bhmd->bhrd" if E.ndim == 3 else "rm,bhmd->bhrd", E, x)
