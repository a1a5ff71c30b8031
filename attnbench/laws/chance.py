"""Laws about random numbers: seeds, unbiased estimates, their variance, and how fast the error falls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from attnbench.contract.capabilities import KernelMean, RandomKernel
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.laws.laws import F64, Case, Measured, law

DRAWS = 1000
"""Draws of random features: a bias of a few percent is then many standard errors."""


@law("seed", few_shapes=True)
def seed(case: Case) -> Iterator[Measured]:
    """The seed decides everything random; forward draws nothing."""
    inputs = case.draw()
    module = case.module(seed=1)
    state = torch.get_rng_state()
    first, again = module(*inputs), module(*inputs)
    untouched = torch.equal(state, torch.get_rng_state()) and torch.equal(first, again)
    yield Measured(int(not untouched), 0, "forward draws random numbers: two calls differ, or the generator moved")
    same = torch.equal(first, case.module(seed=1)(*inputs))
    yield Measured(int(not same), 0, "the same seed gives another output")
    if case.traits.stochastic:
        # Large blocks leave nothing to chance in a short sequence.
        alike = all(_alike(case, replace(case.shape, seq_len=times * case.shape.N)) for times in (1, 8, 64))
        yield Measured(int(alike), 0, "it claims to be random, and another seed gives the same output")
    else:
        other = not torch.equal(first, case.module(seed=2)(*inputs))
        yield Measured(int(other), 0, "it claims not to be random, and another seed gives another output")


def _alike(case: Case, shape: Shape) -> bool:
    inputs = case.draw(shape)
    one, other = (case.module(shape, seed=seed)(*inputs) for seed in (1, 2))
    return torch.equal(one, other)


def _has_kernel(case: Case) -> bool:
    return case.operator and not case.causal and hasattr(case.variant.make, "kernel")


def _pairs(shape: Shape) -> tuple[Tensor, Tensor]:
    """Queries and keys of one sign each, which reveal a random projection that is not symmetric."""
    generator = torch.Generator().manual_seed(5)
    q, k = (0.4 + 0.2 * torch.rand(1, shape.H, n, shape.D, dtype=F64, generator=generator) for n in (shape.N, shape.M))
    q[:, :, 1::2] *= -1
    return q, k


@torch.no_grad()
def _mean(module: nn.Module, q: Tensor, k: Tensor) -> Tensor:
    return module.kernel_mean(q, k) if isinstance(module, KernelMean) else (q @ k.mT * q.shape[-1] ** -0.5).exp()


@law("unbiased", applies=_has_kernel, gates=False)
def unbiased(case: Case) -> Iterator[Measured]:
    """The random products are right on average, for q and k of one sign."""
    shape = Shape(batch=1, heads=1, seq_len=3, head_dim=4)
    q, k = (x.to(case.dtype) for x in _pairs(shape))
    first = case.module(shape)
    mean = _mean(first, q, k)
    with torch.no_grad():
        drawn = [cast(RandomKernel, case.module(shape, seed=s)).kernel(q, k) for s in range(DRAWS)]
    ratios = torch.stack(drawn) / mean
    error = ratios.std(0) / math.sqrt(DRAWS)
    away = ((ratios.mean(0) - 1) / error).abs()
    i, j = divmod(int(away.argmax()), shape.M)
    found = float(ratios.mean(0).flatten()[i * shape.M + j])
    yield Measured(
        float(away.max()),
        4.5,
        f"biased: the mean of {DRAWS} draws is {found:.3f} of the kernel, {float(away.max()):.0f} standard errors off",
    )
    variance = getattr(first, "kernel_variance", None)
    with torch.no_grad():
        known = None if variance is None else variance(q, k)
    if known is not None:
        off = float((ratios.var(0) * mean**2 / known - 1).abs().max())
        # The variance of a variance, from the draws themselves; 5 % beyond what chance explains.
        fourth = ((ratios - ratios.mean(0)) ** 4).mean(0) / ratios.var(0) ** 2
        chance = 3 * float(((fourth - 1) / DRAWS).sqrt().max())
        yield Measured(off, 0.05 + chance, f"the variance is {off:.0%} from its closed form")


@law("rate", claim="converges_with", applies=lambda case: case.operator and not case.causal, gates=False)
def rate(case: Case) -> Iterator[Measured]:
    """The squared error falls as 1 / features."""
    if case.variant.target(case.spec) != "softmax" and not hasattr(case.variant.make, "kernel_mean"):
        return
    shape = replace(case.shape, batch=1, heads=1, seq_len=12)
    q, k, v = case.draw(shape)
    q, k = q / 4, k / 4  # so that the few largest exponentials do not decide
    option = case.traits.converges_with
    few, many = 64, 1024

    @torch.no_grad()
    def squared(features: int) -> float:
        total = 0.0
        for s in range(40):
            module = case.module(shape, seed=s, options={option: features})
            if isinstance(module, KernelMean):
                weights = module.kernel_mean(q, k)
                expected = weights @ v / weights.sum(-1, keepdim=True)
            else:
                expected = exact_attention(q, k, v)
            total += float((module(q, k, v) - expected).square().mean())
        return total / 40

    power = math.log(squared(many) / squared(few)) / math.log(many / few)
    yield Measured(abs(power + 1), 0.25, f"the squared error goes as {option}^{power:.2f}, not ^-1")
