"""Gated DeltaNet, Gated DeltaNet-2, Comba and Kimi delta attention, token by token and head by head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.recurrence.comba import Comba
from attnbench.catalogue.attention.recurrence.gated_delta import GatedDelta
from attnbench.catalogue.attention.recurrence.gated_delta_2 import GatedDelta2
from attnbench.catalogue.attention.recurrence.kda import KimiDeltaAttention
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.recurrent.erasing_layer import ErasingLayer
from attnbench.contract.problem.shape import Shape
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import CAUSAL, both, built, close, tokens

layers = pytest.mark.parametrize(
    "label",
    [
        "gated-delta:chunk=5",
        "gated-delta:chunk=64,expand=1,width=1",
        "gated-delta:chunk=5,negative=true",
        "gated-delta-2:chunk=4",
        "gated-delta-2:chunk=16,negative=true,width=2",
        "comba:chunk=5",
        "comba:chunk=64,expand=1,width=1,correction=0.3",
        "kda:chunk=4",
        "kda:chunk=16,decay=bounded,width=2",
        "kda:chunk=4,negative=true",
        "gated-delta:chunk=5,value_groups=3",
        "kda:chunk=4,value_groups=2",
    ],
)


def make(label: str, shape: Shape) -> ErasingLayer:
    """With decays that matter over some tokens, and a norm whose scale is not 1."""
    module = built(ErasingLayer, label, shape).double()
    with torch.no_grad():
        module.step_bias.add_(1)  # type: ignore[operator]  # both have one
        torch.nn.init.uniform_(module.norm.weight)
    return module


def log_alpha(module: ErasingLayer, gates: Tensor, h: int) -> Tensor:
    """One number for each example, or D, of the columns for the gates of one token."""
    p, H, D = dict(module.named_parameters()), module.heads * module.groups, module.sizes[0]
    A = p["log_A"][h].exp()
    if isinstance(module, GatedDelta | Comba):
        return -A * torch.log1p(torch.exp(gates[:, H + h, None] + p["step_bias"][h]))
    own = slice(h * D, h * D + D)
    steps = gates[:, -D:] @ p["decay.weight"][own].T + p["step_bias"][own]
    if isinstance(module, KimiDeltaAttention) and module.bounded:
        return -5 / (1 + torch.exp(-A * steps))
    return -A * torch.log1p(torch.exp(steps))


def one_way(module: ErasingLayer, x: Tensor, *, backwards: bool) -> Tensor:
    """What the heads read, ``(B, N, H, E)``; values in rows of the state and keys in columns, as in the papers."""
    p, H, G, D = dict(module.named_parameters()), module.heads, module.groups, module.sizes[0]
    E = module.sizes[2] // G
    taps, mixed = p["short.weight"], H * (2 * D + G * E)
    columns = x @ p["project.weight"].T
    state = [torch.zeros(len(x), E, D, dtype=x.dtype) for _ in range(H * G)]
    y = torch.zeros(*x.shape[:2], H * G, E, dtype=x.dtype)
    for t in range(x.shape[1]):
        now = torch.zeros(len(x), mixed, dtype=x.dtype)
        for s in range(taps.shape[1]):
            if t >= s:
                now = now + columns[:, t - s, :mixed] * taps[:, taps.shape[1] - 1 - s]
        now = now / (1 + torch.exp(-now))
        gates = columns[:, t, mixed:]
        for h in range(H * G):
            q, k = (now[:, i * H * D + h // G * D : i * H * D + (h // G + 1) * D] for i in range(2))
            v = now[:, 2 * H * D + h * E : 2 * H * D + (h + 1) * E]
            q, k = (z / z.square().sum(-1, keepdim=True).sqrt() for z in (q, k))
            left = state[h] * log_alpha(module, gates, h).exp()[:, None]
            erased, written, q = changed(module, gates, h, (left, state[h]), (q, k, v))
            state[h] = left + (written - erased)[..., None] * k[:, None]
            y[:, t, h] = ((left if backwards else state[h]) @ q[..., None])[..., 0] / D**0.5
    return y


def changed(
    module: ErasingLayer, gates: Tensor, h: int, states: tuple[Tensor, Tensor], token: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What stands in the state in place of k and goes, what comes, ``(B, E)``, and the query ``(B, D)``.

    Args:
        states: after the decay, and before.
    """
    p, D, (left, before), (q, k, v) = dict(module.named_parameters()), module.sizes[0], states, token
    if isinstance(module, GatedDelta2):
        b, w = (1 / (1 + torch.exp(-z[:, h * D : h * D + D])) for z in (gates, gates[:, module.heads * D :]))
        return (left @ (module.strongest * b * k)[..., None])[..., 0], w * v, q
    beta = getattr(module, "strongest", 1.0) / (1 + torch.exp(-gates[:, h, None]))
    if isinstance(module, Comba):
        b = 1 / (1 + torch.exp(-p["feedback"][h]))
        return b * beta * (before @ k[..., None])[..., 0], beta * v, q - p["correction"][h] * k
    return beta * (left @ k[..., None])[..., 0], beta * v, q


