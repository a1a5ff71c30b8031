"""Skyformer: a Gaussian kernel of queries and keys in place of softmax, by the Nyström method."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.low_rank.pseudo_inverse import newton
from attnbench.catalogue.engines.low_rank.segments import nth_real, split, take
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register

_ROWS = 512
"""Tokens with kernel values held at a time if no gradient is wanted."""

_BITS = 31


@register(
    "skyformer",
    family="low rank",
    also=("kernel",),
    source="Chen et al. 2021, arXiv:2111.00035, authors' code, attention_skyformer.py",
    formula="κ(Q, X)·(κ(X, X) + γI)⁻¹·κ(X, K)·V,  κ(a, b) = exp(-‖a - b‖²/(2√D)),  X a sample of Q and K",
    cost="O(n·R·d + R³)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        causal=No("landmarks come from the whole sequence, so every output sees the future"),
        stochastic=True,
        rows_sum_to_one=False,
        knob=Knob("landmarks"),
        given=(("sampling=strided", {"stochastic": False}),),
    ),
    settings=("landmarks=7", "landmarks=7,sampling=strided,ridge=0.01", "landmarks=7,inverse=exact"),
)
class Skyformer(nn.Module):
    """Gaussian kernel attention through R landmarks.

    Chen et al. 2021, "Skyformer". q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. It approximates the
    paper's kernelized attention C·V with C_ij = κ(q_i, k_j) = exp(-‖q_i - k_j‖² / (2√D)). That is exp(q·k/√D) divided
    by exp(‖q‖²/(2√D)) and by exp(‖k‖²/(2√D)), but not by the sum of the row: an operator other than softmax attention,
    so that a difference from that is only a distance.

    The matrix κ of all N + M points is positive semi-definite, while κ(Q, K) is not: Nyström's method takes R of these
    points as landmarks X and reads off the block of queries and keys. Memory holds R kernel values for each token in
    training, and one tile otherwise. With all points as landmarks it tends to C·V as the ``ridge`` γ tends to 0.

    - ``sampling=random``: the N + M points, queries first, are cut into R runs whose lengths differ by at most one, and
      one point is drawn from each; ``strided``: the middle of each run. Padding is left out of the runs.
    - ``inverse=newton``: third-order iterations from the identity on T^-½·(κ(X, X) + γI)·T^-½, with T the sums of its
      rows, which brings the eigenvalues into (0, 1]; ``exact`` solves.

    Differs from the authors' code: landmarks come from runs, not from independent draws, so that no point comes twice;
    they are drawn in the constructor, not in each step, and one draw is one landmark. The iterations start from the
    identity, not from a multiple of the transpose. As there, γ is 0.1 by default; their scale 32^-¼ is D^-¼ here, for
    every D. Sums are in float32 at least.

    Raises:
        UsageError: ``iterations`` with the exact inverse.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        landmarks: Annotated[
            int, Field(ge=1, description="points R out of the N + M; all of them if R is larger")
        ] = 128,
        sampling: Annotated[
            Literal["random", "strided"], Field(description="a random or the middle point of each of R runs")
        ] = "random",
        inverse: Annotated[
            Literal["newton", "exact"], Field(description="inverse by iterations or by elimination")
        ] = "newton",
        iterations: Annotated[int | None, Field(ge=1, description="steps; none: 6"), Needs("inverse=newton")] = None,
        ridge: Annotated[float, Field(gt=0, description="γ, added to the diagonal before inverting")] = 0.1,
    ) -> None:
        super().__init__()
        self.landmarks, self.inverse, self.cross, self.ridge = landmarks, inverse, shape.cross, ridge
        self.iterations = 6 if iterations is None else iterations
        # Integers, in units of 2^-31: a cast to half precision leaves them alone.
        place = torch.randint(2**_BITS, (landmarks,)) if sampling == "random" else torch.full((landmarks,), 2**30)
        self.place: Tensor
        self.register_buffer("place", place)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for b in range(q.shape[0]):
            shown = torch.ones_like(k[b, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask[b]
            asking = torch.ones_like(q[b, 0, :, 0], dtype=torch.bool) if self.cross else shown
            points = torch.cat([q[b][:, asking], k[b][:, shown]], 1)
            if not shown.any():
                continue
            runs = torch.arange(points.shape[1], device=q.device).tensor_split(min(self.landmarks, points.shape[1]))
            X = points[:, [int(run[int(u) * len(run) // 2**_BITS]) for run, u in zip(runs, self.place, strict=False)]]
            of_queries, of_keys, gram = (
                (-0.5 * (x[:, :, None] - X[:, None]).square().sum(-1) * q.shape[-1] ** -0.5).exp()
                for x in (q[b], k[b][:, shown], X)
            )
            one = torch.eye(X.shape[1], dtype=q.dtype, device=q.device)
            gram = gram + self.ridge * one
            inverse = torch.linalg.inv(gram)
            if self.inverse == "newton":
                D = torch.diag_embed(gram.sum(-1) ** -0.5)
                inverse, A = one, D @ gram @ D
                for _ in range(self.iterations):
                    AZ = A @ inverse
                    inverse = inverse @ (13 * one - AZ @ (15 * one - AZ @ (7 * one - AZ))) / 4
                inverse = D @ inverse @ D
            out[b] = of_queries @ inverse @ of_keys.mT @ v[b][:, shown]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        accumulate = accumulator(q.dtype)
        k, v = emptied(key_mask, k, v)
        X, filled = self._sample(q, k, key_mask)
        X = X.to(accumulate)
        # The kernel knows differences alone; the squares of a part common to all points would drown these.
        origin = X[:, :, :1].detach()
        X = X - origin
        sums = X.new_zeros(*X.shape[:3], v.shape[3])
        for K, V in zip(torch.split(k, _ROWS, 2), torch.split(v, _ROWS, 2), strict=True):
            sums = sums + _gaussian(X, K.to(accumulate) - origin) @ V.to(accumulate)
        gram = _gaussian(X, X)
        if filled is not None:
            # Missing points become rows of the identity, and pass nothing on.
            there = filled[:, None, :, None]
            gram = gram.masked_fill(~(there & there.mT), 0.0) + torch.diag_embed((~there[..., 0]).to(accumulate))
            sums = sums.masked_fill(~there, 0.0)
        gram = gram + self.ridge * torch.eye(gram.shape[-1], dtype=accumulate, device=gram.device)
        if self.inverse == "exact":
            values, failed = torch.linalg.solve_ex(gram, sums)  # does not wait for the device to say that it failed
            values = values.masked_fill(failed[..., None, None] != 0, torch.nan)
        else:
            root = gram.sum(-1, keepdim=True).rsqrt()
            one = torch.eye(gram.shape[-1], dtype=accumulate, device=gram.device)
            values = root * (newton(root * gram * root.mT, one, self.iterations) @ (root * sums))
        return torch.cat(
            [(_gaussian(Q.to(accumulate) - origin, X) @ values).to(q.dtype) for Q in torch.split(q, _ROWS, 2)], 2
        )

    def _sample(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The landmarks ``(B, H, R, D)`` and, with a mask, those that exist, ``(B, R)``."""
        (B, _, N, _), points = q.shape, q.shape[2] + k.shape[2]
        count = min(self.landmarks, points)
        if key_mask is None:
            start, length = split(torch.full((1,), points, device=q.device), count)
        else:
            of_queries = torch.ones(B, N, dtype=torch.bool, device=q.device) if self.cross else key_mask
            real = torch.cat([of_queries, key_mask], 1)
            start, length = split(real.sum(1), count)
        index = start + (self.place[:count] * length >> _BITS)
        position = index.expand(B, -1) if key_mask is None else nth_real(real, index)
        of_query = (position < N)[:, None, :, None]
        X = torch.where(of_query, take(q, position.clamp(max=N - 1)), take(k, (position - N).clamp(min=0)))
        return X, None if key_mask is None else length > 0


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    half, other = (0.5 * a.square().sum(-1, keepdim=True) for a in (x, y))
    exponent = (x @ y.mT).sub_(half).sub_(other.mT)
    return exponent.mul_(x.shape[-1] ** -0.5).exp_()
