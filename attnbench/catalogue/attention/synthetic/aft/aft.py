"""Attention Free Transformer: each channel weighs the values by its own keys and a learned bias of positions."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.attention.synthetic.aft.modes import BoundedState, Conv, Full, Learned, LocalMode, Simple
from attnbench.catalogue.attention.synthetic.aft.sums import EMPTY
from attnbench.catalogue.engines.decoding.kv_cache import Cache
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import Knob, Needs, No, Traits, register
from attnbench.errors import UsageError

Mode = Literal["full", "local", "simple", "conv"]


@register(
    "aft",
    kind="mixer",
    family="mixing",
    source="Zhai et al. 2021, arXiv:2105.14103, equation 2",
    formula="σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("a layer that mixes its own input; the biases belong to positions of one sequence"),
        bias=No("the learned w of two positions is a bias already"),
        longer=No("w is learned for pairs of positions"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
        knob=Knob("factors"),
        given=(
            ("mode=local", {"knob": Knob("window")}),
            ("mode=simple", {"knob": None, "permutable": True, "longer": True}),
            ("mode=conv", {"knob": None, "longer": True}),
        ),
    ),
    settings=(
        "factors=3",
        "factors=0",
        "mode=local,window=3,factors=3",
        "mode=local,window=9,factors=0",
        "mode=simple",
        "mode=conv,kernel=5",
    ),
)
class AFT(nn.Module):
    """No query meets a key: channel-wise averages, gated by σ(q).

    Zhai et al. 2021, "An Attention Free Transformer": in every channel ``y_i = σ(q_i) Σ_j e^(k_j + w_ij) v_j /
    Σ_j e^(k_j + w_ij)`` (equation 2), where the bias w of two positions is

    - ``mode=full``: learned for every pair, as ``u_i · u'_j`` with ``factors`` columns, or entry by entry
      (``factors=0``); O(n²·d) time, O(n·d) memory;
    - ``mode=local``: the same within ``window`` tokens, 0 beyond. Tokens beyond still count: 0 is not -∞. O(n·w·d);
    - ``mode=simple``: 0. O(n·d);
    - ``mode=conv``: one number for each head and distance; ``kernel`` distances around 0, or up to ``kernel - 1`` back
      if ``shape.causal``; 0 beyond. O(n·kernel·d).

    x is ``(B, N, C)`` and so is the output: projections to q, k, v and an output projection, all C × C without bias,
    belong to the variant. Entries of w are drawn with variance 1. ``full`` and ``local`` are made for ``shape.N``
    tokens; a shorter input uses the first of them. Padded keys and, if causal, later keys get no weight; a token that
    sees no key gives 0. Sums over keys are held as logarithms and means, so that no row overflows or is affected by a
    key that it does not see. A product computes e^(k + w) as e^k · e^w. It loses a key whose w lies so far below the
    largest w of the row, and whose k so far below the largest k of the channel, that both together exceed 87 (708 in
    float64). A channel in which all keys are lost gives 0.

    Differs from the paper: ``window`` is the largest |i - j| with a bias, and the paper's s is one more; w is learned
    as it is, without the normalisation and the initial 0 of AFT-conv; there is an output projection, as in the other
    layers here.

    Raises:
        UsageError: an even kernel, unless causal.
        Unsupported: in ``forward``, an input of ``full`` or ``local`` longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        mode: Annotated[Mode, Field(description="which pairs of positions have a learned bias")] = "full",
        factors: Annotated[
            int | None,
            Field(ge=0, description="columns of u; 0 learns every entry; none: 128"),
            Needs("mode=full or mode=local"),
        ] = None,
        window: Annotated[
            int | None, Field(ge=0, description="tokens on each side with a bias; none: 31"), Needs("mode=local")
        ] = None,
        kernel: Annotated[
            int | None, Field(ge=1, description="distances with a bias; none: 11"), Needs("mode=conv")
        ] = None,
    ) -> None:
        super().__init__()
        kernel, factors = kernel or 11, 128 if factors is None else factors
        self.heads, self.causal = shape.H, shape.causal
        self.q, self.k, self.v, self.out = (nn.Linear(shape.C, shape.C, bias=False) for _ in range(4))
        self.mode = Simple(shape.causal)
        if mode == "full":
            self.mode = Full(shape, factors)
        elif mode == "local":
            self.mode = LocalMode(shape, factors, min(shape.N, 31 if window is None else window))
        elif mode == "conv":
            if kernel % 2 == 0 and not shape.causal:
                raise UsageError(f"aft: option kernel={kernel} must be odd: it is centred on the token")
            self.mode = Conv(shape, kernel)
        for name, drawn in self.mode.draw().items():
            self.register_parameter(name, nn.Parameter(drawn))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        q, k, v = (projection(x).view(B, N, self.heads, -1) for projection in (self.q, self.k, self.v))
        mode, learned, none = self.mode, self._learned(), x.new_zeros(self.heads)
        rows = [
            [mode.w(learned, i, j) if -mode.back <= j - i <= mode.ahead else 0.0 for j in range(N)] for i in range(N)
        ]
        w = torch.stack([torch.stack([none + one for one in row]) for row in rows])
        visible = visible_pairs(x, x, self.causal, key_mask)[:, 0]
        logits = (k[:, None] + w[..., None]).masked_fill(~visible[..., None, None], float("-inf"))
        weights = logits.softmax(2).masked_fill(~visible[..., None, None], 0.0)
        out: Tensor = self.out((q.sigmoid() * (weights * v[:, None]).sum(2)).flatten(2))
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        k, v = self._keys(x)
        if key_mask is not None:
            hidden = ~key_mask[:, :, None]
            k, v = k.masked_fill(hidden, EMPTY), v.masked_fill(hidden, 0.0)
        return self._gate(x, self.mode.mean(k, v, key_mask, self._learned()))

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        accumulate = accumulator(x.dtype)
        return self.k(x).to(accumulate), self.v(x).to(accumulate)

    def _gate(self, x: Tensor, mean: Tensor) -> Tensor:
        out: Tensor = self.out((torch.sigmoid(self.q(x)) * mean).to(x.dtype))
        return out

    def _learned(self) -> Learned:
        return dict(self.named_parameters(recurse=False))

    def begin(self, x: Tensor) -> Cache | BoundedState:
        """The state after x ``(B, n, C)``, n >= 0. Keys beyond the reach of the biases are kept as one sum."""
        return self.mode.begin(*self._keys(x))

    def step(self, state: Cache | BoundedState, x: Tensor) -> tuple[Tensor, Cache | BoundedState]:
        mean, new = self.mode.step(state, *self._keys(x), self._learned())
        return self._gate(x, mean), new

    @staticmethod
    def cached_bytes(shape: Shape, width: int, *, mode: str, **_: object) -> int:
        """The keys and values of a token, float32 at least; only sums and a window unless ``mode`` is full."""
        return 2 * shape.C * max(width, 4) if mode == "full" else 0
