"""Thinformer: attention to a small set of key-value pairs that kernel thinning chooses."""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.products import best_for
from attnbench.catalogue.engines.tiling import budget
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, No, Traits, register


@register(
    "thinformer",
    family="learned pattern",
    source="Carrell et al. 2025, arXiv:2502.12063, section 4",
    formula="softmax(Q·K_Sᵀ/√D)·V_S,  S ⊂ keys, |S| ≈ 2^g·√n, by halving under exp(k·k'/√D)·(v·v' + max|v|²)",
    cost="O(2^g·n^1.5·d)",
    memory_exponent=1.0,
    traits=Traits(
        causal=No("the kept keys are chosen among all of them, so every output depends on later tokens"),
        bias=No("keys are kept for their content alone, which knows nothing of a bias"),
        stochastic=True,
        exact_with=("oversampling=2",),
        knob=Knob("oversampling", step=1),
    ),
    settings=("oversampling=0", "oversampling=1"),
)
class Thinformer(nn.Module):
    """Attention to about 2^g·√n keys, thinned so that their sums stay.

    Carrell et al. 2025, "Low-Rank Thinning": KH-Compress(g), g = ``oversampling``, on the pairs (k, v) under the kernel
    exp(k·k'/√D)·(v·v' + b²), with b the largest |entry| of V. The kernel's feature space holds numerator and
    denominator of softmax attention: what halving preserves there is preserved for every query. One halving takes the
    points two by two; f_i is the difference of their kernel functions. It keeps the first with probability
    (1 - α_i/a_i)/2, clipped to 0..1, else the second. α_i is the product of f_i with the signed sum of the earlier
    differences, and a_i = ‖f_i‖·max_{j<=i} ‖f_j‖·(1/2 + log(2s/δ_s)) for s points. Compress halves 4^(R-1) runs of
    keys, joins every four halves into one, halves these, and so on for R = floor(log₄ M) - g rounds: M/2^R keys are
    left, all of equal weight. With fewer than 4^(g+1) keys nothing is thinned: softmax attention.

    The random numbers, one for each pair, are drawn in the constructor; heads and examples share them. The choice
    itself is not differentiated. Padded keys are cut out first, so that a padded sequence gives the output of the
    shorter one. Since the number of kept keys depends on that of real keys, examples are then thinned one by one.

    Differs from the authors' code: runs may have any even length, so that at most the remainder (M modulo 2·4^(R-1)
    keys, evenly spaced) is dropped before thinning, where they first drop all beyond the largest power of four; each
    run has signs of its own, the first of them a fair coin, instead of one coin that may swap all halves.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``; ``key_mask`` ``(B, M)``. Kernels are float32
    (float64 for float64). More keys than ``shape.M`` use the drawn numbers again.
    """

    draws: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        oversampling: Annotated[
            int, Field(ge=0, le=12, description="g: about 2^g·√n keys are kept; all of them below 4^(g+1)")
        ] = 2,
        failure: Annotated[
            float, Field(gt=0, lt=1, description="δ, probability with which the bound may fail; more balances harder")
        ] = 0.5,
    ) -> None:
        super().__init__()
        self.oversampling, self.failure = oversampling, failure
        self.register_buffer("draws", torch.empty(shape.M).uniform_(-1, 1))

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Softmax attention to the kept keys only, found again recursively, one by one."""
        (B, H, M, D), logits = k.shape, (q @ k.mT) * k.shape[3] ** -0.5
        weights = torch.zeros_like(logits)
        for b, h in product(range(B), range(H)):
            seen = torch.arange(M, device=k.device) if key_mask is None else key_mask[b].nonzero().flatten()
            if self._rounds(len(seen)):
                K, V = k[b, h, seen].detach(), v[b, h, seen].detach()
                kernel = (K @ K.mT * D**-0.5).exp() * (V @ V.mT + V.abs().max() ** 2)
                seen = seen[self._compress(kernel, self._rounds(len(seen)), 0)]
            weights[b, h, :, seen] = logits[b, h, :, seen].softmax(-1)
        return weights @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is None:
            return self._attend(q, k, v)
        examples = zip(q[:, None], k[:, None], v[:, None], key_mask, strict=True)
        return torch.cat([self._attend(q_b, k_b[:, :, real], v_b[:, :, real]) for q_b, k_b, v_b, real in examples])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[2] == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3])
        if self._rounds(k.shape[2]):
            with torch.no_grad():
                kept = self.coreset(k, v).unsqueeze(-1)
            k, v = (x.gather(2, kept.expand(-1, -1, -1, x.shape[3])) for x in (k, v))
        return scaled_dot_product_attention(q, k, v)

    def _rounds(self, M: int) -> int:
        return max(0, (M.bit_length() - 1) // 2 - self.oversampling)

    def _wideness(self, points: int, n: int, rounds: int) -> float:
        """1/2 + log(2s/δ_s) for s ``points`` of the n that are halved, with δ_s = δ·s²/(4^(g+1)·R·n)."""
        return 0.5 + math.log(2 * 4 ** (self.oversampling + 1) * rounds * n / (self.failure * points))

    def coreset(self, k: Tensor, v: Tensor) -> Tensor:
        """``(B, H, kept)``: the positions of the keys kept of k, v ``(B, H, M, D)``, M >= 4^(g+1)."""
        (B, H, M, D), dtype = k.shape, accumulator(k.dtype)
        x, y = (k.to(dtype) * D**-0.25).reshape(B * H, M, D), v.to(dtype).reshape(B * H, M, -1)
        shift = torch.linalg.vecdot(x, x).amax(-1).neg_().view(-1, 1, 1, 1)
        offset = torch.linalg.vector_norm(y, torch.inf, (1, 2)).square_().view(-1, 1, 1, 1)
        rounds = self._rounds(M)
        runs = 4 ** (rounds - 1)
        points = M // (2 * runs) * 2
        n, used = runs * points, 0
        kept: Tensor = (torch.arange(n, device=k.device) * M // n).expand(B * H, -1)
        for _ in range(rounds):
            pairs = points // 2
            numbers = torch.arange(used, used + runs * pairs, device=k.device) % len(self.draws)
            draws = self.draws[numbers].to(dtype).mul_(self._wideness(points, n, rounds)).view(runs, pairs)
            sides = (t.expand(-1, runs, 1, 1).reshape(-1, 1, 1) for t in (shift, offset))
            products = _products(_paired(x, kept, pairs), _paired(y, kept, pairs), *sides)
            first, kept = _balance(products, draws.repeat(B * H, 1)), kept.reshape(-1, pairs, 2)
            kept = torch.where(first, kept[..., 0], kept[..., 1]).view(B * H, -1)
            used, runs, points = used + runs * pairs, runs // 4, 2 * points
        return kept.view(B, H, -1)

    def _compress(self, kernel: Tensor, level: int, run: int) -> list[int]:
        m, rounds = len(kernel), self._rounds(len(kernel))
        points = m // (2 * 4 ** (rounds - 1)) * 2
        n = 4 ** (rounds - 1) * points
        if level == 1:
            run_of = [(run * points + i) * m // n for i in range(points)]
        else:
            run_of = [j for part in range(4) for j in self._compress(kernel, level - 1, 4 * run + part)]
        pairs = list(zip(run_of[::2], run_of[1::2], strict=True))
        drawn = n - (n >> (level - 1)) + run * len(pairs)
        wide, largest, kept, total = self._wideness(len(run_of), n, rounds), 0.0, [], torch.zeros_like(kernel[0])
        for i, (a, b) in enumerate(pairs):
            f = kernel[a] - kernel[b]
            norm = float(f[a] - f[b]) ** 0.5
            largest = max(largest, norm)
            bound = float(self.draws[(drawn + i) % len(self.draws)]) * wide * norm * largest
            sign = 1 if bound >= float(total[a] - total[b]) else -1
            total = total + sign * f
            kept.append(a if sign > 0 else b)
        return kept


def _paired(x: Tensor, kept: Tensor, pairs: int) -> Tensor:
    """Rows ``kept`` ``(G, n)`` of x ``(G, M, D)``, as runs of pairs: ``(X, P, 2, D)``."""
    G, M, D = x.shape
    if kept.shape[1] < M:
        first = torch.arange(0, G * M, M, device=x.device).unsqueeze(1)
        x = x.reshape(-1, D).index_select(0, (kept + first).view(-1))
    return x.reshape(-1, pairs, 2, D)


def _products(x: Tensor, y: Tensor, shift: Tensor, offset: Tensor) -> Tensor:
    """Products ``(X, P, P)`` of the differences f_i and f_j of each run, from x and y ``(X, P, 2, D)``.

    The keys ``x`` are scaled; ``shift`` ``(X, 1, 1)`` keeps the exponential finite and scales the kernel of a head.
    """
    X, P = x.shape[:2]
    out = x.new_empty(X, P, P)
    step = max(1, budget("thinformer.products", x.device) // P**2)
    for a in range(0, X, step):
        tile = [t[a : a + step] for t in (x, y, shift, offset)]
        across = _kernel(0, 1, *tile)
        torch.sub(_kernel(0, 0, *tile).add_(_kernel(1, 1, *tile)).sub_(across), across.mT, out=out[a : a + step])
    return out


def _kernel(i: int, j: int, x: Tensor, y: Tensor, shift: Tensor, offset: Tensor) -> Tensor:
    with best_for(y[:, :, i], y[:, :, j].mT):
        weight = torch.baddbmm(offset, y[:, :, i], y[:, :, j].mT)
        return torch.baddbmm(shift, x[:, :, i], x[:, :, j].mT).exp_().mul_(weight)


def _balance(products: Tensor, draws: Tensor) -> Tensor:
    """A mask of the pairs that keep their first key: ``(X, P)`` bool."""
    norm = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt_()
    bound = norm.cummax(-1).values.mul_(norm).mul_(draws)
    signs, sums, one = torch.empty_like(bound), torch.zeros_like(bound), bound.new_ones(())
    for i in range(bound.shape[1]):
        torch.copysign(one, bound[:, i] - sums[:, i], out=signs[:, i])
        sums[:, i + 1 :].addcmul_(signs[:, i : i + 1], products[:, i, i + 1 :])
    return signs > 0
