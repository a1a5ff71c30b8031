"""Linear Transformer: the exponential replaced by a product of positive feature vectors."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.linear import fused
from attnbench.catalogue.engines.linear.feature_attention import Chunk, FeatureAttention, stepped
from attnbench.catalogue.engines.linear.feature_map import FeatureMap
from attnbench.catalogue.engines.linear.maps import elu_plus_one
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.recurrent.feature_sums import feature_sums, quotient, with_ones
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.catalogue.engines.rotation import angles, rotate
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import No, Traits, register
from attnbench.errors import Unsupported, UsageError

_LEAST = 2.0**-120
"""Least feature of a key. Float32 reaches down to 2^-126, and so small a share is lost in any sum with a usual key."""

_NO_STEP = "form=triton has whole sequences only: a step is a few small products, which form=torch takes"
_ONE_WIDTH = "form=triton keeps D x D sums, for values as wide as keys; form=torch takes any width"


class Turned(NamedTuple):
    """The state of decoding with rotary positions."""

    of_values: Tensor
    """Σ R_j φ(k_j) v_jᵀ, ``(B, H, D, D)``, float32 at least."""
    of_ones: Tensor
    """Σ φ(k_j), ``(B, H, D, 1)``."""
    length: int


class EluPlusOne(FeatureMap):
    """φ(x) = elu(x) + 1, computed as elu'(x)·(max(x, 0) + 1), which keeps its digits for elu near -1.

    The derivative is exp(x) below 0 and 1 above. The features of a query that is negative throughout are divided by the
    largest of them, which cancels. Every feature of a key is at least :data:`_LEAST`, so that no product underflows.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def queries(self, x: Tensor, out: Tensor) -> None:
        self._features(x - x.amax(-1, keepdim=True).clamp_(max=0.0), out)

    def keys(self, x: Tensor, out: Tensor) -> None:
        self._features(x, out)
        out.clamp_(min=_LEAST)

    def _features(self, x: Tensor, out: Tensor) -> None:
        torch.clamp(x, min=0.0, out=out).add_(1.0)
        torch.ops.aten.elu_backward.grad_input(out, 1.0, 1.0, 1.0, False, x, grad_input=out)  # False: x is the input

    def queries_grad(self, x: Tensor, features: Tensor, grad: Tensor) -> Tensor:
        return grad.mul_(features.clamp_(max=1.0))  # exp(x) for x < 0, else 1


