"""Forgetting attention: a logit falls with the gates of the tokens in between."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from attnbench.catalogue.engines import fla, forms
from attnbench.catalogue.engines.decoding.kv_cache import Cache, attend
from attnbench.catalogue.engines.head_layer import CoreLayer
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.pair_scores import Chunk, PairScore, attend_by_score
from attnbench.catalogue.engines.precision import accumulator
from attnbench.contract.problem.reference import masked_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import LOG_FORGET
from attnbench.contract.variant import Core, No, Traits, register

_TRAITS = Traits(
    target="other",
    cross=No("the gates are those of the tokens between query and key, which stand in one sequence"),
    bias=No("the gates are a bias by position, and the paper has no other"),
    sink=No("the paper's softmax has none; a gate near 0 lets a token forget all that came before"),
    decode=True,
    own_form_both_ways="the gates between two tokens count in either direction; the paper is causal",
    given=(("form=fla", {"key_padding": No(fla.NO_MASK)}),),
)


class FoxState(NamedTuple):
    """The state of decoding."""

    cache: Cache
    totals: Tensor
    """The sum of log f up to each token, ``(B, H, n)``, float64."""


class ForgetfulSoftmax(nn.Module):
    """Softmax attention with a forget gate in the logits.

    q, k ``(B, H, N, D)``, v ``(B, H, N, E)`` and log f ``(B, H, N, 1)``: the logit of query i and key j is
    q_i·k_j/√D + log f_{j+1} + … + log f_i. The layer's projections are left out. A padded token has f = 1. Not causal:
    the gates between two tokens are subtracted in the same way in both directions.

    Differs from the paper: the attention alone is here, without its layer.
    """

    def dense(self, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v, log_forget = emptied(key_mask, k, v, log_forget)
        after = log_forget.expand(-1, -1, -1, q.shape[2]).mT.triu(1).cumsum(-1)  # at (j, i), over j < l <= i
        return masked_attention(q, k, v, visible_pairs(q, k, self.causal, key_mask), after + after.mT)

    def __init__(self, shape: Shape, *, chunk: Chunk = None, form: forms.Fla = "auto") -> None:
        super().__init__()
        self.fused = {"fla": partial(fla.run, "fox")} if shape.causal and chunk is None else {}
        self.form = forms.require("fox", form, self.fused)
        self.causal, self.capacity, self.chunk = shape.causal, shape.N, chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        k, v, log_forget = emptied(key_mask, k, v, log_forget)
        tiles, fast = partial(self._by_tiles, key_mask=key_mask), self.fused if key_mask is None else {}
        return forms.attend("fox", self.form, tiles, q, k, v, log_forget[..., 0], fast=fast)

    def _by_tiles(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, *, key_mask: Tensor | None) -> Tensor:
        total = log_f.double().cumsum(-1)  # with dtype=, torch would add the gradients up in float32
        score = PairScore(forgetful if self.causal else forgetful_both_ways, totals=total)
        q = q.to(log_f.dtype) * q.shape[-1] ** -0.5
        return attend_by_score(score, q, k, v, causal=self.causal, key_mask=key_mask, chunk=self.chunk)

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> FoxState:
        return FoxState(Cache.of(k, v, self.capacity), log_forget[..., 0].cumsum(-1, dtype=torch.float64))

    @torch.no_grad()
    def step(self, state: FoxState, q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> tuple[Tensor, FoxState]:
        cache = state.cache.append(k, v)
        last = state.totals[..., -1:].sum(-1, keepdim=True)  # 0 before the first token
        totals = torch.cat((state.totals, last + log_forget[..., 0]), -1)
        added = (totals[..., -1:] - totals)[:, :, None].to(log_forget.dtype)
        return attend(q, cache.keys, cache.values, added), FoxState(cache, totals)

    @staticmethod
    def cached_bytes(shape: Shape, width: int, **_: object) -> int:
        """The keys and values of a token, and each head's sum of log f in float64."""
        return shape.K * ((shape.D + shape.E) * width + 8)


