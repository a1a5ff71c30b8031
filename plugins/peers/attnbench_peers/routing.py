"""routing-transformer: attention within clusters."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, register
from attnbench.catalogue.attention.selection.routing import Routing
from attnbench_peers.layouts import copy_into


@register(
    "peer.routing",
    family="learned pattern",
    source="routing-transformer, KmeansAttention",
    formula="oᵢ = mean over centroids c that pick i of Σ_{j∈K_c} softmax_{j∈K_c}(qᵢ·kⱼ/√D) vⱼ",
    cost="O(n·(c + w)·d)",
    time_exponent=1.5,
    traits=Traits(
        target="other",
        causal=No("a centroid ranks tokens against later ones, so that which of them meet depends on the future"),
        cross=No("not offered by this adapter"),
        key_padding=No("not offered by this adapter"),
        stochastic=True,
        rows_sum_to_one=False,
        permutable=True,
        dtypes=("float32", "float64"),
    ),
    settings=("clusters=3,window=5",),
)
class PeerRouting(nn.Module):
    """routing-transformer's KmeansAttention with separate queries and keys, with our centroids.

    This is the core alone, with q ``(B, H, N, D)``. Centroids are those of ``routing`` from the same seed, and are
    marked as initialised; otherwise the first call would run ten steps of k-means. The package does not layer-normalise
    queries and keys. Given normalised ones it agrees with ``routing``, except that it adds 1e-5 to the number of
    clusters that a token is in. In training mode every call also makes a step of k-means for the running average.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        clusters: Annotated[int | None, Field(ge=1, description="centroids of each head; none: √n")] = None,
        window: Annotated[
            int | None, Field(ge=1, description="tokens that a centroid picks; none: n / clusters")
        ] = None,
    ) -> None:
        super().__init__()
        from routing_transformer.routing_transformer import KmeansAttention

        clusters = clusters or max(1, round(math.sqrt(shape.N)))
        window = window or -(-shape.N // clusters)
        if window > shape.N:
            raise Unsupported(f"a centroid cannot pick {window} of {shape.N} tokens")
        self.shape, self.clusters, self.window = shape, clusters, window
        ours = Routing(shape, clusters=clusters, window=window)
        self.peer = KmeansAttention(clusters, window, shape.H, shape.D, causal=False, shared_qk=False)
        copy_into(self.peer.kmeans.means, ours.centroids)
        self.peer.kmeans.initted.fill_(True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.peer(q, k, v)[0]  # the second result is the loss that pulls tokens to centroids
        return out
