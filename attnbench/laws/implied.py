"""The matrix that a variant applies to the values, formed or not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.capabilities import Dense
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS, Variant

Formula = Callable[..., Tensor]

_MIXER_DIM = 8
"""Width of the single head of a mixer in a drawn pattern."""
_AT_ONCE = 32
"""Outputs whose gradients are computed together: their memory grows with this number."""


def small_setting(text: str) -> Spec:
    """The variant as typed, else the first setting of its checks, which suits few tokens; UsageError if unknown."""
    spec = parse_spec(text)
    entry = VARIANTS.get(spec.name)
    if spec.options:
        return entry.normalise(spec)
    return parse_spec(f"{entry.name}:{entry.settings[0] if entry.settings else ''}".rstrip(":"))


def formula_of(entry: Variant, module: nn.Module, causal: bool) -> Formula:
    """The documented formula of the output: ``dense``, softmax attention, or the module itself."""
    if isinstance(module, Dense):
        return module.dense
    if entry.traits.exact:
        return lambda q, k, v: exact_attention(q, k, v, causal=causal)
    return module


def weights_of(formula: Formula, q: Tensor, k: Tensor) -> Tensor:
    """The matrix of each head, from values that are the columns of I, as many at a time as a head is wide.

    q ``(B, H, N, D)``, k ``(B, H, M, D)`` -> ``(B, H, N, M)``; weight (i, j) is the part of value j in output i.
    Gradients pass through it.
    """
    B, H, M, D = k.shape
    identity = nn.functional.pad(torch.eye(M, dtype=k.dtype, device=k.device), (0, -M % D))
    parts = [formula(q, k, columns.expand(B, H, M, D).contiguous()) for columns in torch.split(identity, D, dim=1)]
    return torch.cat(parts, -1)[..., :M]


@torch.no_grad()
def implied(formula: Formula, q: Tensor, k: Tensor) -> Tensor:
    """The matrix of each head ``(H, N, M)`` of a single example, without gradients."""
    return weights_of(formula, q, k)[0]


@torch.no_grad()
def mixes_channels(formula: Formula, q: Tensor, k: Tensor) -> bool:
    """True if values with a single channel give more in the others than in that one: no weight times a value.

    q ``(1, H, N, D)``, k ``(1, H, M, D)``.
    """
    values = torch.zeros_like(k)
    values[..., 0] = torch.linspace(1.0, 2.0, k.shape[2], dtype=k.dtype)
    sizes = formula(q, k, values).square().flatten(0, 2).sum(0)
    return bool(sizes[1:].sum() > sizes[0])


def reach(formula: Formula, x: Tensor) -> Tensor:
    """The norm of the gradient of each output, in a random direction, by each token of a mixer's input.

    x ``(1, N, C)`` -> ``(N, N)``: output i, token j.
    """
    x = x.detach().requires_grad_()
    out = formula(x)
    direction = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    along = torch.eye(out.shape[1], dtype=x.dtype)[:, None, :, None] * direction
    rows = [row for some in torch.split(along, _AT_ONCE) for row in _gradients(out, x, some)]
    sizes: Tensor = torch.stack(rows)[:, 0].norm(dim=-1)
    return sizes


def _gradients(out: Tensor, x: Tensor, directions: Tensor) -> Tensor:
    """The gradient of ``out`` in each direction, in one pass if torch can: it takes a fraction of the time."""
    try:
        return torch.autograd.grad(out, x, directions, retain_graph=True, is_grads_batched=True)[0]
    except RuntimeError:  # an autograd function that a plug-in wrote may have no rule for many at once
        return torch.stack([torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in directions])


def random_weights(spec: Spec, n: int, *, causal: bool) -> Tensor:
    """Size of the influence of token j on output i, on random inputs: ``(N, N)``, not negative.

    For an operator it is the weight in its documented formula; for a mixer, or an operator that mixes channels, it is
    :func:`reach`. Raises UsageError for an unknown variant or option, Unsupported for a refused shape.
    """
    entry = VARIANTS.get(spec.name)
    operator = entry.kind == "operator"
    shape = Shape(batch=1, heads=1, seq_len=n, head_dim=n if operator else _MIXER_DIM, causal=causal)
    generator = torch.Generator().manual_seed(0)
    formula = formula_of(entry, build(spec, shape).double(), causal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if operator:
            q, k = (torch.randn(1, 1, n, n, generator=generator, dtype=torch.float64) * 0.5 for _ in "qk")
            if mixes_channels(formula, q, k):
                of_token = torch.randn(1, n, 2 * n, generator=generator, dtype=torch.float64)
                return reach(lambda x: formula(q, *(part[:, None] for part in x.chunk(2, -1)))[:, 0], of_token)
            return implied(formula, q, k)[0].abs()
        return reach(formula, torch.randn(1, n, shape.C, generator=generator, dtype=torch.float64))


def share_of_largest(weights: Tensor) -> Tensor:
    """Each weight over the largest of its row; a row of zeros stays."""
    return weights / weights.amax(1, keepdim=True).clamp(min=1e-300)