@register(
    "fox",
    kind="mixer",
    family="pairwise",
    source="Lin et al. 2025, arXiv:2503.02130, section 3",
    formula="oᵢ = Σ_{j<=i} softmax_j(qᵢ·kⱼ/√D + Σ_{j<l<=i} log f_l) vⱼ,  f = σ(w·x + b)",
    cost="O(n²·d)",
    memory_exponent=1.0,
    traits=replace(_TRAITS, stochastic=True, rows_sum_to_one=False),
    settings=("chunk=5", "chunk=7"),
    core=Core(
        make=ForgetfulSoftmax,
        formula="oᵢ = Σ_{j<=i} softmax_j(qᵢ·kⱼ/√D + Σ_{j<l<=i} log f_l) vⱼ",
        traits=replace(_TRAITS, reads=(LOG_FORGET,)),
        settings=("chunk=5", "chunk=7"),
    ),
)
class ForgettingAttention(CoreLayer):
    """Softmax attention with a forget gate in the logits.

    Lin et al. 2025, "Forgetting Transformer: Softmax Attention with a Forget Gate". Every token l has one gate
    f_l = σ(w·x_l + b) in (0, 1) for each head. The logit of query i and key j is
    q_i·k_j/√D + log f_{j+1} + … + log f_i: the key's own gate is not in the sum, the query's is. With f = 1 it is
    softmax attention; with one f for all tokens it is ALiBi of the slope -log f.

    x ``(B, N, C)`` gives q, k and v by C × C projections without a bias, and the gates by C × H with one; the output
    projection is C × C. There are no other positions. A padded token has f = 1.

    The sum between two tokens is a difference c_i - c_j of running sums, a bias of rank one. It is made tile by tile,
    forward and backward, so that memory is O(n). The running sums and their gradients are in float64: what follows a
    strong gate keeps its digits, and so does the gradient of a gate, a small difference of sums over all pairs.
    Decoding keeps keys, values and running sums.

    Not causal: the gates between two tokens are subtracted in the same way in both directions, -|c_i - c_j|.

    Differs from the paper: this is the layer of its plain form, without the output gate, the norm of q and k and the
    shift of k and v of its "Pro" form; tiles whose gates leave nothing are computed all the same.
    """

    def __init__(self, shape: Shape, *, chunk: Chunk = None, form: forms.Fla = "auto") -> None:
        super().__init__()
        C, self.heads, self.causal = shape.C, shape.H, shape.causal
        self.core = ForgetfulSoftmax(shape, chunk=chunk, form=form)
        self.qkv = nn.Linear(C, 3 * C, bias=False)
        self.forget = nn.Linear(C, shape.H)
        self.out = nn.Linear(C, C, bias=False)

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        q, k, v = (part.view(B, N, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        log_f = torch.sigmoid(self.forget(x)).log().mT[..., None]
        return self.joined(self.core.dense(q, k, v, log_f, key_mask=key_mask))

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return self.joined(self.core(*self._parts(x), key_mask=key_mask))

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.projected(x), logsigmoid(self.forget(x).to(accumulator(x.dtype))).mT[..., None]

    cached_bytes = staticmethod(ForgetfulSoftmax.cached_bytes)


def forgetful(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor) -> Tensor:
    """q_i·k_j + c_i - c_j of x ``(G, n, D)``, y ``(G, m, D)``, and c ``(G, n, 1)`` and ``(G, m, 1)`` in float64."""
    return (of_x + of_y.neg().mT).to(x.dtype).baddbmm_(x, y.mT)


def forgetful_both_ways(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor) -> Tensor:
    """q_i·k_j - |c_i - c_j|."""
    return (of_x + of_y.neg().mT).to(x.dtype).abs().baddbmm_(x, y.mT, beta=-1)
