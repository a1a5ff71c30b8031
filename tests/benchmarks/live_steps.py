"""A decoding step of a recurrent variant beside its bare arithmetic, in turns. See `make selfcheck`.

`pytest -s tests/benchmarks/live_steps.py` prints the ratios. Bare is what the formula asks for, with all constants at
hand, in as few calls as a user of torch would write for one token of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from attnbench.capabilities import Decoding
from attnbench.shape import Shape
from attnbench.spec import parse_spec
from attnbench.variant import VARIANTS, build

H, D, N = 8, 64, 64


def linear(module: Any, state: Any) -> Callable[..., Tensor]:
    sums, ones = state.of_values.mT.contiguous(), state.of_ones

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        phi_q, phi_k = (torch.nn.functional.elu(x).add_(1.0) for x in (q, k))
        of_values, of_ones = torch.addcmul(sums, phi_k.mT, v), ones + phi_k
        return (phi_q @ of_values).div_(phi_q @ of_ones.mT)

    return step


def retnet(module: Any, state: Any) -> Callable[..., Tensor]:
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


def gla(module: Any, state: Tensor) -> Callable[..., Tensor]:
    def step(x: Tensor) -> Tensor:
        q, k, v = module.qkv(x).view(3, 1, H, 1, D)
        decay = torch.sigmoid(module.decay(x)).pow_(1 / module.temperature).view(1, H, D, 1)
        y = (q @ torch.addcmul(state * decay, k.mT, v)).mul_(D**-0.5)
        out: Tensor = module.out(module.norm(y.view(1, 1, H, D)).flatten(2) * torch.nn.functional.silu(module.gate(x)))
        return out

    return step


def delta(module: Any, state: Tensor) -> Callable[..., Tensor]:
    unit = torch.nn.functional.normalize

    def step(x: Tensor) -> Tensor:
        q, k, v = module.qkv(x).view(3, 1, H, 1, D)
        q, k = unit(torch.nn.functional.silu(torch.stack((q, k))), dim=-1)
        rate = torch.sigmoid(module.beta(x)).view(1, H, 1, 1)
        after = torch.addcmul(state, k.mT, (v - k @ state).mul_(rate))
        out: Tensor = module.out(module.norm((q @ after).view(1, 1, H, D)).flatten(2))
        return out

    return step


@pytest.mark.parametrize("bare", [linear, retnet, gla, delta])
def test_a_step_takes_at_most_twice_its_arithmetic(bare: Callable[[Any, Any], Callable[..., Tensor]]) -> None:
    name = bare.__name__
    module = build(parse_spec(name), Shape(1, H, N, D, causal=True), seed=0).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    mixer = VARIANTS.get(name).kind == "mixer"
    sizes = [(1, N, H * D)] if mixer else [(1, H, N, D)] * 3
    inputs = [torch.randn(size, generator=generator) for size in sizes]
    prompt, token = ([x[..., part, :] for x in inputs] for part in (slice(0, N - 1), slice(N - 1, N)))
    decoding = cast(Decoding, module)
    with torch.inference_mode():
        state = decoding.begin(*prompt)
        alone = bare(module, state)
        torch.testing.assert_close(decoding.step(state, *token)[0], alone(*token), atol=1e-4, rtol=1e-4)

        def seconds(run: Callable[..., Any], *given: Any) -> float:
            start = perf_counter()
            for _ in range(20):
                run(*given)
            return (perf_counter() - start) / 20

        pairs = [(seconds(decoding.step, state, *token), seconds(alone, *token)) for _ in range(200)]
    ours, theirs = (min(side) for side in zip(*pairs, strict=True))
    print(f"\n{name}: a step takes {ours * 1e6:.0f} µs, {ours / theirs:.2f} times its arithmetic alone")
    assert ours <= 2 * theirs
