"""Laws about what may influence what: later tokens, padding, other examples, other heads, the order of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from attnbench.testing.laws import Case, Measured, gap, law


def _padded(case: Case) -> bool:
    return bool(case.traits.key_padding)


@law(
    "causality",
    few_shapes=True,
    applies=lambda case: case.causal,
    claim=lambda traits: bool(traits.causal),
)
def causality(case: Case) -> Iterator[Measured]:
    """Tokens after t change no output up to t."""
    module, before = case.module(), case.draw()
    expected = module(*before)
    last = case.shape.N - 1
    for t in (0, 11, last - 1):
        after = [x.clone() for x in before]
        for x, other in zip(after, case.draw(seed=1), strict=True):
            x[..., t + 1 :, :] = other[..., t + 1 :, :]
        moved = gap(module(*after)[..., : t + 1, :], expected[..., : t + 1, :])
        yield Measured(moved, case.close, f"other tokens after {t} moved the outputs up to {t} by {moved:.2g}")
    for factor in (3, 30):
        after = [x.clone() for x in before]
        for x in after:
            x[..., -1, :] *= factor
        moved = gap(module(*after)[..., :last, :], expected[..., :last, :])
        yield Measured(moved, case.close, f"the last token times {factor} moved earlier outputs by {moved:.2g}")


@law(
    "receptive field",
    few_shapes=True,
    applies=lambda case: case.first or case.operator,
)
def receptive_field(case: Case) -> Iterator[Measured]:
    """The tokens that reach an output are those of the formula."""
    module = case.module()
    oracle = case.oracle(module)
    if oracle is None:
        return
    shape = replace(case.shape, batch=1, heads=1 if case.operator else case.shape.heads)
    module = case.module(shape)
    oracle = case.oracle(module)
    assert oracle is not None
    inputs = case.draw(shape)
    seen, documented = _reach(module, inputs), _reach(oracle, inputs)
    for i, (has, should) in enumerate(zip(seen, documented, strict=True)):
        if has != should:
            yield Measured(1, 0, f"output {i} sees the tokens {_listed(has)}; the formula {_listed(should)}")
            return
    yield Measured(0, 0)


def _reach(function: nn.Module | object, inputs: list[Tensor]) -> list[list[int]]:
    """For each output token the tokens of the last input with a gradient."""
    *others, last = inputs
    last = last.detach().requires_grad_()
    out = function(*others, last)  # type: ignore[operator]  # a module or a function
    # A generic direction, so that no sum of gradients cancels.
    weight = torch.randn(out.shape[-1], dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    reach = []
    for i in range(out.shape[-2]):
        (grad,) = torch.autograd.grad((out[..., i, :] * weight).sum(), last, retain_graph=True)
        size = grad.flatten(0, -3).abs().amax((0, -1)) if grad.ndim > 2 else grad.abs().amax(-1)
        reach.append((size > 1e-14).nonzero()[:, 0].tolist())
    return reach


def _listed(tokens: list[int]) -> str:
    return ", ".join(map(str, tokens[:8])) + (" ..." if len(tokens) > 8 else "") or "none"


@law(
    "padding",
    applies=_padded,
    claim=lambda traits: bool(traits.key_padding),
)
def padding(case: Case) -> Iterator[Measured]:
    """Padded input gives what the shorter input gives."""
    module = case.module()
    for real in (22, 21, 12, 5):
        inputs = case.draw()
        mask = torch.ones(2, case.shape.N, dtype=torch.bool)
        mask[0, real:] = False
        for x in inputs:
            x[0, ..., real:, :] *= 50
        padded = module(*inputs, key_mask=mask)
        short = module(*(x[:1, ..., :real, :] for x in inputs))
        whole = module(*(x[1:] for x in inputs))
        moved = max(gap(padded[:1, ..., :real, :], short), gap(padded[1:], whole))
        yield Measured(moved, case.close, f"{real} of {case.shape.N} tokens real: another output than without padding")


@law("hidden keys", few_shapes=True, applies=_padded)
def hidden_keys(case: Case) -> Iterator[Measured]:
    """What padded keys and values hold changes nothing."""
    module, inputs = case.module(), case.draw()
    mask = torch.rand(2, case.shape.N, generator=torch.Generator().manual_seed(2)) < 0.6
    real = mask.view(2, *[1] * (inputs[0].ndim - 3), case.shape.N, 1)
    expected = module(*inputs, key_mask=mask) * real
    others = [torch.where(real, x, 10 * y) for x, y in zip(inputs, case.draw(seed=1), strict=True)]
    moved = gap(module(*others, key_mask=mask) * real, expected)
    yield Measured(moved, case.close, f"other values at the padded positions moved the output by {moved:.2g}")
    oracle = case.oracle(module)
    if oracle is not None:
        yield Measured(gap(expected, oracle(*inputs, key_mask=mask) * real), case.close, "not the formula with a mask")
    if case.operator and case.traits.cross and not case.causal:
        shape = replace(case.shape, kv_len=17)
        module, (q, k, v) = case.module(shape), case.draw(shape)
        mask = torch.arange(17) < torch.tensor([[11], [17]])
        short = module(q[:1], k[:1, :, :11], v[:1, :, :11])
        yield Measured(
            gap(module(q, k, v, key_mask=mask)[:1], short), case.close, "padding of another sequence is seen"
        )


@law("blind query", few_shapes=True, applies=lambda case: case.operator and _padded(case))
def blind_query(case: Case) -> Iterator[Measured]:
    """A query that sees no key gives 0."""
    module, inputs = case.module(), case.draw(grad=True)
    mask = torch.tensor([[False], [True]]).expand(2, case.shape.N)
    out = module(*inputs, key_mask=mask)
    yield Measured(float(out[0].detach().abs().max()), 0.0, "a query without any visible key does not give 0")
    out.square().sum().backward()
    good = all(x.grad is None or bool(x.grad.isfinite().all()) for x in inputs)
    yield Measured(int(not good), 0, "its gradient is NaN or infinite")


@law("batch", few_shapes=True)
def batch(case: Case) -> Iterator[Measured]:
    """An example does not depend on the others in its batch."""
    module, inputs = case.module(), case.draw()
    for x in inputs:
        x[1] *= 20
    moved = gap(module(*inputs)[:1], module(*(x[:1] for x in inputs)))
    yield Measured(moved, case.close, f"an example alone and the same in a batch differ by {moved:.2g}")


@law("heads", few_shapes=True, applies=lambda case: case.operator)
def heads(case: Case) -> Iterator[Measured]:
    """A head does not depend on the other heads."""
    module, inputs = case.module(), case.draw()
    expected = module(*inputs)[:, 0]
    for x, other in zip(inputs, case.draw(seed=1), strict=True):
        x[:, 1] = 5 * other[:, 1]
    moved = gap(module(*inputs)[:, 0], expected)
    yield Measured(moved, case.close, f"other inputs of head 1 moved head 0 by {moved:.2g}")


@law(
    "permutation",
    applies=lambda case: not case.causal,
)
def permutation(case: Case) -> Iterator[Measured]:
    """Permuting the tokens permutes the output, where claimed and only there."""
    module, inputs = case.module(), case.draw()
    order = torch.randperm(case.shape.N, generator=torch.Generator().manual_seed(4))
    moved = gap(module(*(x[..., order, :] for x in inputs)), module(*inputs)[..., order, :])
    if case.traits.permutable:
        yield Measured(moved, 1e-8, f"permuted tokens give another output, by {moved:.2g}")
    elif case.first:
        yield Measured(
            -moved, -1e-6, "it claims to depend on positions, and a permutation of the tokens changes nothing"
        )
