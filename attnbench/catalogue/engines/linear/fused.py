"""Linear attention with φ = elu + 1 in a few fused Triton kernels, for a GPU.

A sequence is cut into segments, just enough to fill a GPU, so that memory beyond inputs and outputs does not grow
with the sequence. A first kernel adds up φ(k) (v, 1)ᵀ over each segment; a segment begins with the sums before it
(not causal: with those over all segments). A second kernel goes through the segment chunk by chunk: each query reads
the sums so far and the triangle of its chunk's own pairs, and the chunk joins the sums. The backward pass does the
same twice: forward in time for q, with denominators computed again, and backward in time for k and v.

:func:`sums` is the same for ready features of any width, and :func:`of_map` for a feature map.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.catalogue.engines.linear.feature_map import FeatureMap, LogKeys
from attnbench.catalogue.engines.precision import accumulator, hidden
from attnbench.contract.compiled import foreseen, out_of_sight
from attnbench.errors import Unsupported

TILES = {("tf32", 64): (32, 4), ("tf32", 128): (32, 8), ("ieee", 64): (16, 4), ("ieee", 128): (16, 16)}
"""Tokens in a chunk and warps in a program, by precision of products and largest head width.

Timed on an H100 at 16,384 tokens, forward and backward: width 64 causal and not, width 128 causal in TF32 only. At
width 64 in TF32, chunks of 64 tokens gain a tenth if causal, and take nearly four times as long if not.
"""

PROGRAMS = 512
"""Segments of all pairs of batch entry and head together: about four per multiprocessor of the largest GPUs."""

WIDEST = 128
"""Largest head width with D x D sums that fit the registers of a multiprocessor."""

Factors = tuple[Tensor, Tensor]
"""Two numbers per query, each ``(B, H, N)``: 1 / denominator, which turns the gradient of the output into the
numerator's, and the gradient of the denominator.
"""


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
    """Return True if Triton's interpreter stands in for its compiler, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None) -> Tensor:
    """φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k), φ = elu + 1, summed over all keys or, if causal, over those up to the query's own.

    Sums and normaliser are float32. Products are float32 for float32 inputs, and TF32 for bfloat16 and float16 inputs,
    which TF32 holds exactly.

    Args:
        q: ``(B, H, N, D)``; k, v: ``(B, H, M, D)``; M = N if causal.
        key_mask: ``(B, M)`` bool, True for a real key.

    Returns:
        ``(B, H, N, D)`` in q's dtype and order in memory. A query that sees no key gives 0.

    Raises:
        Unsupported: float64, or tensors that are not on a CUDA device.
    """
    if q.dtype == torch.float64:
        raise Unsupported("form=triton sums in float32, and float64 inputs expect more")
    if not (q.is_cuda or _interpreted() or foreseen(q)):
        raise Unsupported(f"form=triton runs on a CUDA device, not on {q.device.type}")
    key_mask, first = _first_keys(key_mask, causal, q.shape[2])
    out: Tensor = _FusedLinear.apply(q, k, v, key_mask, first, causal)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _first_keys(key_mask: Tensor | None, causal: bool, queries: int) -> tuple[Tensor | None, Tensor | None]:
    """The mask in the kernels' layout, and the first query of each example that sees a key, ``(B,)``."""
    if key_mask is None:
        return None, None
    some = key_mask.any(1)
    start = key_mask.int().argmax(1) if causal else torch.zeros_like(some, dtype=torch.long)
    return key_mask.contiguous().view(torch.uint8), start.masked_fill(~some, queries).int()


class _FusedLinear(torch.autograd.Function):
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
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel(name: str) -> Any:
    from attnbench.catalogue.engines.linear import triton_kernels

    return getattr(triton_kernels, name)