@register(
    "linear",
    family="kernel",
    source="Katharopoulos et al. 2020, arXiv:2006.16236, sections 3.2 and 3.3",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    memory_exponent=1.0,
    fused="linear:form=triton",
    traits=Traits(
        target="other",
        decode=True,
        shares="query by query",
        permutable=True,
        given=(
            (
                "form=triton",
                {"decode": No(_NO_STEP), "v_dim": No(_ONE_WIDTH), "dtypes": ("bfloat16", "float16", "float32")},
            ),
            ("rotary=true", {"rows_sum_to_one": False, "permutable": False, "shares": "head by head"}),
        ),
    ),
    settings=("chunk=5", "rotary=true,chunk=5"),
)
class Linear(FeatureAttention):
    """Softmax replaced by φ(q)·φ(k), φ = elu + 1, summed in O(n).

    Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3. The logits are not scaled by 1/√D. A
    difference from softmax attention is a distance, not an error. q ``(B, H, N, D)``, k and v ``(B, H, M, D)``; a
    padded key has φ(k) = 0 (masking k itself would give φ(0) = 1); causal attention by prefix sums, chunk by chunk.

    ``form=triton`` is the same in a few fused kernels (:mod:`attnbench.catalogue.engines.linear.fused`) for a GPU. On
    an H100 its outputs and gradients are those of the formula. ``form=fla`` sums over flash-linear-attention's kernel,
    causal only.

    However negative q is, each row of weights sums to 1: a factor of a whole query cancels and is taken out. A key
    feature below 2^-120, where an entry of k is below -83, is raised to 2^-120. Next to a key above -66 in the same
    channel (above -46 in float64) that is less than a rounding error. A query whose keys are all below -83 in the
    channels that it weighs gives all of them the same weight. ``form=triton`` does neither: where the features of a
    query, or of all its keys, underflow, below -87, it gives NaN.

    ``rotary=true`` turns φ(q_i) and φ(k_j) by angles that grow with i and j, in the numerator only: equation 19 of
    Su et al. 2021, arXiv:2104.09864. The numerator then depends on i - j, and the denominator, which must stay
    positive, does not, so that rows need not sum to 1. A row whose features all underflow gives 0.

    Differs from the authors' code: nothing is added to the denominator (they add 1e-6).

    Raises:
        Unsupported: a fused form without its package or a CUDA device, or in float64; ``form=triton`` in decoding, or
            for D > 128; ``form=fla`` that is not causal; ``rotary`` with an odd D.
        UsageError: ``chunk`` or ``rotary`` with a fused form, which has chunks of its own and no positions.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        chunk: Chunk = None,
        form: Annotated[Literal["auto", "torch", "triton", "fla"], Field(description=forms.WHICH)] = "auto",
        rotary: Annotated[bool, Field(description="turn features by their positions, in the numerator only")] = False,
    ) -> None:
        super().__init__(shape, chunk)
        self.form, self.rotary, self.whole = form, rotary, shape.E == shape.D
        self.at_once = not rotary
        if rotary and shape.D % 2:
            raise Unsupported(f"rotary pairs the channels: head_dim {shape.D} must be even")
        if form in ("triton", "fla"):
            if rotary:
                raise UsageError(f"linear: rotary belongs to form=torch; the kernels of form={form} know no positions")
            if chunk is not None:
                raise UsageError(f"linear: chunk belongs to form=torch; the kernels of form={form} have their own")
        if form == "triton":
            if not self.whole:
                raise Unsupported(_ONE_WIDTH)
            fused.require_triton(shape.D)
        else:
            forms.require("linear", form, self._fast())

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()) for x in (q, k))
        return phi_q @ phi_k.mT

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if not self.rotary:
            return super().dense(q, k, v, key_mask=key_mask)
        i, j = (torch.arange(x.shape[2], dtype=torch.float64, device=x.device) for x in (q, k))
        theta = 10000.0 ** (-torch.arange(0, q.shape[3], 2, dtype=torch.float64, device=q.device) / q.shape[3])
        phi_q, phi_k = (torch.where(x > 0, x + 1, x.clamp(max=0).exp()).double() for x in (q, k))
        a, b = (torch.complex(*phi.chunk(2, -1)) for phi in (phi_q, phi_k))
        apart = (i[:, None] - j)[..., None] * theta
        turned = torch.einsum("bhic,bhjc,ijc->bhij", a, b.conj(), torch.polar(torch.ones_like(apart), apart)).real
        visible = visible_pairs(q, k, self.causal, key_mask)
        total = ((phi_q @ phi_k.mT) * visible).sum(-1, keepdim=True)
        return (turned * visible / total.masked_fill(total == 0, 1.0) @ v.double()).to(v.dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if self.rotary:
            return self._turned(q, k, v, key_mask)
        if self.form == "triton":
            return fused.attend(q, k, v, causal=self.causal, key_mask=key_mask)
        given = (q, k, v) if key_mask is None else (q, k, v, key_mask)
        name = f"linear, causal={self.causal}"
        return forms.attend(name, self.form, self._plain, *given, fast=self._fast())

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return super().attend(q, k, v, key_mask)

    def _fast(self) -> dict[str, fla.Kernel]:
        if self.chunk is not None or self.rotary:
            return {}
        one_width: dict[str, fla.Kernel] = {"triton": self._triton} if self.whole else {}
        return {**one_width, "fla": _fla} if self.causal else one_width

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return fused.attend(q, k, v, causal=self.causal, key_mask=key_mask)

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        if self.form == "triton":  # asked for in decoding only
            raise Unsupported(_NO_STEP)
        return EluPlusOne(self.head_dim)

    def _turned(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        out, dtype = q.dtype, accumulator(q.dtype)
        k, v = emptied(key_mask, k, v)
        phi_q, phi_k = (elu_plus_one(x.to(dtype)) for x in (q, k))
        sums = partial(
            feature_sums, of_queries=_as_it_is, of_keys=_as_it_is, causal=self.causal, chunk=self.chunk or 64
        )
        turned = (rotate(phi, *angles(0, phi.shape[2], phi)) for phi in (phi_q, phi_k))
        values = with_ones(v.to(dtype), key_mask)
        above = by_heads(sums, *turned, values[..., :-1])
        below = by_heads(sums, phi_q, phi_k, values[..., -1:])
        return quotient(torch.cat([above, below], -1)).to(out)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """The sums over a prompt ``(B, H, n, D)``, n >= 0; :class:`Turned` with rotary positions."""
        if not self.rotary:
            return super().begin(q, k, v)
        phi = elu_plus_one(k.to(accumulator(k.dtype)))
        turned = rotate(phi, *angles(0, k.shape[2], phi))
        return Turned(turned.mT @ v.to(phi.dtype), phi.sum(2)[..., None], k.shape[2])

    @torch.no_grad()
    def step(self, state: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        dtype = state.of_values.dtype
        if not isinstance(state, Turned):
            out = q.dtype
            if out != dtype:
                q, k, v = (x.to(dtype) for x in (q, k, v))
            of_query = _positive(q - q.amax(-1, keepdim=True).clamp_(max=0.0))
            return stepped(state, of_query, _positive(k).clamp_(min=_LEAST), None, v, out)
        phi_q, phi_k = (elu_plus_one(x.to(dtype)) for x in (q, k))
        turn = angles(state.length, 1, phi_k)
        of_values = state.of_values + rotate(phi_k, *turn).mT * v.to(dtype)
        of_ones = state.of_ones + phi_k.mT
        sums = torch.cat([rotate(phi_q, *turn) @ of_values, phi_q @ of_ones], -1)
        return quotient(sums).to(q.dtype), Turned(of_values, of_ones, state.length + 1)


def _positive(x: Tensor) -> Tensor:
    return torch.ops.aten.elu_backward(x.clamp(min=0.0).add_(1.0), 1.0, 1.0, 1.0, False, x)  # type: ignore[no-any-return]


def _fla(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    phi_q, phi_k = elu_plus_one(q), elu_plus_one(k)
    if key_mask is not None:
        phi_k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (phi_k, v))
    return fla.run("linear", phi_q, phi_k, v)


def _as_it_is(x: Tensor) -> Tensor:
    return x
