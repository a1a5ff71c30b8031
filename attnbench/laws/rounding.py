"""Laws about rounding: sums over tokens have more digits than their inputs, and how few bits depend on their blocks."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.laws.laws import Case, Measured, gradients_along, law

ROUNDING = {torch.bfloat16: 2**-9, torch.float32: 2**-24}
"""Largest relative error of a number rounded to a dtype."""

GROWTH = 3.0
"""Largest growth of errors in bfloat16 from 64 to 1024 tokens. Sums in it, one term at a time, make it 4 and more."""

TIMES = 8.0
"""Largest rounding of a variant, in units of the formula's, written out in float32."""

LEAST = 2.0
"""The rounding of a formula, in roundings of its result, if it is less: some are computed in float64 throughout."""

FEW = 16
"""Tensors of fewer numbers are left out in bfloat16, and drawn several times in float32, since chance decides."""

LENGTH, DRAWS, SAME = 128, 6, 30.0
"""In float32: tokens; draws of parameters and inputs at most; and the error of the output or of an input's gradient, in
roundings, that a choice between nearly equal numbers may have made. Such a draw is left out, but not every one."""


@law(
    "low precision",
    applies=lambda case: case.first and {"bfloat16", "float64"} <= set(case.traits.dtypes),
)
def low_precision(case: Case) -> Iterator[Measured]:
    """Errors do not grow with n in bfloat16, and are about those of the formula in float32."""
    if (case.variant.time_exponent or 0.0) > 1.6:
        case = replace(case, spec=Spec(case.variant.name))  # tiles of the small setting would make 10,000s of steps
    yield from _as_it_grows(case)
    if "float32" in case.traits.dtypes:
        yield from _beside_its_formula(case)


def _as_it_grows(case: Case) -> Iterator[Measured]:
    short, long = 64, 1024
    few, many = _errors(case, short), _errors(case, long)
    if many.keys() - few.keys():  # parameters that so few tokens do not reach have no error to compare with
        few = {**_errors(case, 4 * short), **few}
    for name, error in many.items():
        growth = error / max(few.get(name, 0.0), 1.0)
        yield Measured(
            growth,
            GROWTH,
            f"{name} is {error:.0f} times its rounding off at n = {long}, {few.get(name, 0.0):.1f} times at {short}",
        )


def _errors(case: Case, n: int) -> dict[str, float]:
    """Errors of output and gradients, against float64 on the same rounded inputs and parameters, in roundings."""
    shape, dtype = Shape(1, 1, n, FEW, causal=case.causal), torch.bfloat16
    module = case.module(shape, dtype=dtype)
    inputs, direction = (case.draw(shape, dtype=dtype, seed=seed) for seed in (n, n + 1))
    exactly = copy.deepcopy(module).double()
    exact = _results(exactly, exactly, case.named([x.double() for x in inputs]), direction[0])
    found = _results(module, module, case.named(inputs), direction[0])
    return {
        name: relative_error(found[name], x) / ROUNDING[dtype]
        for name, x in exact.items()
        if x.numel() >= FEW and x.norm() > 0
    }


