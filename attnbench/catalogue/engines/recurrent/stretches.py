"""Long sequences by stretches, many heads by groups, and recomputation in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attnbench.catalogue.engines.tiling import Group, budget, cut, head_groups, recomputed

Compute = Callable[..., Tensor]
"""Maps tensors ``(G, ...)`` of G pairs of batch entry and head, in float32 or float64, to an output ``(G, N, E)``."""


def by_heads(compute: Compute, *inputs: Tensor, again: bool | None = None) -> Tensor:
    """Run ``compute`` on a cache's worth of heads at a time; ``(B, H, N, E)`` in the dtype of the first input.

    For long inputs the backward pass runs it again for each group: only the inputs are kept, and the intermediate
    results of one group at a time exist. For short inputs all are kept, about ten times as many numbers: no more than
    those of one group.

    Args:
        again: False keeps the intermediate results of long inputs too, for a ``compute`` with results that are faster
            to read than to compute; it must take STRETCH tokens at a time.
        inputs: ``(B, H, ...)``, the first of them ``(B, H, N, D)`` and the third ``(B, H, N, E)``.
    """
    first, _, values, *_ = inputs
    if again is None:
        again = first.numel() > budget("recurrent.kept", first.device)
    tokens = first.shape[2] if again else min(STRETCH, first.shape[2])
    # So few heads that this many tokens of about ten tensors fit the cache.
    groups = head_groups(first, 2 * tokens * max(first.shape[3], values.shape[3]))
    if not again and torch.is_grad_enabled():
        batch, heads = groups[0]
        pairs = (batch.stop - batch.start) * (heads.stop - heads.start)
        parts = zip(*(torch.split(cut(x, (slice(None), slice(None))), pairs) for x in inputs), strict=True)
        kept = torch.cat([compute(*part) for part in parts])
        return kept.view(*first.shape[:3], -1).to(first.dtype)
    run = _ByHeads.apply
    out: Tensor = run(compute, groups, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, groups: list[Group], *inputs: Tensor) -> Tensor:
        first, values = inputs[0], inputs[2]
        ctx.save_for_backward(*inputs)
        ctx.compute, ctx.groups = compute, groups
        outputs = (compute(*(cut(x, group) for x in inputs)) for group in groups)
        shape = *first.shape[:3], values.shape[-1]
        if len(groups) == 1:  # the only one is the whole output
            return next(outputs).view(shape).to(first.dtype)
        out = first.new_empty(shape)
        for group, part in zip(groups, outputs, strict=True):
            target = out[group]
            target.copy_(part.view_as(target))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        wanted = [i for i in range(len(inputs)) if ctx.needs_input_grad[i + 2]]
        grads = {i: torch.empty_like(inputs[i], memory_format=torch.contiguous_format) for i in wanted}
        for group in ctx.groups:
            tiles = [cut(x, group).detach() for x in inputs]
            with torch.enable_grad():
                leaves = [tiles[i].requires_grad_() for i in wanted]
                out = ctx.compute(*tiles)
            for i, part in zip(wanted, torch.autograd.grad(out, leaves, cut(grad, group)), strict=True):
                target = grads[i][group]
                target.copy_(part.view_as(target))
        return None, None, *(grads.get(i) for i in range(len(inputs)))


def by_rows(compute: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs ``(B, H, n, E)`` and the state ``(B, H, D, E)`` after n tokens that go on from ``state``.

    ``compute`` takes the inputs of all pairs ``(G, n, ·)`` in the state's dtype, the third the values, and the state.
    """
    found = compute(*(x.to(state.dtype).flatten(0, 1) for x in inputs), state.flatten(0, 1))
    out, after = (torch.unflatten(x, 0, state.shape[:2]) for x in found)
    return out.to(inputs[2].dtype), after


def chunked(x: Tensor, chunk: int) -> Tensor:
    """``(G, N, ...)`` to ``(G, chunks, chunk, ...)``, the last chunk padded with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return torch.unflatten(x, 1, (-1, chunk))


STRETCH = 1024
"""Tokens computed at a time, so that intermediate results stay in the cache, however long the sequence is."""


def stretches(chunk: int, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """Parts of the inputs ``(G, N, ...)`` of about STRETCH tokens, each :func:`chunked`."""
    tokens = chunk * max(1, STRETCH // chunk)
    return [
        tuple(chunked(x, chunk) for x in part)
        for part in zip(*(torch.split(x, tokens, 1) for x in inputs), strict=True)
    ]


KEPT = 16
"""Stretches up to which everything is kept for gradients; recomputing adds one or two fifths to the time."""


def in_turn(
    work: Callable[..., tuple[Any, Any]], parts: Sequence[tuple[Any, ...]], state: Any = None
) -> tuple[list[Any], Any]:
    """Outputs of ``work(state, *part)`` and the state after it, part by part.

    If there are more than :data:`KEPT` parts, gradients compute each part again: only the states between are kept.
    """
    outputs = []
    for out, after in _in_turn(work, parts, state):
        outputs.append(out)
        state = after
    return outputs, state


def rows_in_turn(
    work: Callable[..., tuple[Tensor, Any]], parts: Sequence[tuple[Any, ...]], tokens: int, state: Any = None
) -> tuple[Tensor, Any]:
    """Like :func:`in_turn`, with the outputs of all parts joined: ``(G, tokens, E)``, without the rows beyond.

    Without gradients, each output is copied to its place while it is still in the cache.
    """
    if torch.is_grad_enabled():
        outputs, state = in_turn(work, parts, state)
        return torch.cat(outputs, 1)[:, :tokens], state
    out, start = None, 0
    for rows, after in _in_turn(work, parts, state):
        if out is None:
            out = rows.new_empty(rows.shape[0], tokens, rows.shape[2])
        end = min(start + rows.shape[1], tokens)
        out[:, start:end] = rows[:, : end - start]
        start, state = end, after
    assert out is not None
    return out, state


def _in_turn(
    work: Callable[..., tuple[Any, Any]], parts: Sequence[tuple[Any, ...]], state: Any
) -> Iterator[tuple[Any, Any]]:
    for part in parts:
        out, state = recomputed(work, state, *part, wanted=len(parts) > KEPT)
        yield out, state
