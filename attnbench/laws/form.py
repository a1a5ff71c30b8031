"""Laws about how a variant is called: shapes, types, lengths, strides, and leaving things as they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from attnbench.catalogue.build import build
from attnbench.laws.laws import Case, Measured, apart, gap, gradients_along, gradients_apart, law
from attnbench.measure.flops import move_fake

LENGTHS = (1, 2, 7, 12, 29)


@law("build", few_shapes=True, vital=True, of_any=True)
def builds(case: Case) -> Iterator[Measured]:
    """It can be built in every setting."""
    case.works(case.module)
    yield Measured(0, 0)


@law("shape and type", few_shapes=True, of_any=True)
def shape_and_type(case: Case) -> Iterator[Measured]:
    """Shape, dtype and device are kept, finite in every dtype that it claims."""
    for name in case.dtypes:
        dtype = getattr(torch, name)
        inputs = case.draw(dtype=dtype)
        out = case.works(case.module(dtype=dtype), *inputs)
        like = inputs[0]
        if (out.shape, out.dtype, out.device) != (like.shape, like.dtype, like.device):
            got = f"{tuple(out.shape)} {out.dtype} on {out.device}"
            yield Measured(1, 0, f"{tuple(like.shape)} {dtype} on {like.device} came back as {got}")
        wrong = int((~out.isfinite()).sum())
        yield Measured(wrong, 0, f"{wrong} of {out.numel()} outputs are NaN or infinite in {dtype}")


@law("any length")
def any_length(case: Case) -> Iterator[Measured]:
    """Any length will do: one token, fewer than a block, no multiple."""
    for length in LENGTHS:
        shape = replace(case.shape, seq_len=length)
        inputs = case.draw(shape)
        out = case.works(case.module(shape), *inputs)
        good = out.shape == inputs[0].shape and bool(out.isfinite().all())
        yield Measured(int(not good), 0, f"{length} tokens give shape {tuple(out.shape)}, or NaN")


@law("longer sequences", claim="longer")
def longer_sequences(case: Case) -> Iterator[Measured]:
    """A module that was made for fewer tokens takes them all, by the same formula."""
    module, inputs = case.module(replace(case.shape, seq_len=12)), case.draw()
    out, oracle = case.works(module, *inputs), case.oracle(module)
    yield Measured(int(out.shape != inputs[0].shape), 0, f"{case.shape.N} tokens give shape {tuple(out.shape)}")
    if oracle is not None:
        what = f"made for 12 tokens, with {case.shape.N} it differs from the formula"
        yield apart(out, oracle(*inputs), case.close, what)


@law("cross-attention", few_shapes=True, claim="cross", applies=lambda case: not case.causal)
def cross_attention(case: Case) -> Iterator[Measured]:
    """Keys may come from a sequence of another length."""
    for length in (9, 31):
        shape = replace(case.shape, kv_len=length)
        module, inputs = case.module(shape), case.draw(shape)
        if not case.operator:
            yield from _asked(case, module, inputs[0], case.draw(replace(case.shape, seq_len=length), seed=1)[0])
            continue
        out = case.works(module, *inputs)
        good = out.shape == inputs[0].shape and bool(out.isfinite().all())
        yield Measured(
            int(not good), 0, f"{case.shape.N} queries and {length} keys give shape {tuple(out.shape)}, or NaN"
        )
        oracle = case.oracle(module)
        if oracle is not None:
            yield Measured(gap(out, oracle(*inputs)), case.close, f"not the formula with {length} keys")


def _asked(case: Case, module: nn.Module, x: Tensor, source: Tensor) -> Iterator[Measured]:
    N, M = x.shape[1], source.shape[1]
    padded, oracle = torch.arange(M) < torch.tensor([[M - 4], [M]]), case.oracle(module)
    leaves = [y.detach().requires_grad_() for y in (x, source)]
    for mask in (None, padded):
        out = case.works(module, leaves[0], source=leaves[1], key_mask=mask)
        what = "" if mask is None else " and padding"
        good = out.shape == x.shape and bool(out.isfinite().all())
        yield Measured(int(not good), 0, f"{N} tokens that ask {M} others give shape {tuple(out.shape)}, or NaN")
        if oracle is not None and good:
            expected = oracle(leaves[0], source=leaves[1], key_mask=mask)
            yield Measured(gap(out, expected), case.close, f"not the formula with {M} tokens of a source{what}")
            named = {"x": leaves[0], "the source": leaves[1]}
            yield from gradients_apart(named, out, expected, 10 * case.close, f"asking a source{what},")
    others = torch.where(padded[..., None], source, torch.nan)
    spoilt, clean = (module(x, source=one, key_mask=padded) for one in (others, source))
    yield apart(spoilt, clean, case.close, "NaN in padded tokens of a source moves the output")
    yield apart(module(x, source=x), module(x), case.close, "asking itself and asking nobody else differ")


@law("strides", of_any=True)
def strides(case: Case) -> Iterator[Measured]:
    """Inputs and the gradient of the output may be views of any strides."""
    for length in (case.shape.N, 24):  # the second is cut into blocks of 4 or 6 without any padding, that is, no copy
        shape = replace(case.shape, seq_len=length)
        module, inputs = case.module(shape), case.draw(shape, grad=True)
        expected = module(*inputs)
        direction = case.draw(shape, seed=1)[0].mT.contiguous().mT
        wanted = gradients_along(expected, inputs, direction.contiguous())
        turned = [x.mT.contiguous().mT for x in inputs]
        of_one_product = torch.stack(inputs[:3], dim=-3).transpose(1, -2).contiguous().transpose(1, -2).unbind(-3)
        of_one_product = (*of_one_product, *turned[3:])
        heads_inside = [x.transpose(1, -2).contiguous().transpose(1, -2) for x in inputs]
        for views in (of_one_product, turned, heads_inside):
            out = case.works(module, *views)
            yield Measured(gap(out, expected), case.close, f"another output for the strides {views[0].stride()}")
            for mine, other in zip(gradients_along(out, inputs, direction), wanted, strict=True):
                yield Measured(gap(mine, other), case.close, f"another gradient for the strides {views[0].stride()}")


@law("inputs untouched", few_shapes=True, of_any=True)
def inputs_untouched(case: Case) -> Iterator[Measured]:
    """Q, k and v are left as they were, with and without gradients."""
    inputs = case.draw()
    copies = [x.clone() for x in inputs]
    with torch.inference_mode():
        case.works(case.module(), *inputs)  # the remains of a first call know no gradients here
    case.works(case.module(), *inputs)
    changed = sum(not torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True))
    yield Measured(changed, 0, f"{changed} of the inputs were changed in place")


@law("gradient modes", of_any=True)
def gradient_modes(case: Case) -> Iterator[Measured]:
    """Without gradients, in no_grad and in inference_mode, the output is the same."""
    inputs = case.draw(grad=True)
    for mask in case.key_masks():
        expected = case.module()(*inputs, key_mask=mask)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = case.works(case.module(), *inputs, key_mask=mask)
            yield apart(out, expected, case.close, f"in {mode.__name__} the output differs")


@law("tracing", gates=False)
def tracing(case: Case) -> Iterator[Measured]:
    """Shapes can be traced without computing, unless they depend on the data."""
    with FakeTensorMode():
        inputs = case.draw(dtype=case.common_dtype)
        # Not Module.to: torch remembers fake tensors by weak references for a while, and then refuses to swap them.
        module = move_fake(build(case.spec, case.shape, level=case.level), torch.device("cpu"), case.common_dtype)
        out = case.works(_traced, module, inputs)
    if out is not None:
        yield Measured(int(out.shape != inputs[0].shape), 0, f"traced to shape {tuple(out.shape)}")


def _traced(module: nn.Module, inputs: list[Tensor]) -> Tensor | None:
    try:
        out: Tensor = module(*inputs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None
    return out