def _beside_its_formula(case: Case) -> Iterator[Measured]:
    """Errors of output and gradients over all draws, against the formula in float64, and those of the formula."""
    shape, dtype = Shape(1, 1, LENGTH, FEW, causal=case.causal), torch.float32
    least = min((x.numel() for x in case.module(shape).parameters()), default=FEW)
    squares: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
    left = min(DRAWS, -(-FEW // least))
    for seed in range(2 * DRAWS):
        module = case.module(shape, seed=seed, dtype=dtype)
        exactly = copy.deepcopy(module).double()
        formula, exact_formula = case.oracle(module), case.oracle(exactly)
        if formula is None or exact_formula is None:
            return
        inputs, direction = (case.draw(shape, dtype=dtype, seed=LENGTH + 2 * seed + i) for i in (0, 1))
        exact = _results(exact_formula, exactly, case.named([x.double() for x in inputs]), direction[0])
        found, of_formula = (_results(one, module, case.named(inputs), direction[0]) for one in (module, formula))
        large = [name for name, x in list(exact.items())[: len(inputs) + 1] if x.norm() > 0]
        if seed < DRAWS and any(relative_error(found[x], exact[x]) > SAME * ROUNDING[dtype] for x in large):
            continue
        for name, x in exact.items():
            squares[name] += torch.stack([y.square().sum() for y in (x, found[name] - x, of_formula[name] - x)])
        left -= 1
        if not left:
            break
    for name, sums in squares.items():
        size, error, formulas = (float(one) for one in sums.sqrt())
        if size == 0:
            continue
        error, formulas = error / size / ROUNDING[dtype], max(formulas / size / ROUNDING[dtype], LEAST)
        fault = f"in float32 {name} is {error:.0f} times its rounding off, that of the formula {formulas:.1f} times"
        yield Measured(error / formulas, TIMES, fault)


def _results(
    function: Callable[..., Tensor], module: nn.Module, inputs: dict[str, Tensor], direction: Tensor
) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    wanted = leaves | dict(module.named_parameters())
    out = function(*leaves.values())
    grads = gradients_along(out, list(wanted.values()), direction.to(out.dtype))
    found = {f"the gradient of {name}": x for name, x in zip(wanted, grads, strict=True)}
    return {"the output": out.detach(), **found}


SIZES = (256, 64, 16, 4)
"""Numbers that share a scale, step by step."""

FALL = 0.95
"""The most that may be left of the error where a quarter as many share a scale, on inputs for which that matters."""

SAME = 0.1
"""Largest move of an output with all keys, in units of the error: one of many numbers may be rounded otherwise."""

WORSE = 0.2
"""The error without an offset in units of that with it, at most, where what keys share is rounded with them."""


@law("rounding in blocks", claim="rounds", applies=lambda case: case.operator and not case.causal)
def rounding_in_blocks(case: Case) -> Iterator[Measured]:
    """Smaller blocks round less. What keys share moves an output unless it is taken off first."""
    rounds, shape = case.traits.rounds, Shape(1, 2, 512, 256)
    assert rounds is not None
    q, k, v = case.draw(shape)
    exact = exact_attention(q, k, v)
    if rounds.blocks:
        lengths = _lengths(shape.N).to(q)
        uneven = q * lengths, k * lengths, v * _lengths(shape.D).to(q).mT
        expected = exact_attention(*uneven)
        every = dict.fromkeys([rounds.kept] if rounds.kept else [], 0)
        errors = [
            relative_error(case.module(shape, options=dict.fromkeys(rounds.blocks, size) | every)(*uneven), expected)
            for size in SIZES
        ]
        for size, (before, after) in zip(SIZES[1:], pairwise(errors), strict=True):
            left = after / before
            yield Measured(left, FALL, f"with {size} to a scale the error is {left:.3f} of that with 4 times as many")
    if not rounds.smooth:
        return
    moved = k + 60 * case.draw(shape, seed=1)[1][:, :, :1]
    on = case.module(shape, options={} if rounds.smooth == "always" else {rounds.smooth: True})
    still = on(q, k, v)
    far = relative_error(on(q, moved, v), still) / max(relative_error(still, exact), case.close)
    yield Measured(far, SAME, f"what all keys share moves the output by {far:.2g} times the error of rounding")
    if rounds.smooth != "always":
        off = case.module(shape, options={rounds.smooth: False})
        share = relative_error(off(q, k, v), exact) / relative_error(off(q, moved, v), exact)
        yield Measured(
            share, WORSE, f"{rounds.smooth}=false, and what all keys share is taken off: {share:.2g} of the error"
        )


def _lengths(n: int) -> Tensor:
    """Factors ``(n, 1)`` of tokens or channels: products of one for each run of 256, 64, 16, 4 and 1 of them."""
    generator, total = torch.Generator().manual_seed(2), torch.zeros(n, dtype=torch.float64)
    for run in (*SIZES, 1):
        total += torch.randn(n // run, dtype=torch.float64, generator=generator).repeat_interleave(run)
    return (0.5 * total).exp()[:, None]
