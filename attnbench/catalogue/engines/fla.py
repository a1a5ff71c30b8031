"""The kernels of flash-linear-attention (fla-core 0.6.0), each as a function of tensors in the layout used here.

Given are ``(B, H, N, ...)``, a decay as its logarithm to the base of 2, fox's to that of e; a kernel takes
``(B, N, H, ...)`` and natural logarithms. Turning one into the other copies nothing that leaves a projection of tokens.
All kernels are causal, and sum in float32. The package is imported by the first call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from attnbench.contract.compiled import out_of_sight

LN2 = log(2.0)
NO_MASK = "flash-linear-attention's kernel takes no mask; form=torch takes one"
"""The reason why a form takes no padding."""
WIDTHS = (16, 32, 64, 128)
"""Widths of heads that the kernels of path and deltaformer take."""
Kernel = Callable[..., Tensor]
"""Maps tensors ``(B, H, N, ...)``, values third, to ``(B, H, N, E)``."""


class Op(NamedTuple):
    """A kernel and its call."""

    module: str
    """Below ``fla.ops``."""
    function: str
    call: Callable[..., Any]
    """Calls it with tensors ``(B, N, H, ...)``; gives the output, or a tuple that begins with it."""
    by_channel: str = ""
    """The equivalent row for a decay of each channel, if its own is one number for a head."""


def _simple(f: Kernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, **named: Any) -> Any:
    q, k = (_of_heads(x, v.shape[2]) for x in (q, k))
    return f(q, k, v.to(q.dtype), None if g is None else g * LN2, **{"scale": 1.0, **named})


def _simple_by_channel(f: Kernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    q, k = (_of_heads(x, v.shape[2]) for x in (q, k))
    return f(q, k.to(q.dtype), v.to(q.dtype), (g[..., None] * LN2).expand_as(q), scale=1.0)


def _gated_delta(f: Kernel, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Any:
    return f(q, k, v, g=g.squeeze(-1) * LN2, beta=beta.to(q.dtype), scale=1.0)


def _kda(f: Kernel, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Any:
    if g.shape[-1] == 1:
        g = g.expand(-1, -1, -1, q.shape[3])
    return f(q, k, v, g=g * LN2, beta=beta.to(q.dtype), scale=1.0)


def _gdn2(f: Kernel, q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, g: Tensor) -> Any:
    return f(q, k, v, g=g * LN2, b=erase.to(q.dtype), w=write.to(q.dtype), scale=1.0)


def _comba(f: Kernel, q: Tensor, k: Tensor, v: Tensor, erase: Tensor, beta: Tensor, g: Tensor) -> Any:
    return f(q, k, v, erase, g=g.squeeze(-1) * LN2, beta=beta.to(q.dtype), scale=1.0)


def _comba_by_channel(f: Kernel, q: Tensor, k: Tensor, v: Tensor, erase: Tensor, beta: Tensor, g: Tensor) -> Any:
    beta = beta[..., None].to(q.dtype)
    return f(q, (g * LN2).expand_as(q), k, beta * v, -erase, beta * k, scale=1.0)


def _rwkv7(f: Kernel, r: Tensor, k: Tensor, v: Tensor, kappa: Tensor, a: Tensor, g: Tensor) -> Any:
    # No decay is stronger than exp(-1/√e): the kernel may then put as many as 64 tokens in a chunk.
    return f(r, g * LN2, k, v, -kappa, a * kappa, scale=1.0, lower_bound=-0.61)


def _log_linear(f: Kernel, q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor) -> Any:
    missing = max(7, 1 + (q.shape[1] - 1).bit_length()) - weights.shape[3]  # 7: those within a chunk of 64
    if missing > 0:  # levels above the last share its weight
        weights = torch.cat([weights, weights[..., -1:].expand(-1, -1, -1, missing)], 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Triton before 3.3 is faster
        return f(q, k, v.to(q.dtype), g * LN2, weights.to(q.dtype), scale=1.0)


def _mesa(f: Kernel, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, penalty: Tensor, **named: Any) -> Any:
    given, joined = _of_any_size(q, k, v, g.squeeze(-1) * LN2, beta.squeeze(-1), penalty[0, 0])
    return joined(f(*given, use_qk_l2norm_in_kernel=True, **named)[0])


def _path(f: Kernel, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Any:
    return f(q, k, v, w.float(), beta.squeeze(-1).float())


def _deltaformer(f: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, asks: str) -> Any:
    # The package takes it for granted that these are contiguous, and has gradients of whole blocks only.
    missing = -q.shape[1] % (512 if q.shape[1] > 512 else 64)
    parts = [(pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).contiguous() for x in (q, k, v, beta)]
    u = f.apply(parts[asks == "key"], *parts[1:3], parts[3].squeeze(-1))[:, : q.shape[1]]
    q, k, u = (x.transpose(1, 2) for x in (q, k, u))
    return scaled_dot_product_attention(q, k, u, is_causal=True).transpose(1, 2)


def _rebased(f: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Any:
    # The scale cancels in the quotient; with it, sums of squares stay within float16.
    q = q * (q.shape[3] ** -0.5 * q.shape[1] ** -0.25)
    above, below = f(q, k, v, use_scale=False, use_normalize=False, return_both=True)
    out = (above / below.masked_fill(below == 0, 1.0)[..., None]).transpose(1, 2)
    # The first token has a weight of 1, even if a small square divides rounding errors of its gradients.
    return torch.cat([v[:, :1] * (below.mT[:, :1, :, None] > 0), out[:, 1:]], 1)


def _nsa(f: Kernel, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, **named: Any) -> Any:
    few, heads = chosen.shape[3], q.shape[2] // k.shape[2]
    chosen = pad(chosen, (0, _power_of_two(few) - few), value=-1)  # -1 is none
    # The heads that share keys are rows of a product, which has 16 or more.
    rows = pad(torch.unflatten(q, 2, (k.shape[2], heads)), (0, 0, 0, max(16, _power_of_two(heads)) - heads))
    out = f(rows.flatten(2, 3), k, v, block_indices=chosen, block_counts=chosen.shape[3], **named)
    return torch.unflatten(out, 2, rows.shape[2:4])[:, :, :, :heads].flatten(2, 3)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


KERNELS = {
    "gla": Op("gla", "chunk_gla", lambda f, q, k, v, g: f(q, k.to(q.dtype), v, g * LN2)),  # its scale is 1/√D
    "simple-gla": Op("simple_gla", "chunk_simple_gla", _simple, "simple-gla by channel"),
    "simple-gla by channel": Op("gla", "chunk_gla", _simple_by_channel),
    "linear": Op("linear_attn", "chunk_linear_attn", lambda f, q, k, v: f(q, k, v, scale=1.0, normalize=True)),
    "delta": Op("delta_rule", "chunk_delta_rule", lambda f, q, k, v, beta: f(q, k, v, beta.to(q.dtype), scale=1.0)),
    "gated-delta": Op("gated_delta_rule", "chunk_gated_delta_rule", _gated_delta, "kda"),
    "kda": Op("kda", "chunk_kda", _kda),
    "gated-delta-2": Op("gdn2", "chunk_gdn2", _gdn2),
    "comba": Op("comba", "chunk_comba", _comba, "comba by channel"),
    "comba by channel": Op("rwkv7", "chunk_rwkv7", _comba_by_channel),
    "rwkv7": Op("rwkv7", "chunk_rwkv7", _rwkv7),
    "gsa": Op("gsa", "chunk_gsa", lambda f, q, k, v, w, g: f(q, k, v, w.to(q.dtype), g * LN2, scale=1.0)),
    "log-linear": Op("log_linear_attn", "chunk_log_linear_attn", _log_linear),
    "mesa": Op("mesa_net", "chunk_mesa_net", _mesa),
    "path": Op("path_attn", "parallel_path_attn", _path),
    "fox": Op("forgetting_attn", "parallel_forgetting_attn", lambda f, q, k, v, log_f: f(q, k, v, log_f.float())),
    "abc": Op("abc", "chunk_abc", lambda f, q, k, v, s: f(q, k, v, s)),
    "parallax": Op("parallax", "parallel_parallax", lambda f, q, k, v, r: f(q, r.to(q.dtype), k, v)),
    "rebased": Op("rebased", "parallel_rebased", _rebased),
    "based": Op("based", "parallel_based", lambda f, q, k, v: f(q, k, v)),
    "based-sums": Op("based", "fused_chunk_based", lambda f, q, k, v: f(q, k, v)),
    "deltaformer": Op("deltaformer.parallel", "ParallelDeltaformerFunction", _deltaformer),
    "nsa": Op("nsa", "parallel_nsa", _nsa),
}


def run(name: str, *given: Tensor, **named: Any) -> Tensor:
    """Run a kernel of :data:`KERNELS` on ``(B, H, N, ...)``: ``(B, H, N, E)``; ``named`` is passed on.

    Raises:
        ImportError: the package is missing.
    """
    row = KERNELS[name]
    if row.by_channel and not named and torch.is_grad_enabled() and any(x.requires_grad for x in given) and refused():
        row = KERNELS[row.by_channel]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package reports other missing packages on import
        function = getattr(import_module(f"fla.ops.{row.module}"), row.function)

    def call() -> Tensor:
        got = row.call(function, *(x.transpose(1, 2) for x in given), **named)
        out: Tensor = got[0] if isinstance(got, tuple) else got
        return out.transpose(1, 2)

    return out_of_sight(call, like=given[2], kernel="fla", matmul_flops=None)


def refused() -> bool:
    """Return True if the package refuses gradients of a decay per head, which some Tritons make wrong."""
    state = import_module("fla.ops.common.chunk_o")
    hopper, since, mended = (
        bool(getattr(state, name, False)) for name in ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    )
    return hopper and since and not mended


class _GradientScale(torch.autograd.Function):
    """Identity whose gradient is multiplied or divided by the size of the output's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: list[Tensor], at_the_output: bool) -> Tensor:
        ctx.size, ctx.at_the_output = size, at_the_output
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.at_the_output:
            return (grad * ctx.size[0]).to(grad.dtype), None, None
        size = grad.float().square().mean().sqrt()
        ctx.size[:] = [size]
        return (grad / torch.where(size > 0, size, 1.0)).to(grad.dtype), None, None


