"""performer-pytorch: FAVOR+ and, beneath it, linear attention as two einsums."""

from __future__ import annotations

import contextlib
import io
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import elu

from attnbench import No, Shape, Traits, Unsupported, build, register
from attnbench.catalogue.attention.kernel.performer import Performer

NO_MASK = No("the package masks by setting keys to zero before the feature map, which does not hide them")


@register(
    "peer.performer",
    family="kernel",
    source="performer-pytorch, FastAttention",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = exp(ωx - ‖x‖²/2),  x ← x/D^¼,  ω ~ N(0, I)",
    cost="O(n·R·d)",
    traits=Traits(
        stochastic=True, key_padding=NO_MASK, permutable=True, converges_with="features", dtypes=("float32", "float64")
    ),
    settings=("features=16", "features=16,draw=own"),
)
class PeerPerformer(nn.Module):
    """performer-pytorch's FastAttention, with our ω.

    This is the attention core alone, without projections; q is ``(B, H, N, D)``, as the package takes it. ω is the one
    that ``performer`` draws from the same seed; with ``draw=own`` it is the package's.

    Where it differs from its formula: 1e-4 is added to each exponential after the largest exponent is subtracted. This
    cannot be switched off, and gives mean(V) if the variance is large. The largest exponent of a key is taken without
    ‖k‖²/2, and over the whole sequence even if causal, so that later keys reach earlier outputs through the 1e-4. With
    ``draw=own`` ω comes from a QR whose signs are not corrected: its products are biased.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        features: Annotated[int, Field(ge=1, description="random projections R")] = 256,
        draw: Annotated[Literal["ours", "own"], Field(description="whose ω: performer's, or the package's")] = "ours",
    ) -> None:
        super().__init__()
        from performer_pytorch import FastAttention

        self.shape, self.features = shape, features
        ours = Performer(shape, features=features) if draw == "ours" else None
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it has no CUDA kernel
            self.peer = FastAttention(shape.D, nb_features=features, causal=shape.causal)
        if ours is not None:
            self.peer.projection_matrix = ours.projection

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None:
            raise Unsupported(f"key padding: {NO_MASK}")
        out: Tensor = self.peer(q, k, v)
        return out

    def _ours(self) -> nn.Module:
        ours = build("performer", self.shape, features=self.features)
        ours.projection = self.peer.projection_matrix
        return ours

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self._ours().dense(q, k, v, key_mask=key_mask)  # type: ignore[operator]  # it is a Performer
        return out

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """φ(q)·φ(k) / R with the package's ω, without the 1e-4."""
        out: Tensor = self._ours().kernel(q, k)  # type: ignore[operator]  # it is a Performer
        return out


@register(
    "peer.linear",
    family="kernel",
    source="performer-pytorch, linear_attention and causal_linear_attention_noncuda",
    formula="φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k),  φ(x) = elu(x) + 1",
    cost="O(n·d²)",
    traits=Traits(target="other", key_padding=NO_MASK, permutable=True, dtypes=("float32", "float64")),
)
class PeerLinear(nn.Module):
    """Linear attention by performer-pytorch's einsums, of elu + 1.

    This is the core alone, with q ``(B, H, N, D)``. The package's functions take features; elu(x) + 1 is PyTorch's own.
    If causal, 1e-6 is added to every sum of keys, and a 128th of the sequence gets a D × D matrix for each token.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from performer_pytorch import performer_pytorch

        self.shape = shape
        self.attend = (
            performer_pytorch.causal_linear_attention_noncuda if shape.causal else performer_pytorch.linear_attention
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None:
            raise Unsupported(f"key padding: {NO_MASK}")
        out: Tensor = self.attend(elu(q) + 1, elu(k) + 1, v)
        return out

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("linear", self.shape).dense(q, k, v)  # type: ignore[operator]  # it is a Linear
        return out
