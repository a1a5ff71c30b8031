"""One decoding step of each recurrent variant as its bare arithmetic: what ``live_steps.py`` holds our steps to.

Bare is what the formula asks for, with all constants at hand, in as few calls as a user of torch would write for one
token of one sequence. Each function takes a variant's module and its state after a prompt, and returns the step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu, layer_norm, normalize, sigmoid, silu, softplus

H, D = 8, 64

Step = Callable[..., Tensor]


def linear(module: Any, state: Any) -> Step:
    sums, ones = state.of_values.mT.contiguous(), state.of_ones

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q, phi_k = (elu(x).add_(1.0) for x in (q, k))
        of_values, of_ones = torch.addcmul(sums, phi_k.mT, v), ones + phi_k
        return (phi_q @ of_values).div_(phi_q @ of_ones.mT)

    return step


def retnet(module: Any, state: Any) -> Step:
    gamma, theta = state.fixed.gamma, state.fixed.theta.float()

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = theta * state.length
        cos, sin = angle.cos(), angle.sin()
        kept = torch.addcmul(state.state * gamma, turned(k, cos, sin).mT, v)
        return (turned(q, cos, sin) @ kept).mul_(D**-0.5)

    return step


def gla(module: Any, state: Tensor) -> Step:
    def step(x: Tensor) -> Tensor:
        q, k, v = module.qkv(x).view(3, 1, H, 1, D)
        decay = sigmoid(module.decay(x)).pow_(1 / module.temperature).view(1, H, D, 1)
        y = (q @ torch.addcmul(state * decay, k.mT, v)).mul_(D**-0.5)
        out: Tensor = module.out(module.norm(y.view(1, 1, H, D)).flatten(2) * silu(module.gate(x)))
        return out

    return step


def delta(module: Any, state: Tensor) -> Step:
    def step(x: Tensor) -> Tensor:
        q, k, v = module.qkv(x).view(3, 1, H, 1, D)
        q, k = normalize(silu(torch.stack((q, k))), dim=-1)
        rate = sigmoid(module.beta(x)).view(1, H, 1, 1)
        after = torch.addcmul(state, k.mT, (v - k @ state).mul_(rate))
        out: Tensor = module.out(module.norm((q @ after).view(1, 1, H, D)).flatten(2))
        return out

    return step


def ssd(module: Any, state: Tensor) -> Step:
    rate = -module.log_A.exp().view(H, 1, 1)

    def step(u: Tensor) -> Tensor:
        B, C = module.key_query(u).chunk(2, -1)
        size = softplus(module.step_size(u)).view(H, 1, 1)
        h = torch.addcmul(state * (size * rate).exp(), B.mT, module.value(u).view(H, 1, D) * size)
        out: Tensor = module.out((C @ h).view(1, 1, H * D))
        return out

    return step


def mamba2(module: Any, state: Any) -> Step:
    heads, (inner, width, _) = module.heads, module.sizes
    rate, taps = -module.log_A.exp().view(heads, 1, 1), module.short.weight.mT.contiguous()
    skip = module.skip.view(heads, 1, 1)

    def step(u: Tensor) -> Tensor:
        z, tokens, steps = module.project(u).split([inner, inner + 2 * width, heads], -1)
        mixed = silu((torch.cat((state.last, tokens), 1) * taps).sum(1) + module.short.b)
        x, B, C = mixed.split([inner, width, width], -1)
        x = x.view(heads, 1, D)
        size = softplus(steps + module.step_bias).view(heads, 1, 1)
        h = torch.addcmul(state.state * (size * rate).exp(), B.mT, x * size)
        y = torch.addcmul(C @ h, x, skip).view(1, 1, inner)
        out: Tensor = module.out(module.norm(y * silu(z)))
        return out

    return step


def _mixed(module: Any, state: Any) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q and k ``(H, 1, D)`` of length 1, v ``(H, 1, E)``, and the other columns: how layers that erase begin."""
    taps, E = module.short.weight.mT.contiguous(), module.sizes[2]

    def begun(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, rest = module.project(x).split([H * (2 * D + E), module.project.out_features - H * (2 * D + E)], -1)
        qk, v = silu((torch.cat((state.last, tokens), 1) * taps).sum(1)).split([2 * H * D, H * E], -1)
        q, k = normalize(qk.view(2, H, 1, D), dim=-1)
        return q, k, v.view(H, 1, E), rest

    return begun


def gated_delta(module: Any, state: Any) -> Step:
    begun, rate = _mixed(module, state), -module.log_A.exp()

    def step(x: Tensor) -> Tensor:
        q, k, v, rest = begun(x)
        beta, steps = rest.view(2, H, 1, 1)
        left = state.state * (softplus(steps.view(H) + module.step_bias) * rate).exp_().view(H, 1, 1)
        after = left.addcmul_(k.mT, (v - k @ left) * sigmoid(beta))
        y = module.norm((q @ after).mul_(D**-0.5).transpose(1, 2)).view(1, 1, -1)
        out: Tensor = module.out(y * silu(module.gate(x)))
        return out

    return step


def gated_delta_2(module: Any, state: Any) -> Step:
    begun, rate = _mixed(module, state), -module.log_A.exp()[:, None]

    def step(x: Tensor) -> Tensor:
        q, k, v, rest = begun(x)
        gates, steps = rest.split([2 * H * D, D], -1)
        b, w = sigmoid(gates).view(2, H, 1, D)
        decay = softplus((module.decay(steps) + module.step_bias).view(H, D)).mul_(rate).exp_()
        left = state.state * decay[..., None]
        after = left.addcmul_(k.mT, w * v - (b * k) @ left)
        y = module.norm((q @ after).mul_(D**-0.5).transpose(1, 2)).view(1, 1, -1)
        out: Tensor = module.out(y * sigmoid(module.gate(x)))
        return out

    return step


def comba(module: Any, state: Any) -> Step:
    begun, rate = _mixed(module, state), -module.log_A.exp()
    feedback, share = sigmoid(module.feedback).view(H, 1, 1), module.correction.view(H, 1, 1)

    def step(x: Tensor) -> Tensor:
        q, k, v, rest = begun(x)
        beta, steps = rest.view(2, H, 1, 1)
        beta, decay = sigmoid(beta), (softplus(steps.view(H) + module.step_bias) * rate).exp_().view(H, 1, 1)
        change = (v - (k * feedback) @ state.state) * beta
        after = torch.addcmul(state.state[0] * decay, k.mT, change[0])
        y = module.norm(((q - share * k) @ after).mul_(D**-0.5).transpose(0, 1)).view(1, 1, -1)
        out: Tensor = module.out(y * sigmoid(module.gate(x)))
        return out

    return step


def kda(module: Any, state: Any) -> Step:
    begun, rate = _mixed(module, state), -module.log_A.exp()[:, None]

    def step(x: Tensor) -> Tensor:
        q, k, v, rest = begun(x)
        beta, steps = rest.split([H, D], -1)
        decay = softplus((module.decay(steps) + module.step_bias).view(H, D)).mul_(rate).exp_()
        left = state.state * decay[..., None]
        after = left.addcmul_(k.mT, (v - k @ left) * sigmoid(beta).view(H, 1, 1))
        y = module.norm((q @ after).mul_(D**-0.5).transpose(1, 2)).view(1, 1, -1)
        out: Tensor = module.out(y * sigmoid(module.gate(x)))
        return out

    return step


def rwkv7(module: Any, state: Any) -> Step:
    def step(x: Tensor) -> Tensor:
        r, w, k, v, a, g = torch.addcmul(x, module.shift.view(6, 1, 1, -1), state.last - x)
        r, k, v = module.receptance(r), module.key(k), module.value(v).view(H, 1, D)
        a, decay = sigmoid(module.share(a)), (sigmoid(module.decay(w)) * -exp(-0.5)).exp_().view(H, D, 1)
        kappa = normalize((k * module.removal).view(H, 1, D), dim=-1)
        r, k = r.view(H, 1, D), (k * (1 + (a - 1) * module.strengthened)).view(H, 1, D)
        after = torch.addcmul(state.state * decay, (a.view(H, 1, D) * kappa).mT, kappa @ state.state, value=-1)
        y = (r @ after.addcmul_(k.mT, v)).view(H, D)
        y = layer_norm(y, (D,), eps=module.eps).view(-1) * module.weight + module.bias
        y = y + ((r * k).view(H, D) * module.bonus).sum(-1, keepdim=True).mul(v[:, 0]).view(-1)
        out: Tensor = module.out(y * module.gate(g))
        return out

    return step


def gsa(module: Any, state: Tensor) -> Step:
    keys, values = (part.contiguous() for part in state.chunk(2, -1))

    def step(x: Tensor) -> Tensor:
        q, k, v = silu(module.qkv(x)).view(3, H, 1, D)
        alpha = sigmoid(module.decay(x)).pow_(1 / module.temperature).view(H, -1, 1)
        written = 1 - alpha
        of_keys, of_values = torch.addcmul(keys * alpha, written, k), torch.addcmul(values * alpha, written, v)
        y = torch.softmax(q @ of_keys.mT, -1) @ of_values
        out: Tensor = module.out(module.norm(silu(y).view(1, 1, -1)))
        return out

    return step


def log_linear(module: Any, state: Any) -> Step:
    rate = -module.log_A.exp()
    carry = min((~state.seen & (state.seen + 1)).bit_length() - 1, state.states.shape[2] - 1)

    def step(u: Tensor) -> Tensor:
        B, C = module.key_query(u).view(2, 1, -1)
        size = softplus(module.step_size(u)).view(H)
        states = state.states * (size * rate).exp().view(H, 1, 1, 1)
        weights = softplus(module.weight(u).view(H, -1) * module.slope)
        added = B.mT * (module.value(u).view(H, 1, D) * size.view(H, 1, 1))
        read = torch.einsum("hl,hlsd->hsd", weights[:, 1:], states[0]) + weights[:, :1, None] * added
        states[:, :, carry] = added + states[:, :, : carry + 1].sum(2)
        states[:, :, :carry] = 0
        out: Tensor = module.out((C @ read).view(1, 1, -1))
        return out

    return step


def rfa_gated(module: Any, state: Tensor) -> Step:
    omega = (module.projection / module.temperature).mT.contiguous()

    def step(x: Tensor) -> Tensor:
        qk, v = module.qkv(x).split([2 * H * D, H * D], -1)
        u = (normalize(qk.view(2, H, 1, D), dim=-1) * module.sigma) @ omega
        q, k = torch.cat((u.cos(), u.sin()), -1)
        gate = sigmoid(module.gate(x)).view(H, 1, 1)
        values = torch.cat((v.view(H, 1, D), torch.ones(H, 1, 1)), -1) * (1 - gate)
        sums = (q @ torch.addcmul(state * gate, k.mT, values))[0]
        out: Tensor = module.out((sums[..., :-1] / sums[..., -1:]).view(1, 1, -1))
        return out

    return step


def s4d(module: Any, state: Any) -> Step:
    exponent, reads = module._parts()
    kept, added, read = exponent.exp(), module._added(exponent), 2 * reads[0]

    def step(x: Tensor) -> Tensor:
        h = torch.addcmul(state.h * kept, added, x.mT.to(added.dtype))
        return torch.addcmul((h * read).sum(-1).real.to(x.dtype), module.skip, x)

    return step


def lstm(module: Any, state: Any) -> Step:
    W, U, b = module.W[0].mT, module.U[0].mT, module.b[0]
    h, c = state

    def step(x: Tensor) -> Tensor:
        i, f, g, o = torch.addmm(torch.addmm(b, x[0], W), h, U).chunk(4, -1)
        cell = torch.addcmul(sigmoid(f) * c, sigmoid(i), torch.tanh(g))
        return (sigmoid(o) * torch.tanh(cell))[None]

    return step


def gru(module: Any, state: Any) -> Step:
    W, U, b, b_state = module.W[0].mT, module.U[0].mT, module.b[0], module.b_state[0]
    (h,) = state

    def step(x: Tensor) -> Tensor:
        C = x.shape[2]
        of_token, of_state = torch.addmm(b, x[0], W), torch.addmm(b_state, h, U)
        r, z = sigmoid(of_token[:, : 2 * C] + of_state[:, : 2 * C]).chunk(2, -1)
        new = torch.tanh(torch.addcmul(of_token[:, 2 * C :], r, of_state[:, 2 * C :]))
        return torch.lerp(new, h, z)[None]

    return step


BARE: dict[str, Callable[[Any, Any], Step]] = {
    "linear": linear,
    "retnet": retnet,
    "gla": gla,
    "delta": delta,
    "ssd": ssd,
    "mamba2": mamba2,
    "gated-delta": gated_delta,
    "gated-delta-2": gated_delta_2,
    "comba": comba,
    "kda": kda,
    "rwkv7": rwkv7,
    "gsa": gsa,
    "log-linear": log_linear,
    "rfa-gated": rfa_gated,
    "s4d": s4d,
    "lstm": lstm,
    "gru": gru,
}