def _placed(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(part for x in tensors for part in ((None, 0, 0, 0) if x is None else (x, *x.stride()[:3])))


class _Kernels:
    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, first: Tensor | None, causal: bool
    ) -> None:
        self.q, self.k, self.v, self.mask, self.first, self.causal = q, k, v, mask, first, causal
        self.heads, self.D, self.pairs = q.shape[1], q.shape[3], q.shape[0] * q.shape[1]
        width = _power(self.D)
        precision = "ieee" if q.dtype == torch.float32 else "tf32"
        self.rows, warps = TILES[precision, max(64, width)]
        self.how: dict[str, Any] = {"D": self.D, "WIDTH": width, "ROWS": self.rows, "PRECISION": precision}
        self.how |= {"num_warps": warps, "num_stages": 1}

    def _segments(self, x: Tensor) -> tuple[int, int]:
        chunks = -(-x.shape[2] // self.rows)
        each = -(-chunks // min(chunks, -(-PROGRAMS // self.pairs)))
        return -(-chunks // each), each

    def states(self, x: Tensor, y: Tensor, factors: Factors | None = None) -> Tensor:
        """Initial states of segments, ``(pairs, count, D + 1, D)``: sums of φ(x) (y, 1)ᵀ over the segments before.

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
        **constants: Any,
    ) -> None:
        """Run a kernel on each segment of each pair; the last numbers count FLOPs.

        Args:
            tokens: tokens of a pair in all segments.
            features: computations of φ per token.
            across: products of ``(tokens, D)`` and ``(D, D)``.
            within: products of ``(c, D)`` and ``(D, c)`` in each chunk of c tokens.
        """
        whole, rest = divmod(tokens, self.rows)
        products = 2 * self.D * (tokens * self.D * across + (whole * self.rows**2 + rest**2) * within)
        constants |= self.how
        exponentials = self.pairs * tokens * self.D * features
        _run(name, (self.pairs, segments), arguments, constants, self.pairs * products, exponentials)


def _run(
    name: str,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    matmul_flops: int,
    exponentials: int = 0,
) -> None:
    done: Tensor = arguments[0].new_empty(0)  # kernels return nothing: they write into their arguments

    def call() -> Tensor:
        with torch.cuda.device_of(done):  # type: ignore[no-untyped-call]  # untyped in torch
            _kernel(name)[grid](*arguments, **constants)
        return done

    run_by = "triton_interpreter" if _interpreted() else "triton"
    out_of_sight(call, like=done, kernel=run_by, matmul_flops=matmul_flops, exponentials=exponentials)


# Ready features

FEATURE_TILES = {
    ("tf32", 64): (64, 64, 4, 3),
    ("tf32", 128): (64, 64, 8, 3),
    ("tf32x3", 64): (32, 32, 4, 2),
    ("tf32x3", 128): (16, 32, 8, 2),
}
"""Tokens in a chunk, features in a block, warps and stages, by precision of products and largest number of values in a
program. Compiled and counted, not timed: with 64 tokens and features the matrix units of an H100 have whole tiles
and shared memory holds three stages; 8 warps spill least for 128 values.
"""

FEATURE_PROGRAMS, STATE_BYTES = 256, 1 << 29
"""Programs that share the tokens, two per multiprocessor, and the largest memory of all states."""


class CountedKeys(NamedTuple):
    """The keys that count, and their levels."""

    causal: bool
    mask: Tensor | None = None
    """``(B, M)`` bool, True for a real key."""
    levels: Tensor | None = None
    """``(B, H, M)``: each key counts 2^level times its features. No gradient reaches it."""
    lenient: bool = False
    """A denominator of 0 gives 0; else only a query without a key does, and others give NaN."""


def sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, keys: CountedKeys) -> Tensor:
    """φ(q)ᵀ Σ φ(k)vᵀ / φ(q)ᵀ Σ φ(k) of ready features, over all keys or over those up to the query's own.

    Sums and normaliser are float32. Products are in TF32 if v has half precision, else three products in TF32 make one
    that is nearly float32. phi_q ``(B, H, N, F)``, phi_k ``(B, H, M, F)``, v ``(B, H, M, E)`` -> ``(B, H, N, E)`` in
    v's dtype.
    """
    out: Tensor = _OfFeatures.apply(phi_q, phi_k, v, keys)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def of_map(features: FeatureMap, q: Tensor, k: Tensor, v: Tensor, keys: CountedKeys) -> Tensor:
    """:func:`sums` of the features of q ``(B, H, N, D)`` and k ``(B, H, M, D)``, ``(B, H, N, E)`` in q's dtype.

    The backward pass computes the features again instead of keeping them.
    """
    out: Tensor = _OfMap.apply(q, k, v, features, keys)  # type: ignore[no-untyped-call]  # untyped in torch
    return out.to(q.dtype)


class _OfFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, phi_q: Tensor, phi_k: Tensor, v: Tensor, keys: CountedKeys) -> Tensor:
        out, inverses = _FeatureKernels(phi_q, phi_k, v, keys).outputs()
        ctx.save_for_backward(phi_q, phi_k, v, out, inverses)
        ctx.keys = keys
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        phi_q, phi_k, v, out, inverses = ctx.saved_tensors
        return *_FeatureKernels(phi_q, phi_k, v, ctx.keys).gradients(out, inverses, grad), None


class _OfMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, features: FeatureMap, keys: CountedKeys) -> Tensor:
        with _rounded_like(v):
            (_, phi_q), (_, phi_k), keys = _featured(features, q, k, keys)
        out, inverses = _FeatureKernels(phi_q, phi_k, v, keys).outputs()
        ctx.save_for_backward(q, k, v, out, inverses)
        ctx.features, ctx.keys = features, keys
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, inverses = ctx.saved_tensors
        with _rounded_like(v):
            (x, phi_q), (y, phi_k), keys = _featured(ctx.features, q, k, ctx.keys)
        d_phi_q, d_phi_k, dv = _FeatureKernels(phi_q, phi_k, v, keys).gradients(out, inverses, grad)
        of_q, of_k = ([one.flatten(0, 1) for one in pair] for pair in ((phi_q, d_phi_q), (phi_k, d_phi_k)))
        with _rounded_like(v):
            dq, dk = ctx.features.queries_grad(x, *of_q), ctx.features.keys_grad(y, *of_k)
        return dq.view_as(q).to(q.dtype), dk.view_as(k).to(k.dtype), dv, None, None


@contextmanager
def _rounded_like(v: Tensor) -> Iterator[None]:
    """Inside, products of float32 are in TF32, as in the kernels, if v has half precision and is on a GPU."""
    before = torch.backends.cuda.matmul.allow_tf32
    if v.is_cuda and v.dtype != torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        if torch.backends.cuda.matmul.allow_tf32 != before:
            torch.backends.cuda.matmul.allow_tf32 = before


Featured = tuple[Tensor, Tensor]
"""The input of a feature map, ``(BH, N, D)``, and its features, ``(B, H, N, F)``."""


def _featured(features: FeatureMap, q: Tensor, k: Tensor, keys: CountedKeys) -> tuple[Featured, Featured, CountedKeys]:
    padded = None if keys.mask is None else ~keys.mask[:, None, :, None]
    if padded is not None:
        k = k.masked_fill(padded, 0.0)
    x, y = (one.flatten(0, 1).to(accumulator(one.dtype)) for one in (q, k))
    phi_q, phi_k = (one.new_empty(*one.shape[:2], features.width) for one in (x, y))
    levels = features.keys(y, phi_k)
    if isinstance(features, LogKeys):
        if padded is not None:
            phi_k.view(*k.shape[:3], -1).masked_fill_(padded, hidden(phi_k.dtype))
        top = phi_k.amax(1, keepdim=True)
        phi_k.sub_(top).exp2_()
        features, levels = features.at(top), None
    features.queries(x, phi_q)
    keys = keys._replace(levels=None if levels is None else levels.view(k.shape[:3]))
    return (x, phi_q.view(*q.shape[:3], -1)), (y, phi_k.view(*k.shape[:3], -1)), keys


class _FeatureKernels:
    def __init__(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, keys: CountedKeys) -> None:
        self.q, self.k, self.v = map(_in_rows, (phi_q, phi_k, v))
        self.causal, self.lenient = keys.causal, keys.lenient
        (B, self.heads, M, self.F), self.E = phi_k.shape, v.shape[3]
        self.pairs = B * self.heads
        self.mask, self.first = _first_keys(keys.mask, keys.causal, phi_q.shape[2])
        precision, most = "tf32x3" if v.dtype == torch.float32 else "tf32", 64 if self.E <= 64 else 128
        self.rows, features, warps, stages = FEATURE_TILES[precision, most]
        self.BF, self.BE = min(features, _power(self.F)), min(most, _power(self.E))
        self.blocks, self.parts = -(-self.F // self.BF), -(-self.E // self.BE)
        self.how: dict[str, Any] = {"ROWS": self.rows, "BF": self.BF, "BE": self.BE, "PRECISION": precision}
        self.how |= {"num_warps": warps, "num_stages": stages}
        self.levels = self.tops = None
        if keys.levels is not None:
            levels = keys.levels.float()
            if keys.mask is not None:
                levels = levels.masked_fill(~keys.mask[:, None], hidden(levels.dtype))
            self.levels = levels.reshape(self.pairs, M)
            largest = self.levels.amax(1, keepdim=True).expand(-1, M).contiguous()
            self.tops = self.levels.cummax(1).values if keys.causal else largest

    def outputs(self) -> tuple[Tensor, Tensor]:
        out = self.v.new_empty(*self.q.shape[:3], self.E)
        inverses = out.new_empty(self.q.shape[:3], dtype=torch.float32)
        states = self._states()
        self._through(
            "attend_features",
            *_placed(self.q, self.k, self.v, out),
            *(self.mask, self.first, self.levels, self.tops, states, inverses),
            of=self.q,
            states=states,
            products=1,
            LENIENT=self.lenient,
        )
        return out, inverses

    def gradients(self, out: Tensor, inverses: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = _in_rows(grad)
        slopes = (grad.float() * out).sum(-1).mul_(inverses).neg_()  # of denominators
        dq, dk = (x.new_empty(self.parts, *x.shape) for x in (self.q, self.k))
        dv = torch.empty_like(self.v, memory_format=torch.contiguous_format)
        states = self._states()
        self._through(
            "query_feature_gradients",
            *(*_placed(self.k, self.v, grad, dq[0]), dq.stride(0)),
            *(self.mask, self.levels, self.tops, states, inverses, slopes),
            of=self.q,
            states=states,
            products=1,
        )
        states = self._states((grad, inverses, slopes))
        self._through(
            "key_feature_gradients",
            *(*_placed(self.q, self.k, self.v, grad, dk[0]), dk.stride(0), *_placed(dv)),
            *(self.mask, self.levels, self.tops, states, inverses, slopes),
            of=self.k,
            states=states,
            products=2,
        )
        dq, dk = (x[0] if self.parts == 1 else x.sum(0) for x in (dq, dk))
        return dq, dk, dv

    def _segments(self, tokens: int) -> tuple[int, int]:
        chunks, each = -(-tokens // self.rows), self.pairs * self.parts
        most = min(-(-FEATURE_PROGRAMS // each), max(1, STATE_BYTES // (4 * each * self._width)))
        # At least two, so that a trial of few tokens runs the same code as many.
        length = min(chunks, max(2, -(-chunks // min(chunks, most))))
        return -(-chunks // length), length

    @property
    def _width(self) -> int:
        return self.blocks * self.BF * (self.BE + 1)

    def _states(self, of_queries: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Initial states of segments, ``(pairs, segments, ·)``: Σ φ(k) (v, 1)ᵀ over those before.

        With the gradient of the output, 1 / denominators and ``slopes``, the gradients of these sums over those after
        it, from the last segment to the first. If not causal, over all, ``(pairs, 1, ·)``.
        """
        reverse, x, y, mask, scales = of_queries is not None, self.k, self.v, self.mask, None
        if of_queries is not None:
            x, mask, (y, *scales) = self.q, None, of_queries
        tokens = x.shape[2]
        segments, chunks = self._segments(tokens)
        reference, relative = self._relative(chunks * self.rows, tokens, reverse=reverse)
        if relative is not None:
            scales = [relative, relative] if scales is None else [one.view_as(relative) * relative for one in scales]
        states = x.new_empty(self.pairs, segments, self.parts * self._width, dtype=torch.float32)
        if self.causal:
            states[:, 0].zero_()
        if segments > self.causal:
            without = min(tokens, chunks * self.rows) if reverse else tokens - (segments - 1) * chunks * self.rows
            self._launch(
                "sum_features",
                (segments - self.causal, self.blocks * self.parts),
                *(*_placed(x, y), mask, *(scales or (None, None)), states, tokens, self.heads, chunks, segments),
                tokens=tokens - without * self.causal,
                across=1,
                MASKED=mask is not None,
                SCALED=scales is not None,
                REVERSED=reverse and self.causal,
            )
        if not self.causal:
            return states.sum(1, keepdim=True)
        if reference is None:
            return states.cumsum_(1)
        return torch.bmm((reference[:, None] - reference[..., None]).exp2_().tril_(), states)

    def _relative(self, segment: int, tokens: int, *, reverse: bool) -> tuple[Tensor | None, Tensor | None]:
        """The level of each segment's state, negative if ``reverse``, and the weight of each token in its sum."""
        if self.levels is None or self.tops is None or (reverse and not self.causal):
            return None, None
        ends = torch.cat([self.tops[:, segment - 1 :: segment], self.tops[:, -1:]], 1)[:, : -(-tokens // segment)]
        begins = torch.cat([self.tops[:, :1], ends[:, :-1]], 1)
        level = (begins if reverse else ends)[..., None].expand(-1, -1, segment).flatten(1)[:, :tokens]
        if reverse:
            return -ends.flip(1), (level - self.tops).exp2_()
        return begins, (self.levels - level).exp2_()

    def _through(
        self, name: str, *arguments: Any, of: Tensor, states: Tensor, products: int, **constants: bool
    ) -> None:
        segments, chunks = self._segments(of.shape[2])
        self._launch(
            name,
            (segments, self.parts),
            *(*arguments, of.shape[2], self.heads, chunks, states.shape[1]),
            tokens=of.shape[2],
            across=products + self.causal,
            within=products * self.causal,
            MASKED=self.mask is not None,
            LEVELS=self.levels is not None,
            **constants,
        )

    def _launch(
        self,
        name: str,
        grid: tuple[int, int],
        *arguments: Any,
        tokens: int,
        across: int,
        within: int = 0,
        **constants: Any,
    ) -> None:
        """Run a kernel; the last numbers count FLOPs.

        Args:
            tokens: tokens of a pair in all segments.
            across: products of ``(tokens, F)`` and ``(F, E)``.
            within: products of ``(c, F)`` and ``(F, c)``, and of ``(c, c)`` and ``(c, E)``, in each chunk of c tokens.
        """
        whole, rest = divmod(tokens, self.rows)
        squares = (whole * self.rows**2 + rest**2) * within
        flops = 2 * self.pairs * (tokens * self.F * self.E * across + squares * (self.parts * self.F + self.E))
        constants |= {"CAUSAL": self.causal, **self.how}
        _run(name, (self.pairs, *grid), (*arguments, self.F, self.E), constants, flops)


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
