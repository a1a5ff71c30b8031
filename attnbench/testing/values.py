"""Laws about the numbers: the documented formula, its matrix, its limits, and decoding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from attnbench.capabilities import Decoding
from attnbench.position_bias import position_bias
from attnbench.reference import exact_attention
from attnbench.spec import parse_spec
from attnbench.testing.laws import Case, Measured, gap, law, worst_place


@law("formula", few_shapes=True)
def formula(case: Case) -> Iterator[Measured]:
    """The output is that of the documented formula, dense, in float64."""
    for length, scale in ((case.shape.N, 1.0), (9, 1.0), (case.shape.N, 3.0), (case.shape.N, 8.0)):
        shape = replace(case.shape, seq_len=length)
        module, inputs = case.module(shape), case.draw(shape, seed=length)
        inputs = [x * scale for x in inputs]
        oracle = case.oracle(module)
        if oracle is None:
            return
        out, expected = module(*inputs), oracle(*inputs)
        far = gap(out, expected)
        place = worst_place(out, expected)
        where = f"output {place[-2]}" + (f" of head {place[1]}" if case.operator else "")
        yield Measured(far, case.close, f"{where} of {length} differs from the formula by {far:.2g}")


@law(
    "implied matrix",
    few_shapes=True,
    applies=lambda case: case.operator,
)
def implied_matrix(case: Case) -> Iterator[Measured]:
    """V = I gives the matrix of the formula, weight by weight."""
    n = 11
    shape = replace(case.shape, batch=1, seq_len=n, head_dim=n)
    module, (q, k, _) = case.module(shape), case.draw(shape)
    oracle = case.oracle(module)
    if oracle is None:
        return
    v = torch.eye(n, dtype=case.dtype).expand(1, shape.H, n, n)
    weights, expected = module(q, k, v).detach(), oracle(q, k, v).detach()
    _, head, i, j = worst_place(weights, expected)
    got, wanted = float(weights[0, head, i, j]), float(expected[0, head, i, j])
    yield Measured(
        gap(weights, expected), case.close, f"query {i} gives key {j} the weight {got:.3g}, the formula {wanted:.3g}"
    )


@law(
    "average",
    few_shapes=True,
    applies=lambda case: case.operator and case.traits.rows_sum_to_one,
    claim=lambda traits: traits.rows_sum_to_one,
)
def average(case: Case) -> Iterator[Measured]:
    """The weights of a row sum to one: V = 1 gives 1."""
    q, k, v = case.draw()
    out = case.module()(q, k, torch.ones_like(v)).detach()
    _, _, i, _ = worst_place(out, torch.ones_like(out))
    yield Measured(
        gap(out, torch.ones_like(out)), case.close, f"the weights of query {i} sum to {float(out[0, 0, i, 0]):.4g}"
    )


@law("exact", few_shapes=True, applies=lambda case: case.traits.exact)
def exact(case: Case) -> Iterator[Measured]:
    """It equals softmax attention."""
    module, inputs = case.module(), case.draw()
    masks = [None]
    if case.traits.key_padding:
        masks.append(torch.rand(2, case.shape.N, generator=torch.Generator().manual_seed(2)) < 0.6)  # type: ignore[arg-type]  # a list of both
    for key_mask in masks:
        expected = exact_attention(*inputs, causal=case.causal, key_mask=key_mask)
        far = gap(module(*inputs, key_mask=key_mask), expected)
        yield Measured(far, case.rounding, f"it differs from softmax attention by {far:.2g}")


@law(
    "bias",
    applies=lambda case: case.operator and bool(case.traits.bias) and case.first,
    claim=lambda traits: bool(traits.bias),
)
def bias(case: Case) -> Iterator[Measured]:
    """A bias of each pair of positions is added to the logits."""
    for kind in ("alibi", "relative"):
        shape = replace(case.shape, bias=kind)
        module, inputs = case.module(shape), case.draw(shape)
        added = position_bias(shape)
        dense = case.oracle(module)
        if case.traits.exact:
            expected = exact_attention(*inputs, causal=case.causal, bias=added)
        elif dense is not None:
            expected = dense(*inputs)
        else:
            return
        far = gap(module(*inputs), expected)
        yield Measured(far, case.close, f"with {kind} it differs from the formula by {far:.2g}")
        moved = gap(module(*inputs), case.module()(*inputs))
        yield Measured(-moved, -1e-4, f"{kind} changes nothing")


@law(
    "limit to exact",
    applies=lambda case: case.first and bool(case.traits.exact_with),
    claim=lambda traits: bool(traits.exact_with),
)
def limit_to_exact(case: Case) -> Iterator[Measured]:
    """Options that leave nothing out give softmax attention."""
    for template in case.traits.exact_with:
        for n in (7, 16, 23):
            text = template.format(n=n)
            limit = replace(case, spec=parse_spec(f"{case.variant.name}:{text}"))
            shape = replace(case.shape, seq_len=n)
            inputs = case.draw(shape)
            far = gap(limit.module(shape)(*inputs), exact_attention(*inputs, causal=case.causal))
            yield Measured(far, case.close, f"with {text} at n = {n} it differs from softmax attention by {far:.2g}")


@law("large inputs", few_shapes=True)
def large_inputs(case: Case) -> Iterator[Measured]:
    """Finite in float32 at logits of standard deviation 64, and at keys or queries far below 0."""
    if "float32" not in case.traits.dtypes:
        return
    module, inputs = case.module(dtype=torch.float32), case.draw(dtype=torch.float32)
    large = [8 * x for x in inputs[:-1]] + inputs[-1:] if case.operator else [64 * x for x in inputs]
    low = [x - 200 for x in large[:-1]] + large[-1:] if case.operator else [x - 200 for x in inputs]
    for given, what in ((large, "large inputs"), (low, "inputs around -200")):
        wrong = int((~module(*given).isfinite()).sum())
        yield Measured(wrong, 0, f"{what} give {wrong} outputs that are NaN or infinite")


@law(
    "decoding",
    few_shapes=True,
    applies=lambda case: case.causal and bool(case.traits.decode),
    claim=lambda traits: bool(traits.decode),
)
def decoding(case: Case) -> Iterator[Measured]:
    """Token by token it gives what the whole sequence gives."""
    for prompt in (0, 9, case.shape.N - 1):
        yield _decoded(case, case.draw(), prompt, case.close)
    if "float32" in case.traits.dtypes:
        # Logits of a standard deviation of 64; decays that leave nothing, also of some tokens that are louder still.
        louder = torch.where(torch.arange(case.shape.N) % 5 == 0, 1000.0, 1.0)[:, None]
        for factor in (8.0,) if case.operator else (64.0, 64.0 * louder):
            yield _decoded(case, [x * factor for x in case.draw(dtype=torch.float32)], 0, LOUD)


LOUD = 1e-4
"""How far two ways to the same numbers may be apart in float32 where the inputs are large."""


def _decoded(case: Case, inputs: list[Tensor], prompt: int, bound: float) -> Measured:
    """How far the worst token after a prompt of so many tokens is from what the whole sequence gives."""
    module = case.module(dtype=inputs[0].dtype)
    expected = module(*inputs)
    decoding = cast(Decoding, module)
    state = decoding.begin(*(x[..., :prompt, :] for x in inputs))
    far, at = -1.0, prompt
    for t in range(prompt, case.shape.N):
        token = [x[..., t : t + 1, :] for x in inputs]
        decoding.step(state, *token)  # the next line must not see that this happened
        out, state = decoding.step(state, *token)
        here = gap(out, expected[..., t : t + 1, :])
        if not here <= far:
            far, at = here, t
            if math.isnan(far):
                break
    return Measured(far, bound, f"after a prompt of {prompt}, token {at} differs by {far:.2g}")
