"""Gated recurrent units: the smaller of the two recurrences from before attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import RECURRENCE, No, register


@register(
    "gru",
    kind="mixer",
    family="recurrence",
    source="Cho et al. 2014, arXiv:1406.1078, section 2.3, equations 5-8",
    formula="h_t = (1 - z_t) ⊙ n_t + z_t ⊙ h_(t-1),  n_t = tanh(W_n x_t + b_n + r_t ⊙ (U_n h_(t-1) + b'_n))",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(
        RECURRENCE,
        bias=No("there are no logits: what is remembered is decided token by token"),
        own_form_both_ways="two recurrences, one from either end, added; the paper's encoder runs forwards only",
    ),
)
class GRU(nn.Module):
    """PyTorch's GRU in place of attention, one token after another.

    A reference line that is no attention: the gated recurrent units of Cho et al. 2014, "Learning Phrase
    Representations using RNN Encoder-Decoder", one layer of C units, by PyTorch's kernels. x is ``(B, N, C)`` and so
    is the output, h_t. The n steps wait for each other. Padded tokens
    are passed over. Decoding keeps h.

    Weights and biases are drawn from U(-1/√C, 1/√C), as PyTorch draws them. Everything is computed in float32 at least.

    Not causal: a second GRU runs from the end, and the two outputs are added.

    Differs from the paper: the reset gate multiplies U h instead of h, which lets all products of a step be one; there
    are biases.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C, self.causal = shape.C, shape.causal
        directions = 1 if shape.causal else 2
        self.W, self.U = (nn.Parameter(torch.empty(directions, 3 * C, C).uniform_(-1, 1) * C**-0.5) for _ in range(2))
        self.b, self.b_state = (
            nn.Parameter(torch.empty(directions, 3 * C).uniform_(-1, 1) * C**-0.5) for _ in range(2)
        )

    @alone
    def dense(self, x: Tensor) -> Tensor:
        def read(side: Tensor, d: int) -> Tensor:
            h, rows = torch.zeros_like(x[0]), []
            for token in side:
                of_token = (self.W[d] @ token + self.b[d]).chunk(3)
                of_state = (self.U[d] @ h + self.b_state[d]).chunk(3)
                r, z = (torch.sigmoid(one + other) for one, other in zip(of_token[:2], of_state[:2], strict=True))
                h = (1 - z) * torch.tanh(of_token[2] + r * of_state[2]) + z * h
                rows.append(h)
            return torch.stack(rows)

        return both_ways(read, x, None, causal=self.causal)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return both_ways(lambda tokens, d: self._run(tokens, d)[0], x, key_mask, causal=self.causal).to(x.dtype)

    def _run(self, x: Tensor, direction: int, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        dtype = accumulator(x.dtype)
        weights = tuple(weight[direction].to(dtype) for weight in (self.W, self.U, self.b, self.b_state))
        if h is None:
            h = x.new_zeros(1, x.shape[0], x.shape[2], dtype=dtype)
        # Gradients on a GPU need train=True; there is no dropout that it would turn on.
        train = torch.is_grad_enabled()
        out, h = torch.gru(x.to(dtype), h, weights, True, 1, 0.0, train, False, True)
        return out, h

    @torch.no_grad()
    def begin(self, x: Tensor) -> tuple[Tensor]:
        """The state h ``(B, C)`` after x ``(B, n, C)``, n >= 0."""
        if x.shape[1]:
            return (self._run(x, 0)[1][0],)
        return (x.new_zeros(x.shape[0], x.shape[2], dtype=accumulator(x.dtype)),)

    @torch.no_grad()
    def step(self, state: tuple[Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        out, h = self._run(x, 0, state[0][None])
        return out.to(x.dtype), (h[0],)
