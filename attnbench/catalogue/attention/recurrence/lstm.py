"""Long short-term memory: the recurrence from before attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.precision import accumulator
from attnbench.catalogue.engines.recurrent.real_tokens import alone, both_ways
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import RECURRENCE, No, register

State = tuple[Tensor, Tensor]
"""h and c, ``(1, B, C)`` each."""


@register(
    "lstm",
    kind="mixer",
    family="recurrence",
    source="Hochreiter and Schmidhuber 1997, doi:10.1162/neco.1997.9.8.1735, section 4; Gers et al. 2000: forget gates",
    formula="c_t = σ(f_t) ⊙ c_(t-1) + σ(i_t) ⊙ tanh(g_t),  h_t = σ(o_t) ⊙ tanh(c_t)",
    cost="O(n·d²)",
    memory_exponent=1.0,
    traits=replace(
        RECURRENCE,
        bias=No("there are no logits: what is remembered is decided token by token"),
        own_form_both_ways="two recurrences, one from either end, added; the paper's runs forwards only",
    ),
)
class LSTM(nn.Module):
    """PyTorch's LSTM in place of attention, one token after another.

    A reference line that is no attention: the long short-term memory of Hochreiter and Schmidhuber 1997 with the forget
    gates of Gers et al. 2000, one layer of C units, by PyTorch's own kernels. x is ``(B, N, C)`` and so is the output,
    h_t. Time is O(n·C²) as of other linear variants, but the n steps wait for each other. Padded tokens are passed
    over. Decoding keeps h and c.

    Weights and biases are drawn from U(-1/√C, 1/√C), as PyTorch draws them. Everything is computed in float32 at least.

    Not causal: a second LSTM runs from the end, and the two outputs are added.

    Differs from the papers: no peepholes, one cell for each block, one bias for each gate.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        C, self.causal = shape.C, shape.causal
        directions = 1 if shape.causal else 2
        self.W, self.U = (nn.Parameter(torch.empty(directions, 4 * C, C).uniform_(-1, 1) * C**-0.5) for _ in range(2))
        self.b = nn.Parameter(torch.empty(directions, 4 * C).uniform_(-1, 1) * C**-0.5)

    @alone
    def dense(self, x: Tensor) -> Tensor:
        def read(side: Tensor, d: int) -> Tensor:
            h, c, rows = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
            for token in side:
                i, f, g, o = (self.W[d] @ token + self.U[d] @ h + self.b[d]).chunk(4)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                rows.append(h)
            return torch.stack(rows)

        return both_ways(read, x, None, causal=self.causal)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        (x,) = emptied(key_mask, x)
        return both_ways(lambda tokens, d: self._run(tokens, d)[0], x, key_mask, causal=self.causal).to(x.dtype)

    def _run(self, x: Tensor, direction: int) -> tuple[Tensor, State]:
        dtype = accumulator(x.dtype)
        W, U, b = (weight[direction].to(dtype) for weight in (self.W, self.U, self.b))
        h = x.new_zeros(1, x.shape[0], x.shape[2], dtype=dtype)
        # Gradients on a GPU need train=True; there is no dropout that it would turn on.
        weights, train = (W, U, b, torch.zeros_like(b)), torch.is_grad_enabled()
        out, h, c = torch.lstm(x.to(dtype), (h, h), weights, True, 1, 0.0, train, False, True)
        return out, (h[0], c[0])

    @torch.no_grad()
    def begin(self, x: Tensor) -> State:
        if x.shape[1]:
            return self._run(x, 0)[1]
        h = x.new_zeros(x.shape[0], x.shape[2], dtype=accumulator(x.dtype))
        return h, h.clone()

    @torch.no_grad()
    def step(self, state: State, x: Tensor) -> tuple[Tensor, State]:
        """A step for x ``(B, 1, C)``, by two products: PyTorch's kernel prepares itself again for each sequence."""
        h, c = state
        W, U, b = (weight[0].to(h.dtype) for weight in (self.W, self.U, self.b))
        gates = torch.addmm(torch.addmm(b, x[:, 0].to(h.dtype), W.mT), h, U.mT)
        i, f, g, o = gates.chunk(4, -1)
        c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
        h = torch.sigmoid(o) * torch.tanh(c)
        return h[:, None].to(x.dtype), (h, c)
