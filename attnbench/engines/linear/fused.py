"""Linear attention with φ = elu + 1 in a few fused Triton kernels, for a GPU.

A sequence is cut into segments, as many as fill a GPU and no more, so that memory beyond inputs and outputs does not
grow with the sequence. A first kernel adds up φ(k) (v, 1)ᵀ over each segment; a segment begins with the sums before it
(not causal: with those over all segments). A second kernel goes through the segment chunk by chunk: each query reads
the sums so far and the triangle of its chunk's own pairs, and the chunk joins the sums. The backward pass does the same
twice: forward in time for q, whose denominators are computed again, and backward in time for k and v.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from attnbench.compiled import out_of_sight
from attnbench.errors import Unsupported

TILES = {("tf32", 64): (32, 4), ("tf32", 128): (32, 8), ("ieee", 64): (16, 4), ("ieee", 128): (16, 16)}
"""Tokens in a chunk and warps in a program, by the precision of products and the largest head width they are for.

Timed on an H100 at 16,384 tokens, forward and backward: width 64 causal and not, width 128 causal in TF32 only. At
width 64 in TF32, chunks of 64 tokens gain a tenth where attention is causal, and take nearly four times as
long where it is not."""

PROGRAMS = 512
"""Segments of all pairs of batch entry and head together: about four per multiprocessor of the largest GPUs."""

WIDEST = 128
"""Largest head width whose D x D sums fit the registers of a multiprocessor."""

Factors = tuple[Tensor, Tensor]
"""Two numbers per query, each ``(B, H, N)``: 1 / denominator, which turns the gradient of the output into that of the
numerator, and the gradient of the denominator."""


def require_triton(head_dim: int) -> None:
    """Do nothing if the kernels can run.

    Raises:
        Unsupported: there is no triton, or no GPU (nor triton's interpreter), or heads are too wide.
    """
    if find_spec("triton") is None:
        raise Unsupported("form=triton needs triton, which comes with torch for CUDA and is not installed here")
    if not (torch.cuda.is_available() or _interpreted()):
        raise Unsupported("form=triton needs a CUDA device, and there is none")
    if head_dim > WIDEST:
        raise Unsupported(f"form=triton keeps D x D sums in registers: head_dim is at most {WIDEST}, not {head_dim}")


def _interpreted() -> bool:
    """Whether Triton's own interpreter stands in for its compiler, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None) -> Tensor:
    """φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k), φ = elu + 1, summed over all keys or, if causal, over those up to the query's own.

    Sums and normaliser are float32 whatever the inputs are. The products in them are float32 for float32 inputs, and
    TF32 for bfloat16 and float16 inputs, which TF32 holds exactly.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H, M, D)``.
        causal: whether query i sees only the keys j <= i; M = N then.
        key_mask: ``(B, M)`` bool, True where a key is real.

    Returns:
        ``(B, H, N, D)`` in q's dtype and order in memory. A query that sees no key gives 0.

    Raises:
        Unsupported: float64, or tensors that are not on a CUDA device.
    """
    if q.dtype == torch.float64:
        raise Unsupported("form=triton sums in float32, and float64 inputs expect more")
    if not (q.is_cuda or _interpreted() or isinstance(q, FakeTensor)):
        raise Unsupported(f"form=triton runs on a CUDA device, not on {q.device.type}")
    first = None
    if key_mask is not None:
        some = key_mask.any(1)
        start = key_mask.int().argmax(1) if causal else torch.zeros_like(some, dtype=torch.long)
        first = start.masked_fill(~some, q.shape[2]).int()
        key_mask = key_mask.contiguous().view(torch.uint8)
    out: Tensor = _Attend.apply(q, k, v, key_mask, first, causal)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, first: Tensor | None, causal: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, key_mask, first)
        ctx.causal = causal
        q, k, v = map(_in_rows, (q, k, v))
        kernels, out = _Kernels(q, k, v, key_mask, first, causal), torch.empty_like(q)
        kernels.queries(kernels.states(k, v), out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, key_mask, first = ctx.saved_tensors
        q, k, v, grad = map(_in_rows, (q, k, v, grad))
        kernels = _Kernels(q, k, v, key_mask, first, ctx.causal)
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        factors = (q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32))
        kernels.queries(kernels.states(k, v), dq, grad, factors)
        kernels.keys(kernels.states(q, grad, factors), grad, factors, dk, dv)
        return dq, dk, dv, None, None, None


def _in_rows(x: Tensor) -> Tensor:
    """x with the numbers of each token side by side, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel(name: str) -> Any:
    from attnbench.engines.linear import triton_kernels

    return getattr(triton_kernels, name)


def _placed(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Each tensor ``(B, H, N, D)`` followed by its strides along batch, head and token."""
    return tuple(part for x in tensors for part in ((None, 0, 0, 0) if x is None else (x, *x.stride()[:3])))


