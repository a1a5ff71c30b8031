"""Linformer: keys and values are projected along the sequence to a fixed number of rows."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.low_rank.segments import Segments, any_real, attend_to_filled, strided_convolution
from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.shape import Shape
from attnbench.contract.traits import TraitChanges
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import Unsupported

_ONE_WIDTH = "one convolution serves the channels of keys and those of values, as many as of keys"
_POOLED: TraitChanges = {"stochastic": False, "rows_sum_to_one": True, "longer": True}
"""Claims for a projection with rows that are averages, or maxima, of runs of keys."""


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
        shares="query by query",
        longer=No("the projection has a column for each key that it is made for"),
        stochastic=True,
        rows_sum_to_one=False,
        exact_with=("rank={n},projection=mean-pool", "rank={n},projection=max-pool"),
        knob=Knob("rank"),
        given=(
            ("projection=mean-pool", {"target": "softmax", **_POOLED}),
            ("projection=max-pool", {"target": "other", **_POOLED}),
            ("projection=jl", {"target": "softmax"}),
            ("projection=conv", {"v_dim": No(_ONE_WIDTH), "longer": True}),
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
    then still attends to all R rows, exactly as it does on the shorter input. On a CPU the N × R weights pass through
    its cache tile by tile.

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
            float | None, Field(gt=0, description="δ, by which E is scaled down; none: 1e-6"), Needs("projection=jl")
        ] = None,
    ) -> None:
        super().__init__()
        if rank > shape.M:
            raise Unsupported(f"rank {rank} is above the {shape.M} keys: the projection would lengthen the sequence")
        if projection in ("mean-pool", "max-pool", "jl") and sharing != "key-value":
            raise Unsupported(f"{projection} is one projection for heads, keys and values: sharing must be key-value")
        self.tied = ("E",) if sharing == "layerwise" else ()
        self.E: nn.Parameter | None = None
        self.F: nn.Parameter | None = None
        self.G: Tensor | None
        self.register_buffer("G", None)
        self.projection: Projection = PoolingProjection(rank, largest=projection == "max-pool")
        if projection == "jl":
            self.projection = random = RandomProjection(rank, shape.M, 1e-6 if delta is None else delta)
            self.G = random.draw()
        elif projection in ("learned", "conv"):
            learned: LearnedProjection | ConvolutionProjection = LearnedProjection(rank, shape.M)
            if projection == "conv":
                if shape.E != shape.D:
                    raise Unsupported(_ONE_WIDTH)
                learned = ConvolutionProjection(rank, shape.M, shape.D)
            heads = (shape.H,) if sharing == "unshared" else ()
            self.projection, self.E = learned, nn.Parameter(learned.draw(*heads))
            if sharing in ("unshared", "headwise"):
                self.F = nn.Parameter(learned.draw(*heads))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The same, example by example: real keys and values become R rows, then softmax attention to the rows."""
        out, drawn = torch.zeros_like(q), self._drawn()
        by_key, by_value = self.projection.scales
        for b in range(q.shape[0]):
            real = torch.ones_like(k[b, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask[b]
            if real.any():
                keys = by_key * self.projection.dense(k[b], real, *drawn[:1])
                values = by_value * self.projection.dense(v[b], real, *drawn[-1:])
                out[b] = (q[b] @ keys.mT * q.shape[-1] ** -0.5).softmax(-1) @ values
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Arguments as for every operator; at most ``shape.M`` keys if ``projection`` is ``learned`` or ``jl``."""
        k, v = emptied(key_mask, k, v)
        return attend_to_filled(q, *self.projection.rows(k, v, key_mask, *self._drawn()))

    def _drawn(self) -> list[Tensor]:
        return [W for W in (self.G, self.E, self.F) if W is not None]


Rows = tuple[Tensor, Tensor, Tensor | None]
"""Keys and values ``(B, H, R, D)``; a mask of the filled rows, ``(B, R)`` bool, None: all."""


class Projection(Protocol):
    """One way; ``drawn`` is the matrix or kernel for keys and the one for values, or one for both, or nothing."""

    scales: tuple[float, float] = (1.0, 1.0)
    """Factors of the dense rows of keys and of values."""

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        """The rows of k and v ``(B, H, M, D)``, which are 0 at padded keys."""
        ...

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        """The rows ``(H, R, D)`` of the ``real`` keys or values of x ``(H, M, D)``, by the first of ``drawn``."""
        ...


class LearnedProjection(Projection):
    """A matrix ``(R, M)`` or ``(H, R, M)``, from N(0, 1/R)."""

    def __init__(self, rank: int, tokens: int) -> None:
        self.rank, self.tokens = rank, tokens

    def draw(self, *heads: int) -> Tensor:
        drawn: Tensor = torch.randn(*heads, self.rank, self.tokens) * self.rank**-0.5
        return drawn

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        return drawn[0][..., real.nonzero()[:, 0]] @ x[:, real]

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        if (M := k.shape[2]) > self.tokens:
            raise Unsupported(f"{M} keys, but the projection was made for at most {self.tokens}")
        columns = [W[..., :M] for W in drawn]
        return self._project(columns[0], k), self._project(columns[-1], v), None

    @staticmethod
    def _project(E: Tensor, x: Tensor) -> Tensor:
        # einsum folds the axes that share E into the columns of one product; matmul would repeat E for each of them.
        return torch.einsum("hrm,bhmd->bhrd" if E.ndim == 3 else "rm,bhmd->bhrd", E, x)


class RandomProjection(LearnedProjection):
    """Theorem 2: E = δ·G and F = exp(-δ)·G, with one G from N(0, 1/R)."""

    def __init__(self, rank: int, tokens: int, delta: float) -> None:
        super().__init__(rank, tokens)
        self.scales = delta, math.exp(-delta)

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        keys, values, _ = super().rows(k, v, key_mask, *drawn)
        return self.scales[0] * keys, self.scales[1] * values, None


class ConvolutionProjection(Projection):
    """A kernel ``(c, D, D)`` or ``(H, c, D, D)`` over all channels, with stride c = ceil(M / R)."""

    def __init__(self, rank: int, tokens: int, channels: int) -> None:
        self.length, self.channels = -(-tokens // rank), channels

    def draw(self, *heads: int) -> Tensor:
        c, D = self.length, self.channels
        drawn: Tensor = torch.randn(*heads, c, D, D) * (c * D) ** -0.5
        return drawn

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        rows: dict[int, Tensor | int] = {}
        for t in real.nonzero()[:, 0].tolist():
            r, offset = divmod(t, self.length)
            rows[r] = rows.get(r, 0) + x[:, t, None] @ drawn[0][..., offset, :, :]
        return torch.cat([row for row in rows.values() if isinstance(row, Tensor)], 1)

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        filled = None if key_mask is None else any_real(key_mask, self.length)
        return strided_convolution(k, drawn[0]), strided_convolution(v, drawn[-1]), filled


class PoolingProjection(Projection):
    """Averages, or elementwise maxima, of runs of real keys; nothing is drawn."""

    def __init__(self, rank: int, *, largest: bool) -> None:
        self.rank, self.largest = rank, largest

    def dense(self, x: Tensor, real: Tensor, *drawn: Tensor) -> Tensor:
        runs = x[:, real].tensor_split(min(self.rank, int(real.sum())), 1)
        return torch.stack([run.amax(1) if self.largest else run.mean(1) for run in runs], 1)

    def rows(self, k: Tensor, v: Tensor, key_mask: Tensor | None, *drawn: Tensor) -> Rows:
        runs = Segments(self.rank, k.shape[2], key_mask)
        pool = runs.max if self.largest else runs.mean
        return pool(k), pool(v), runs.filled
