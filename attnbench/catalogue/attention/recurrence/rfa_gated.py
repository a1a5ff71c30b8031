"""Gated random feature attention: the sums over keys fade by a gate that each token sets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from attnbench.catalogue.engines.head_layer import HeadLayer
from attnbench.catalogue.engines.linear.random_maps import Features, Kernel, ReluFeatures, Temperature, draw_projection
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import LOG2E, accumulator, unit
from attnbench.catalogue.engines.recurrent.decayed_sums import Chunk, decayed_attention, last_state
from attnbench.catalogue.engines.recurrent.feature_sums import quotient
from attnbench.catalogue.engines.recurrent.stretches import by_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import RECURRENCE, Knob, Traits, register
from attnbench.errors import UsageError


@register(
    "rfa-gated",
    kind="mixer",
    family="recurrence",
    also=("kernel",),
    source="Peng et al. 2021, arXiv:2103.02143, section 3.2",
    formula="S_t = g_t S_{t-1} + (1-g_t) φ(k_t)v_tᵀ, z_t likewise,  o_t = φ(q_t)ᵀS_t / φ(q_t)·z_t,  g = σ(wx + b)",
    cost="O(n·R·d)",
    memory_exponent=1.0,
    traits=replace(
        RECURRENCE,
        bias=Traits.bias,
        knob=Knob("features"),
        own_form_both_ways="the gates between two tokens count alike in both directions; the paper "
        "gates causal attention only",
    ),
    settings=("features=16,chunk=5", "features=16,kernel=arccos,chunk=7", "features=9,temperature=0.7,chunk=7"),
)
class GatedRandomFeatureAttention(HeadLayer):
    """Random feature attention whose memory fades by a learned gate.

    Peng et al. 2021, "Random Feature Attention", section 3.2, with features as in ``rfa``. For each head, a token sets
    one number, the gate g_t = sigmoid(w·x_t + b). The sums of the keys before it fade by g_t, and its own key enters
    with the weight 1 - g_t. x ``(B, N, C)``; C × C projections without bias give q, k, v and the output; w ``(H, C)``,
    b ``(H)``. Computed chunk by chunk; no power of the gates overflows. A query reads
    Σ_j (φ(q_t)·φ(k_j)) (1 - g_j) Π g v_j, with the product over the tokens after j up to t, divided by the same sum
    with 1 in place of v_j.

    From queries and keys of length 1/τ, ``kernel=gaussian`` makes 2R features and ``arccos`` R; the decoding state has
    D + 1 sums for each. With g_t = (t - 1)/t it is ``rfa``. At a padded token nothing is written and nothing fades.

    Not causal: what lies between two tokens counts alike in both directions; the paper gates causal attention only.

    Differs from the authors' code: the gate was not released, this is the paper's; the denominator is not clamped; one
    ω for all heads; arccos has a floor of 0.001.

    Raises:
        UsageError: a ``temperature`` with ``kernel=arccos``: it would scale the features as a whole, which cancels.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        features: Features = 64,
        kernel: Kernel = "gaussian",
        temperature: Temperature = 1.0,
        chunk: Chunk = 64,
    ) -> None:
        super().__init__()
        if kernel == "arccos" and temperature != 1.0:
            raise UsageError("rfa-gated: temperature scales all arccos features alike, and the quotient cancels it")
        C = shape.C
        self.heads, self.head_dim, self.causal, self.chunk = shape.H, shape.D, shape.causal, chunk
        self.gaussian, self.temperature = kernel == "gaussian", temperature
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.gate = nn.Linear(C, shape.H)
        self.out = nn.Linear(C, C, bias=False)
        self.sigma = nn.Parameter(torch.ones(shape.H, 1, shape.D))
        self.projection: Tensor
        self.register_buffer("projection", draw_projection(features, shape.D, "iid"))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The weights of all pairs, N × N, from the running sum of the gates' logarithms."""
        (x,) = emptied(key_mask, x)
        B, N, C = x.shape
        q, k, v = (each.view(B, N, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        omega, phi = self.projection.to(x.dtype), []
        for each in (q, k):
            length = each.norm(dim=-1, keepdim=True)
            u = each / length.masked_fill(length == 0, 1.0) * self.sigma / self.temperature @ omega.T
            phi.append(torch.cat([u.cos(), u.sin()], -1) if self.gaussian else u.clamp(min=0) + ReluFeatures.floor)
        g = torch.sigmoid(self.gate(x)).mT  # (B, H, N)
        if key_mask is not None:
            g = g.masked_fill(~key_mask[:, None], 1.0)
        total = g.log().cumsum(-1)
        weights = (
            phi[0] @ phi[1].mT * (-(total[..., :, None] - total[..., None, :]).abs()).exp() * (1 - g)[..., None, :]
        )
        if self.causal:
            weights = weights.tril()
        sums = weights.sum(-1, keepdim=True)
        y = weights @ v / sums.masked_fill(sums == 0, 1.0)
        return self.out(y.transpose(1, 2).reshape(B, N, C))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        q, k, v, gate = self._parts(x, key_mask)
        return self.joined(self.mix(q, k, v, gate))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        """The outputs of the heads, ``(B, H, N, D)``, for q, k, v ``(B, H, N, D)`` and w·x + b ``(B, H, N, 1)``.

        A padded token has w·x + b = infinity.
        """
        scale = (self.sigma / self.temperature).expand(q.shape[0], -1, -1, -1)
        return by_heads(partial(self._compute, chunk=self.chunk), q, k, v, gate, scale)

    def begin(self, x: Tensor) -> Tensor:
        """Sums of φ(k) times v and 1, ``(B, H, F, D + 1)``, after x ``(B, n, C)``, n >= 0; float32 at least."""
        _, k, v, gate = self._parts(x)
        keys, values, log_decay = self._written(k, v, gate, self.sigma / self.temperature)
        return last_state(keys, values, log_decay)

    def prompted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x ``(B, n, C)``, projected once for the outputs and the state."""
        q, k, v, gate = self._parts(x)
        return self.joined(self.mix(q, k, v, gate)), last_state(
            *self._written(k, v, gate, self.sigma / self.temperature)
        )

    def step(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, gate = self._parts(x)
        scale = self.sigma / self.temperature
        keys, values, log_decay = self._written(k, v, gate, scale)
        state = torch.addcmul(state * log_decay.exp2_(), keys.mT, values)
        return self.joined(quotient(self._features(q, scale) @ state).to(x.dtype)), state

    def _parts(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v ``(B, H, N, D)`` and w·x + b ``(B, H, N, 1)``."""
        q, k, v = self.projected(x)
        gate = self.gate(x).mT[..., None]
        if key_mask is not None:
            gate = gate.masked_fill(~key_mask[:, None, :, None], float("inf"))
        return q, k, v, gate

    def _features(self, x: Tensor, scale: Tensor) -> Tensor:
        u = unit(x.to(accumulator(x.dtype))) * scale @ self.projection.to(accumulator(x.dtype)).mT
        return torch.cat([u.cos(), u.sin()], -1) if self.gaussian else u.relu() + ReluFeatures.floor

    def _written(self, k: Tensor, v: Tensor, gate: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate = gate.to(accumulator(gate.dtype))
        share = torch.sigmoid(-gate)
        return self._features(k, scale), torch.cat([v * share, share], -1), logsigmoid(gate) * LOG2E

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, scale: Tensor, *, chunk: int) -> Tensor:
        keys, values, log_decay = self._written(k, v, gate, scale)
        sums = decayed_attention(
            self._features(q, scale), keys, values, log_decay[..., 0], causal=self.causal, chunk=chunk
        )
        share = values[..., -1:]
        seen = share.cumsum(1) if self.causal else share.sum(1, keepdim=True)
        return sums[..., :-1] / sums[..., -1:].masked_fill(seen == 0, 1.0)
