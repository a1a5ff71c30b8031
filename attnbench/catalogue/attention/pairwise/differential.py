"""Differential attention: one softmax map minus another, so that their common part cancels."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.kv_cache import Cache, CachedDecoding, attend
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible, masked
from attnbench.contract.variant import VARIANTS, No, Traits, register
from attnbench.errors import Unsupported

_EPS = 1e-5


@register(
    "differential",
    family="pairwise",
    source="Ye et al. 2024, arXiv:2410.05258, sections 2.1 and 2.2; authors' code, multihead_flashdiff_2.py",
    formula="oᵢ = norm(Σ_j (softmax_j(q¹ᵢ·k¹ⱼ/√(D/2)) - λ·softmax_j(q²ᵢ·k²ⱼ/√(D/2))) vⱼ)·(1 - λ₀)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        decode=True,
        bias=No("the paper adds nothing to the logits of its two maps"),
        mask=True,
        q_start=True,
        sink=No("its two maps would share one logit, which the paper does not have"),
        shares="by itself",
        v_dim=No("the norm of a head divides all columns of its output by one number"),
        stochastic=True,
        rows_sum_to_one=False,
        permutable=True,
    ),
    settings=("", "lambda_init=0.2,norm=false"),
)
class Differential(CachedDecoding, nn.Module):
    """The difference of two softmax maps, each from half the channels.

    Ye et al. 2024, "Differential Transformer". The channels of q and k are cut in half, q = [q¹, q²] and k = [k¹, k²],
    and each half has a softmax of its own, scaled by 1/√(D/2). The second map, times λ, is taken off the first, and
    both weigh the same values: a head has D/2 channels in its queries and D in its values, as in the paper, where such
    a head takes the place of two. Rows of weights sum to 1 - λ, and a weight may be negative.

    λ = exp(a·b) - exp(c·d) + λ₀ is one number for all heads; a, b, c and d have D/2 entries, drawn from N(0, 0.1²), and
    λ₀ = ``lambda_init``. With ``norm`` the output of each head is divided by its root mean square, and multiplied by
    1 - λ₀ and by learned numbers, 1 at first, that all heads share. Without it, and with λ = 0, it is softmax attention
    of the first half of the channels.

    q ``(B, H, N, D)``, k and v ``(B, K, M, D)`` -> ``(B, H, N, D)``. Computed by two calls of PyTorch's fused attention
    (``sdpa``) on the same keys and values. A call gets the queries with zeros in the half that is not its own, times
    √2 for the scale: kernels want keys as wide as values. That costs twice the products of queries and keys, as much as
    the authors' way for such kernels, four narrow calls on halves of the values, with half of its exponentials. Memory
    is O(n) where that of the kernel is.

    Differs from the authors' code: λ₀ is one option for all layers (there 0.8 - 0.6·exp(-0.3·l) in layer l = 0, 1, …,
    so 0.2 in the first; the paper also tries 0.8 throughout); queries and keys are not turned by their places.

    Raises:
        Unsupported: an odd D.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        lambda_init: Annotated[float, Field(ge=0, lt=1, description="λ₀, about what λ is before training")] = 0.8,
        norm: Annotated[bool, Field(description="divide a head's output by its root mean square")] = True,
    ) -> None:
        super().__init__()
        if shape.D % 2:
            raise Unsupported(f"each map has half of the channels: head_dim {shape.D} must be even")
        self.capacity, self.visible, self.places = shape.M, masked(shape), Visible.of(shape)
        self.lambda_init = lambda_init
        self.attend = VARIANTS.get("sdpa").make(shape)
        self.of_lambda = nn.Parameter(0.1 * torch.randn(4, shape.D // 2))
        self.scale = nn.Parameter(torch.ones(shape.D)) if norm else None

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        N, M = q.shape[2], k.shape[2]
        k, v = (of_query_heads(x, q.shape[1]) for x in (k, v))
        allowed = self.places.pairs(slice(0, N), slice(0, M), M, q.device)
        allowed = allowed if key_mask is None else allowed & key_mask[:, None, None]
        halves = zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        first, second = (masked_attention(one, other, v, allowed) for one, other in halves)
        a, b, c, d = self.of_lambda
        y: Tensor = first - ((a * b).sum().exp() - (c * d).sum().exp() + self.lambda_init) * second
        if self.scale is None:
            return y
        return y / (y.square().mean(-1, keepdim=True) + _EPS).sqrt() * self.scale * (1 - self.lambda_init)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v = emptied(key_mask, k, v)
        first, second = (self.attend(half, k, v, key_mask=key_mask) for half in _halves(q))
        return self._difference(first, second)

    def _difference(self, first: Tensor, second: Tensor) -> Tensor:
        dtype = accumulator(first.dtype)
        a, b, c, d = self.of_lambda.to(dtype)
        weight = (a @ b).exp() - (c @ d).exp() + self.lambda_init
        y: Tensor = first.to(dtype) - weight * second.to(dtype)
        if self.scale is not None:
            one_over = (y.square().mean(-1, keepdim=True) + _EPS).rsqrt()
            y = y * one_over * (self.scale.to(dtype) * (1 - self.lambda_init))
        return y.to(first.dtype)

    @torch.no_grad()
    def step(self, state: Cache, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Cache]:
        state = state.append(k, v)
        seen = slice(self.first_seen(state), None)
        keys, values = state.keys[:, :, seen], state.values[:, :, seen]
        halves = zip(q.chunk(2, -1), keys.chunk(2, -1), strict=True)
        first, second = (attend(one, other, values) for one, other in halves)
        return self._difference(first, second), state


def _halves(q: Tensor) -> tuple[Tensor, Tensor]:
    """q ``(B, H, n, D)`` with its second half emptied, and with its first half emptied, times √2."""
    one, other = (q * 2**0.5).chunk(2, -1)
    nothing = torch.zeros_like(one)
    return torch.cat((one, nothing), -1), torch.cat((nothing, other), -1)
