"""Nyströmformer: softmax attention through the means of runs of queries and keys."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from attnbench.catalogue.engines.low_rank.pseudo_inverse import newton
from attnbench.catalogue.engines.low_rank.segments import Segments
from attnbench.catalogue.engines.low_rank.thin import attend_from_few_queries, attend_to_few_keys
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import Unsupported, UsageError


@register(
    "nystrom",
    family="low rank",
    also=("memory",),
    source="Xiong et al. 2021, arXiv:2102.03902, algorithm 1, equations 13-17",
    formula="softmax(Q·K̃ᵀ/√D)·softmax(Q̃·K̃ᵀ/√D)⁺·softmax(Q̃·Kᵀ/√D)·V,  Q̃, K̃ means of runs",
    cost="O(n·R·d + R³)",
    memory_exponent=1.0,
    traits=Traits(
        causal=No("landmarks average queries and keys of the whole sequence, so every output sees the future"),
        rows_sum_to_one=False,
        exact_with=("landmarks={n},pinv=exact",),
        knob=Knob("landmarks"),
        given=(("pinv=exact", {"rows_sum_to_one": True}), ("conv", {"target": "learned", "rows_sum_to_one": False})),
    ),
    settings=("landmarks=5", "landmarks=5,pinv=exact", "landmarks=5,iterations=2,conv=3"),
)
class Nystrom(nn.Module):
    """Softmax attention through R landmarks and a pseudo-inverse.

    Xiong et al. 2021, "Nyströmformer". q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``. The landmarks
    Q̃ and K̃ are the averages (segment means, equation 16) of R runs of tokens whose lengths differ by at most one;
    with fewer tokens than R, each is its own landmark. 64 landmarks and 6 steps are the paper's. Padding is cut out
    before the runs are formed, in self-attention also from the queries. On a CPU the N × R weights pass through its
    cache tile by tile.

    - ``pinv=newton``, equation 14: Z ← Z·(13 - AZ·(15 - AZ·(7 - AZ)))/4 from Aᵀ / (‖A‖₁·‖A‖∞), ``iterations`` times.
      The number is part of the operator: few steps leave out the small singular values of A, whose inverses make
      ``pinv=exact`` far worse where R is below N. Rows of the product sum to 1 only with the exact inverse.
    - ``conv`` adds a depthwise convolution of V along the tokens, with one learned kernel for each head. With it, an
      error against softmax attention is no longer that of an approximation.

    With R = N and the exact pseudo-inverse it is softmax attention; the matrices are multiplied even then.

    Differs from the authors' code: no convolution unless asked for, where theirs has a kernel of 33 or 35; norms are
    those of each head, not the largest of the batch; with R = N nothing is skipped; padding is not averaged into the
    landmarks, and N need not be a multiple of R; the kernel of the convolution starts as a moving average. A and Z are
    in float32 at least, and so is the query side of half precision.

    Raises:
        Unsupported: ``conv`` with keys from another sequence, which has no neighbours of a query.
        UsageError: an even ``conv``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        landmarks: Annotated[int, Field(ge=1, description="runs R that queries and keys are averaged over")] = 64,
        pinv: Annotated[
            Literal["newton", "exact"], Field(description="pseudo-inverse by iterations or by singular values")
        ] = "newton",
        iterations: Annotated[
            int | None, Field(ge=1, description="steps; none: 6, the paper's"), Needs("pinv=newton")
        ] = None,
        conv: Annotated[
            int | None, Field(ge=1, description="odd length of a learned convolution of V; none: no convolution")
        ] = None,
    ) -> None:
        super().__init__()
        if conv is not None and conv % 2 == 0:
            raise UsageError(f"nystrom: option conv={conv} must be odd, so that each token is in the middle")
        if conv is not None and shape.cross:
            raise Unsupported("conv adds the values beside a query, and a query has no neighbours in another sequence")
        self.landmarks, self.pinv, self.cross = landmarks, pinv, shape.cross
        self.iterations = 6 if iterations is None else iterations
        self.convolution = None if conv is None else nn.Parameter(torch.full((shape.H, conv), 1 / conv))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The same example by example: padded tokens are cut out, then the formula is taken word for word."""
        out = torch.zeros_like(q)
        for b in range(q.shape[0]):
            shown = torch.ones_like(k[b, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask[b]
            if not shown.any():
                continue
            asking = torch.ones_like(q[b, 0, :, 0], dtype=torch.bool) if self.cross else shown
            means = []
            for x in (q[b][:, asking], k[b][:, shown]):
                runs = x.tensor_split(min(self.landmarks, x.shape[1]), 1)
                means.append(torch.stack([run.mean(1) for run in runs], 1))
            scale = q.shape[-1] ** -0.5
            A = (means[0] @ means[1].mT * scale).softmax(-1)
            if self.pinv == "exact":
                Z = torch.linalg.pinv(A)
            else:
                one = torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
                Z = A.mT / (A.sum(1).amax(1) * A.sum(2).amax(1))[:, None, None]
                for _ in range(self.iterations):
                    AZ = A @ Z
                    Z = Z @ (13 * one - AZ @ (15 * one - AZ @ (7 * one - AZ))) / 4
            left, right = q[b] @ means[1].mT * scale, means[0] @ k[b][:, shown].mT * scale
            out[b] = left.softmax(-1) @ Z @ right.softmax(-1) @ v[b][:, shown]
            if self.convolution is not None:
                width = self.convolution.shape[1]
                around = pad(v[b] * shown[:, None], (0, 0, width // 2, width // 2))
                for t in range(width):
                    out[b] += self.convolution[:, t, None, None] * around[:, t : t + q.shape[2]]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        (q,) = emptied(None if self.cross else key_mask, q)  # since means of queries are weighted sums
        accumulate = accumulator(q.dtype)
        of_keys = Segments(self.landmarks, k.shape[2], key_mask)
        of_queries = Segments(self.landmarks, q.shape[2]) if self.cross else of_keys
        q_mean, k_mean = of_queries.mean(q), of_keys.mean(k)
        if key_mask is None:
            some, keys, columns = None, None, None
        else:
            # A row without a key sees all of them, so that no kernel makes NaN of it; such examples are set to 0.
            some = key_mask.any(1)[:, None, None, None]
            keys = key_mask[:, None, None] | ~some
            columns = of_keys.filled[:, None, None] | ~some if of_keys.filled is not None else None
        values = attend_from_few_queries(q_mean, k, v, keys)
        # Columns of the inverse that belong to empty runs are zero. Its product with the values may be far larger than
        # the product with a query's weights: hence no half precision from here on.
        A = _weights(q_mean.to(accumulate), k_mean.to(accumulate), of_queries.filled, of_keys.filled)
        inverse = torch.linalg.pinv(A) if self.pinv == "exact" else newton(A, _start(A), self.iterations)
        values = torch.matmul(inverse, values.to(accumulate))
        out = attend_to_few_keys(q.to(accumulate), k_mean.to(accumulate), values, columns, keep=True)
        if self.convolution is not None:
            shown = v if key_mask is None else v.masked_fill(~key_mask[:, None, :, None], 0.0)
            size = self.convolution.shape[1]
            out = out + conv2d(shown, self.convolution[:, None, :, None], padding=(size // 2, 0), groups=v.shape[1])
        out = out.to(q.dtype)
        return out if some is None else out.masked_fill(~some, 0.0)


def _start(A: Tensor) -> Tensor:
    norms = A.sum(-2).amax(-1) * A.sum(-1).amax(-1)
    return torch.div(A.mT, norms.clamp(min=torch.finfo(A.dtype).tiny)[..., None, None])


def _weights(q: Tensor, k: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √D), with zeros in the rows and columns of empty runs."""
    logits = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
    if columns is None:
        return logits.softmax(-1)
    seen = columns[:, None, None] if rows is None else columns[:, None, None] & rows[:, None, :, None]
    weights = logits.masked_fill(~seen, torch.finfo(logits.dtype).min).softmax(-1)
    return weights.masked_fill(~seen, 0.0)