def by_hand(module: ErasingLayer, x: Tensor) -> Tensor:
    p = dict(module.named_parameters())
    y = one_way(module, x, backwards=False)
    if not module.causal:
        y = y + one_way(module, x.flip(1), backwards=True).flip(1)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["norm.weight"]).flatten(2)
    if isinstance(module, GatedDelta):
        gate = x @ p["gate.weight"].T
        gate = gate / (1 + torch.exp(-gate))
    elif isinstance(module, Comba):
        gate = 1 / (1 + torch.exp(-(x @ p["gate.weight"].T)))
    else:
        gate = 1 / (1 + torch.exp(-(x @ p["gate.0.weight"].T @ p["gate.1.weight"].T + p["gate.1.bias"])))
    return (y * gate) @ p["out.weight"].T


@layers
@both
@torch.no_grad()
def test_equals_the_recurrence_token_by_token(label: str, shape: Shape) -> None:
    module, x = make(label, shape), tokens(shape)
    close(module(x), by_hand(module, x))


def test_the_width_of_values_is_that_of_the_state() -> None:
    module = built(GatedDelta, "gated-delta:expand=3", CAUSAL)
    assert module.begin(tokens(CAUSAL).float()).state.shape == (2, 3, 4, 12)
    assert module.out.weight.shape == (12, 36)


@pytest.mark.parametrize("label", ["gated-delta:chunk=5", "kda:chunk=4"])
def test_heads_of_values_that_share_a_key_get_what_each_gets_alone_and_their_gradients_add_up(label: str) -> None:
    shared, alone = make(f"{label},value_groups=2", CAUSAL), make(label, CAUSAL)
    columns, wide = 2 * 3 * 4, shared.sizes[2] // 2
    drawn = torch.randn(2, 23, shared.project.out_features, dtype=torch.float64, requires_grad=True)
    channels = 4 if label.startswith("kda") else 1
    rates = [torch.rand(2, 6, 23, dtype=torch.float64), -torch.rand(2, 6, 23, channels, dtype=torch.float64)]
    shared.rates = lambda _: tuple(rates)  # type: ignore[method-assign]
    together = torch.unflatten(shared._run(drawn, 0), 2, (3, 2, wide))
    direction, gradients = torch.randn_like(together), []
    q_and_k, v, _ = torch.split(drawn, [columns, 6 * wide, drawn.shape[2] - columns - 6 * wide], 2)
    v = torch.unflatten(v, 2, (3, 2, wide))
    for g in range(2):
        of_v = columns + torch.arange(6 * wide).view(3, 2, wide)[:, g].flatten()
        with torch.no_grad():
            alone.short.weight.copy_(shared.short.weight[torch.cat([torch.arange(columns), of_v])])
        alone.rates = lambda _, g=g: tuple(rate[:, g::2] for rate in rates)  # type: ignore[method-assign]
        gates = drawn.new_zeros(2, 23, alone.project.out_features - columns - 3 * wide)
        y = torch.unflatten(alone._run(torch.cat([q_and_k, v[:, :, :, g].flatten(2), gates], 2), 0), 2, (3, wide))
        close(together[:, :, :, g], y)
        gradients.append(torch.autograd.grad((y * direction[:, :, :, g]).sum(), drawn)[0][..., :columns])
    (whole,) = torch.autograd.grad((together * direction).sum(), drawn)
    close(whole[..., :columns], gradients[0] + gradients[1])


@pytest.mark.parametrize("name", ["gated-delta", "kda"])
def test_queries_and_keys_are_not_copied_for_their_heads_of_values(name: str) -> None:
    peaks = []
    for groups in (1, 8):  # as many heads of values, with as many heads of keys and with one
        shape = Shape(1, 8 // groups, 2048, 32, causal=True)
        module, x = build(f"{name}:value_groups={groups}", shape), torch.randn(1, 2048, shape.C)
        with torch.inference_mode():
            peaks.append(peak_tensor_bytes(lambda m=module, x=x: m(x)))
    own, shared = peaks
    assert own is not None
    assert shared is not None
    assert shared < own


def test_the_bounded_decay_stays_above_its_bound() -> None:
    module = make("kda:decay=bounded", CAUSAL)
    _, log_decay = module.rates(1e4 * torch.randn(2, 23, 7, dtype=torch.float64))
    assert log_decay.min() >= -5 / math.log(2)
    assert log_decay.max() <= 0


@pytest.mark.parametrize("label", ["kda:decay=softplus", "kda:decay=bounded", "gated-delta", "gated-delta-2", "comba"])
def test_the_strongest_decay_forgets_in_float32_without_losing_the_rest(label: str) -> None:
    module = build(label, Shape(1, 2, 256, 8, causal=True))
    with torch.no_grad():
        module.step_bias.fill_(30.0)  # type: ignore[operator]
    x = torch.randn(1, 256, 16, requires_grad=True)
    out = module(x)
    expected = module.double().dense(x.detach().double())  # type: ignore[operator]
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert bool(grad.isfinite().all())