def _of_any_size(*given: Tensor) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
    """Inputs and a function of the output that scale gradients to size 1, for a kernel that adds a constant to them."""
    size: list[Tensor] = []
    measured = _GradientScale.apply
    inputs = [measured(x, size, False) for x in given]  # type: ignore[no-untyped-call]  # untyped in torch
    return inputs, lambda out: measured(out, size, True)  # type: ignore[no-untyped-call]  # untyped in torch


def before(compute: Kernel, q: Tensor, *others: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """The kernel's output at each token, from the tokens before it alone.

    ``log_decay`` ``(B, H, N, 1)``, or as q, fades the state at the token itself before it is read.
    """
    if log_decay is not None:
        q = (q * log_decay.exp2()).to(q.dtype)
    return pad(compute(pad(q[:, :, 1:], (0, 0, 0, 1)), *others)[:, :, :-1], (0, 0, 1, 0))


def from_both_ends(compute: Kernel, q: Tensor, k: Tensor, v: Tensor, *log_decay: Tensor, scale: float = 1.0) -> Tensor:
    """Σ_j (q_i·k_j) v_j over all tokens, faded by the decay between them, of two causal runs; each token counts once.

    Args:
        log_decay: ``(B, H, N)`` or as q; going back, the decay between tokens t + 1 and t is that of t + 1.
        scale: of the kernel's own scores.
    """
    back = compute(*(x.flip(2) for x in (q, k, v)), *(x.roll(-1, 2).flip(2) for x in log_decay)).flip(2)
    q, k = (_of_heads(x, v.shape[1], 1) for x in (q, k))
    own = (q * k * scale).sum(-1, keepdim=True) * v
    return (compute(q, k, v, *log_decay) + back - own).to(q.dtype)


def _of_heads(x: Tensor, heads: int, axis: int = 2) -> Tensor:
    return x if x.shape[axis] == heads else x.repeat_interleave(heads // x.shape[axis], axis)
