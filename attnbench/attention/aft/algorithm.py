"""Attention Free Transformer: each channel weighs the values by its own keys and a learned bias of positions."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import embedding

from attnbench.attention.aft.full import full
from attnbench.attention.aft.sums import EMPTY, Sums, join, read, running, windowed
from attnbench.engines.decoding.kv_cache import Cache
from attnbench.engines.masks import emptied, visible_pairs
from attnbench.engines.precision import accumulator
from attnbench.errors import Unsupported, UsageError
from attnbench.shape import Shape
from attnbench.variant import Knob, No, Traits, register

Mode = Literal["full", "local", "simple", "conv"]

_BELONGS: dict[str, tuple[Mode, ...]] = {"factors": ("full", "local"), "window": ("local",), "kernel": ("conv",)}


class Recent(NamedTuple):
    """State of decoding with a bias of bounded reach: one sum over what lies beyond it, and the tokens within it."""

    log: Tensor
    """``(B, 1, C)``."""
    mean: Tensor
    k: Tensor
    """``(B, r, C)``."""
    v: Tensor
    length: int


@register(
    "aft",
    kind="mixer",
    family="mixing",
    source="Zhai et al. 2021, arXiv:2105.14103, equation 2",
    formula="σ(q_i) ⊙ Σ_j exp(k_j + w_ij) ⊙ v_j / Σ_j exp(k_j + w_ij)",
    cost="O(n²·d)",
    time_exponent=2.0,
    memory_exponent=1.0,
    traits=Traits(
        target="other",
        cross=No("a layer that mixes its own input; the biases belong to positions of one sequence"),
        bias=No("the learned w of two positions is a bias already"),
        stochastic=True,
        rows_sum_to_one=False,
        decode=True,
        knob=Knob("factors"),
        given=(
            ("mode=local", {"knob": Knob("window")}),
            ("mode=simple", {"knob": None, "permutable": True}),
            ("mode=conv", {"knob": None}),
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
    """No queries meet keys: channel-wise averages, gated by σ(q).

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
        UsageError: an option of another mode; an even kernel, unless causal.
        Unsupported: in ``forward``, an input of ``full`` or ``local`` longer than ``shape.N``.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        mode: Annotated[Mode, Field(description="which pairs of positions have a learned bias")] = "full",
        factors: Annotated[
            int | None,
            Field(ge=0, description="columns of u of mode=full and local; 0 learns every entry; none: 128"),
        ] = None,
        window: Annotated[
            int | None, Field(ge=0, description="tokens on each side with a bias, of mode=local; none: 31")
        ] = None,
        kernel: Annotated[int | None, Field(ge=1, description="distances with a bias, of mode=conv; none: 11")] = None,
    ) -> None:
        super().__init__()
        for option, value in (("factors", factors), ("window", window), ("kernel", kernel)):
            if value is not None and mode not in _BELONGS[option]:
                raise UsageError(f"aft: {option} belongs to mode={' or '.join(_BELONGS[option])}, not to mode={mode}")
        C, N = shape.C, shape.N
        self.mode, self.heads, self.causal, self.last = mode, shape.H, shape.causal, N - 1
        self.longest = N if mode in ("full", "local") else None
        self.q, self.k, self.v, self.out = (nn.Linear(C, C, bias=False) for _ in range(4))
        factors = 128 if factors is None else factors
        self.factored = factors > 0
        self.back, self.ahead = 0, 0  # the farthest keys with a bias
        if mode == "conv":
            kernel = kernel or 11
            if kernel % 2 == 0 and not shape.causal:
                raise UsageError(f"aft: option kernel={kernel} must be odd: it is centred on the token")
            self.back, self.ahead = (kernel - 1, 0) if shape.causal else (kernel // 2, kernel // 2)
            self.w = nn.Parameter(torch.randn(shape.H, kernel))
        elif mode != "simple":
            self.back = min(N, N if mode == "full" else 31 if window is None else window)
            self.ahead = 0 if shape.causal else self.back
            if self.factored:
                self.rows = nn.Parameter(torch.randn(N, factors) * factors**-0.25)
                self.columns = nn.Parameter(torch.randn(N, factors) * factors**-0.25)
            else:
                self.w = nn.Parameter(torch.randn(N, N if mode == "full" else self.back + 1 + self.ahead))

    def dense(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The formula with every weight of every channel in memory, ``(B, N, N, H, D)``."""
        (x,) = emptied(key_mask, x)
        B, N, _ = x.shape
        q, k, v = (projection(x).view(B, N, self.heads, -1) for projection in (self.q, self.k, self.v))
        w = x.new_zeros(N, N, self.heads)
        for i in range(N if self.mode != "simple" else 0):
            for j in range(max(0, i - self.back), min(N, i + self.ahead + 1)):
                if self.mode == "conv":
                    w[i, j] = self.w[:, j - i + self.back]
                elif self.factored:
                    w[i, j] = self.rows[i] @ self.columns[j]
                else:
                    w[i, j] = self.w[i, j if self.mode == "full" else j - i + self.back]
        visible = visible_pairs(x, x, self.causal, key_mask)[:, 0]
        logits = (k[:, None] + w[..., None]).masked_fill(~visible[..., None, None], float("-inf"))
        weights = logits.softmax(2).masked_fill(~visible[..., None, None], 0.0)
        out: Tensor = self.out((q.sigmoid() * (weights * v[:, None]).sum(2)).flatten(2))
        return out

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """x ``(B, N, C)``; ``key_mask`` ``(B, N)``, True where a token is real."""
        (x,) = emptied(key_mask, x)
        self._check(x.shape[1])
        k, v = self._keys(x, key_mask)
        if self.mode == "simple":
            return self._gate(x, running(k, v).mean if self.causal else read(k, v).mean)
        k, v = (self._fold(y, key_mask) for y in (k, v))
        bias = partial(self._seen_bias, x.shape[1], key_mask)
        if self.mode == "full":
            rows = (self.rows if self.factored else self.w)[: x.shape[1]].to(k.dtype)
            columns = self.columns[: x.shape[1]].to(k.dtype) if self.factored else None
            padded = None if key_mask is None else ~key_mask[:, None, None]
            mean = full(k, v, rows, columns, bias, padded, causal=self.causal)
        else:
            reach = max(self.back, self.ahead)
            mean = windowed(k, v, reach, bias, alike=self.mode == "conv", causal=self.causal).mean
        if key_mask is None:
            mean = torch.unflatten(mean, -1, (len(x), -1)).movedim(2, 0)
        return self._gate(x, mean.transpose(1, 2).reshape(x.shape))

    def _check(self, tokens: int) -> None:
        if self.longest is not None and self.longest < tokens:
            raise Unsupported(f"{tokens} tokens, but the biases were made for at most {self.longest}")

    def _keys(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """k and v, ``(B, N, C)``, in the dtype of the sums."""
        accumulate = accumulator(x.dtype)
        k, v = self.k(x).to(accumulate), self.v(x).to(accumulate)
        if key_mask is not None:
            hidden = ~key_mask[:, :, None]
            k, v = k.masked_fill(hidden, EMPTY), v.masked_fill(hidden, 0.0)
        return k, v

    def _gate(self, x: Tensor, mean: Tensor) -> Tensor:
        out: Tensor = self.out((torch.sigmoid(self.q(x)) * mean).to(x.dtype))
        return out

    def _fold(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """``(B, N, C)`` as ``(G, N, B·C/G)``, so that one row of w serves the whole batch in one product.

        With padding, which differs between examples, as ``(B, G, N, C/G)``.
        """
        B, N, _ = x.shape
        groups = self.heads if self.mode == "conv" else 1
        heads = x.view(B, N, groups, -1)
        if key_mask is not None:
            return heads.transpose(1, 2)
        return heads.permute(2, 1, 0, 3).reshape(groups, N, -1)

    def _seen_bias(self, tokens: int, key_mask: Tensor | None, rows: Tensor, keys: Tensor) -> Tensor:
        """:meth:`_bias` for keys that may be padded, or lie outside of 0 .. ``tokens`` - 1."""
        inside = keys.clamp(0, tokens - 1)
        if key_mask is None:
            return self._bias(rows, inside)
        real = key_mask[:, inside] & (inside == keys)
        return self._bias(rows, keys).masked_fill(~real[:, None, :, None], -torch.inf)

    def _bias(self, rows: Tensor, keys: Tensor) -> Tensor:
        """w ``(G, squares, r, s)`` for the positions ``(squares, r)`` and ``(squares, s)``."""
        if self.mode == "conv":
            rows, keys = rows[:1], keys[:1]  # only the distance counts, and it is the same in every square
        distance = keys[:, None] - rows[:, :, None]
        inside = (distance + self.back).clamp(0, self.back + self.ahead)
        dtype = accumulator(self.out.weight.dtype)  # converted first: gradients of one number are summed in it
        if self.mode == "conv":
            w = self.w.to(dtype)[:, inside]
        else:
            rows, keys = (x.clamp(0, self.last) for x in (rows, keys))
            if self.factored:
                w = torch.matmul(embedding(rows, self.rows.to(dtype)), embedding(keys, self.columns.to(dtype)).mT)[None]
            elif self.mode == "full":
                w = self.w[rows[:, :, None], keys[:, None]][None].to(dtype)
            else:
                w = self.w.to(dtype)[rows[:, :, None], inside][None]
        if self.mode != "full":
            w = w.masked_fill((distance < -self.back) | (distance > self.ahead), 0.0)
        return w

    def begin(self, x: Tensor) -> Cache | Recent:
        """x ``(B, n, C)``, n >= 0. Keys beyond the reach of the biases are kept as one sum."""
        k, v = self._keys(x)
        if self.mode == "full":
            return Cache.of(k[:, None], v[:, None], self.last + 1)
        old = max(0, x.shape[1] - self.back)
        far = Sums(k.new_full((k.shape[0], 1, k.shape[2]), EMPTY), v.new_zeros(v.shape[0], 1, v.shape[2]))
        if old:
            far = read(k[:, :old], v[:, :old])
        return Recent(*far, k[:, old:].clone(), v[:, old:].clone(), x.shape[1])

    def step(self, state: Cache | Recent, x: Tensor) -> tuple[Tensor, Cache | Recent]:
        """x ``(B, 1, C)``."""
        if self.longest:
            self._check(state.length + 1)
        k, v = self._keys(x)
        rows = torch.full((1, 1), state.length, device=x.device)
        if isinstance(state, Cache):
            state = state.append(k[:, None], v[:, None])
            keys = torch.arange(state.length, device=x.device)[None]
            return self._gate(x, read(state.keys[:, 0], state.values[:, 0], self._bias(rows, keys)[0]).mean), state
        k, v = torch.cat((state.k, k), 1), torch.cat((state.v, v), 1)
        far = Sums(state.log, state.mean)
        if self.mode == "simple":
            far = join(far, Sums(k, v))
            return self._gate(x, far.mean), Recent(*far, state.k, state.v, state.length + 1)
        keys = rows + torch.arange(1 - k.shape[1], 1, device=x.device)
        groups = (self.heads if self.mode == "conv" else 1, -1)
        heads_k, heads_v = (torch.unflatten(y, 2, groups).transpose(1, 2) for y in (k, v))
        near = read(heads_k, heads_v, self._bias(rows, keys)[:, 0])
        mean = join(far, Sums(*(y.transpose(1, 2).flatten(2) for y in near))).mean
        if k.shape[1] > self.back:
            far, k, v = join(far, Sums(k[:, :1], v[:, :1])), k[:, 1:], v[:, 1:]
        return self._gate(x, mean), Recent(*far, k, v, state.length + 1)