class _Kernels:
    """The kernels of :mod:`attnbench.engines.linear.triton_kernels`, with what all their launches share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, causal: bool
    ) -> None:
        self.q, self.k, self.v, self.mask, self.first, self.causal = q, k, v, mask, first, causal
        self.heads, self.D, self.pairs = q.shape[1], q.shape[3], q.shape[0] * q.shape[1]
        width = max(16, 1 << (self.D - 1).bit_length())
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self.rows, warps = TILES[precision, max(64, width)]
        self.how: dict[str, Any] = {"D": self.D, "WIDTH": width, "ROWS": self.rows, "PRECISION": precision}
        self.how |= {"num_warps": warps, "num_stages": 1}

    def _segments(self, x: Tensor) -> tuple[int, int]:
        """How many segments the sequences of x have, and how many chunks a segment has."""
        chunks = -(-x.shape[2] // self.rows)
        each = -(-chunks // min(chunks, -(-PROGRAMS // self.pairs)))
        return -(-chunks // each), each

    def states(self, x: Tensor, y: Tensor, factors: Factors | None = None) -> Tensor:
        """What a segment begins with, ``(pairs, count, D + 1, D)``: sums of φ(x) (y, 1)ᵀ over the segments before it.

        With ``factors``, sums of φ(x) (y·first, second)ᵀ over the segments after it, in reverse order. If not causal,
        over all segments.
        """
        (segments, chunks), tokens, weighted = self._segments(x), x.shape[2], factors is not None
        count, mask = segments, None if weighted else self.mask
        if self.causal:  # all segments but one: none needs the last, or in reverse the first
            count -= 1
            tokens = tokens - chunks * self.rows if weighted else count * chunks * self.rows
        states = x.new_empty(self.pairs, count, self.D + 1, self.D, dtype=torch.float32)
        if count:
            self._launch(
                "add_up",
                count,
                *(*_placed(x, y), mask, *(factors or (None, None)), states, x.shape[2], self.heads, chunks),
                MASKED=mask is not None,
                WEIGHTED=weighted,
                REVERSED=weighted and self.causal,
                tokens=tokens,
                features=1,
                across=1,
            )
        return states.cumsum(1) if self.causal else states.sum(1, keepdim=True)

    def queries(self, states: Tensor, out: Tensor, grad: Tensor | None = None, factors: Factors | None = None) -> None:
        """Write the outputs into ``out``; with ``grad``, the gradients of q, and ``factors`` as well."""
        (segments, chunks), tokens, backward = self._segments(self.q), self.q.shape[2], grad is not None
        self._launch(
            "attend",
            segments,
            *_placed(self.q, self.k, self.v, grad, out),
            *(self.mask, self.first, states, *(factors or (None, None)), tokens, self.heads, chunks, states.shape[1]),
            CAUSAL=self.causal,
            MASKED=self.mask is not None,
            BACKWARD=backward,
            tokens=tokens,
            features=1 + self.causal,
            across=1 + backward + self.causal,
            within=2 * (1 + backward) * self.causal,
        )

    def keys(self, states: Tensor, grad: Tensor, factors: Factors, dk: Tensor, dv: Tensor) -> None:
        """Write the gradients of keys and values into ``dk`` and ``dv``."""
        (segments, chunks), tokens = self._segments(self.k), self.k.shape[2]
        self._launch(
            "key_gradients",
            segments,
            *_placed(self.q, self.k, self.v, grad, dk, dv),
            *(self.mask, states, *factors, tokens, self.heads, chunks, states.shape[1]),
            CAUSAL=self.causal,
            MASKED=self.mask is not None,
            tokens=tokens,
            features=1 + self.causal,
            across=2 + self.causal,
            within=4 * self.causal,
        )

    def _launch(
        self,
        name: str,
        segments: int,
        *arguments: Any,
        tokens: int,
        features: int,
        across: int,
        within: int = 0,
        **constants: bool,
    ) -> None:
        """Run a kernel on each segment of each pair.

        Args:
            tokens: how many tokens all segments of a pair have together.
            features: how often φ is computed per token.
            across: number of products of ``(tokens, D)`` and ``(D, D)``, to count FLOPs.
            within: number of products of ``(c, D)`` and ``(D, c)`` in each chunk of c tokens.
        """
        whole, rest = divmod(tokens, self.rows)
        products = 2 * self.D * (tokens * self.D * across + (whole * self.rows**2 + rest**2) * within)
        done: Tensor = arguments[0].new_empty(0)  # kernels return nothing: they write into their arguments

        def call() -> Tensor:
            with torch.cuda.device_of(done):  # type: ignore[no-untyped-call]  # untyped in torch
                _kernel(name)[self.pairs, segments](*arguments, **constants, **self.how)
            return done

        run_by = "triton_interpreter" if _interpreted() else "triton"
        out_of_sight(
            call,
            like=done,
            kernel=run_by,
            matmul_flops=self.pairs * products,
            exponentials=self.pairs * tokens * self.D * features,
        )
