"""Sums of keys and values that fade: what the recurrent variants have in common.

S_t = a_t S_{t-1} + k_t v_tᵀ and o_t = q_tᵀ S_t, with 0 < a_t <= 1, is the product of a lower triangular matrix,
o_i = Σ_{j<=i} (q_i·k_j) a_{j+1}···a_i v_j. It is computed chunk by chunk: pairs within a chunk as a c x c matrix, all
earlier keys through the one state in front of the chunk, so that the work is O(n). Every factor is a power of two with
an exponent that is a sum of logarithms between two tokens and never positive: nothing overflows, however strong a decay
is, and what follows a strong one keeps its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnbench.attention.feature_tiles import Group, cut, head_groups

Chunk = Annotated[int, Field(ge=1, description="tokens whose pairs are formed. Moves time and memory only")]
"""The option of all recurrences that form the pairs within a chunk."""

Compute = Callable[..., Tensor]
"""Tensors ``(G, ...)`` of G pairs of batch entry and head, in float32 or float64, to an output ``(G, N, E)``."""


SHORT = 2**18
"""Numbers of an input up to which intermediate results are kept for gradients: some ten times as many are a few MiB."""


def by_heads(compute: Compute, *inputs: Tensor, again: bool | None = None) -> Tensor:
    """Run ``compute`` on as many heads at a time as stay in the cache.

    Of long inputs the backward pass runs it again for each group, so that only the inputs are kept and the intermediate
    results of one group exist at a time. Of short ones, up to :data:`SHORT` numbers, those are no more than a group's.

    Args:
        again: False keeps what ``compute`` keeps of long inputs too, where computing it again takes longer than reading
            it; then ``compute`` is one that takes STRETCH tokens at a time.
        inputs: ``(B, H, ...)``, the first of them ``(B, H, N, D)`` and the third ``(B, H, N, E)``.

    Returns:
        ``(B, H, N, E)`` in the dtype of the first input.
    """
    if again is None:
        again = inputs[0].numel() > SHORT
    groups = _groups(inputs[0].shape[2] if again else STRETCH, *inputs)
    if not again and torch.is_grad_enabled():
        batch, heads = groups[0]
        pairs = (batch.stop - batch.start) * (heads.stop - heads.start)
        parts = zip(*(torch.split(cut(x, (slice(None), slice(None))), pairs) for x in inputs), strict=True)
        kept = torch.cat([compute(*part) for part in parts])
        return kept.view(*inputs[0].shape[:3], -1).to(inputs[0].dtype)
    run = _ByHeads.apply
    out: Tensor = run(compute, groups, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _groups(tokens: int, first: Tensor, _: Tensor, values: Tensor, *others: Tensor) -> list[Group]:
    """Of heads of which so many ``tokens`` are in use at a time, in some ten tensors."""
    return head_groups(first, 2 * min(tokens, first.shape[2]) * max(first.shape[3], values.shape[3]))


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, groups: list[Group], *inputs: Tensor) -> Tensor:
        first, values = inputs[0], inputs[2]
        ctx.save_for_backward(*inputs)
        ctx.compute, ctx.groups = compute, groups
        outputs = (compute(*(cut(x, group) for x in inputs)) for group in groups)
        shape = *first.shape[:3], values.shape[-1]
        if len(groups) == 1:  # the only one is the output as it is
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


def chunked(x: Tensor, chunk: int) -> Tensor:
    """``(G, N, ...)`` to ``(G, chunks, chunk, ...)``, the last chunk filled up with zeros."""
    missing = -x.shape[1] % chunk
    if missing:
        x = pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return torch.unflatten(x, 1, (-1, chunk))


STRETCH = 1024
"""Tokens computed at a time, so that what is needed on the way stays in the cache, however long the sequence is."""


def stretches(chunk: int, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
    """``(G, N, ...)`` in parts of some STRETCH tokens, each :func:`chunked`."""
    tokens = chunk * max(1, STRETCH // chunk)
    return [
        tuple(chunked(x, chunk) for x in part)
        for part in zip(*(torch.split(x, tokens, 1) for x in inputs), strict=True)
    ]


KEPT = 16
"""Stretches of which everything is kept for gradients; computing them again takes a fifth of the time more, or two."""


def in_turn(
    work: Callable[..., tuple[Any, Any]], parts: Sequence[tuple[Any, ...]], state: Any = None
) -> tuple[list[Any], Any]:
    """Outputs of ``work(state, *part)`` and the state after it, part by part.

    For the gradients of more than :data:`KEPT` parts each is computed again: only the states between them are kept.
    """
    outputs = []
    for out, after in _in_turn(work, parts, state):
        outputs.append(out)
        state = after
    return outputs, state


def rows_in_turn(
    work: Callable[..., tuple[Tensor, Any]], parts: Sequence[tuple[Any, ...]], tokens: int, state: Any = None
) -> tuple[Tensor, Any]:
    """As :func:`in_turn`, the outputs of all parts as one: ``(G, tokens, E)`` without the rows beyond.

    Where nothing is kept for gradients, each goes to its place while it is in the cache.
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
    again = len(parts) > KEPT and torch.is_grad_enabled()
    for part in parts:
        if again:
            out, state = checkpoint(work, state, *part, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = work(state, *part)
        yield out, state


def states_before(added: Tensor, kept: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """State in front of each chunk, S_{b+1} = kept_b ⊙ S_b + added_b, and the one after the last.

    Args:
        added: ``(G, chunks, D, E)``.
        kept: broadcast against it; of one chunk if all are alike.
        state: S_0 ``(G, D, E)``; None for 0.
    """
    state = torch.zeros_like(added[:, 0]) if state is None else state
    factors = kept.unbind(1) * (added.shape[1] if kept.shape[1] == 1 else 1)
    states = []
    for more, factor in zip(added.unbind(1), factors, strict=True):
        states.append(state)
        state = torch.addcmul(more, factor, state)
    return torch.stack(states, 1), state


_STRONGEST = -1100.0
"""Of the logarithms of a decay: 2^-1100 is 0 in float64, and lower ones would cost the sums of the others digits."""


def decayed_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, causal: bool, chunk: int) -> Tensor:
    """Σ_j (q_i·k_j) 2^-|L_i - L_j| v_j over j <= i, or over all j, with L the running sum of ``log_decay``.

    Args:
        q, k: ``(G, N, D)``; v: ``(G, N, E)``.
        log_decay: log2(a_t) <= 0, ``(G, N)``, or ``(G, 1)`` where it is the same for all tokens. Else summed in
            float64: a difference of two sums is all that is left of tokens that follow a strong decay.
    """
    N = q.shape[1]
    chunk = min(chunk, N)
    parts = stretches(chunk, q, k, v)
    if log_decay.shape[1] == 1:
        sums = [log_decay[:, :, None] * torch.arange(1, chunk + 1, device=q.device, dtype=q.dtype)] * len(parts)
    else:
        steps = log_decay.clamp(min=_STRONGEST)
        sums = [x.cumsum(-1, dtype=torch.float64) for (x,) in stretches(chunk, steps)]
    coming: list[Tensor | None] = [None] * len(parts)
    if not causal:
        after = [(keys, values, since) for (_, keys, values), since in zip(parts, sums, strict=True)]
        coming[::-1], _ = in_turn(_states_after, after[::-1])
    read = partial(_read, causal=causal)
    return rows_in_turn(read, [(*part, *more) for part, *more in zip(parts, sums, coming, strict=True)], N)[0]


def _states_after(state: Tensor | None, keys: Tensor, values: Tensor, since: Tensor) -> tuple[Tensor, Tensor]:
    """State behind each chunk, of all later keys."""
    begun = since[..., None].to(keys.dtype).exp2()
    states, state = states_before(((keys * begun).mT @ values).flip(1), begun[:, :, -1:].flip(1), state)
    return states.flip(1), state


def _read(
    state: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    since: Tensor,
    later: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    # From the start of the chunk to a token, itself included, and from there to the end.
    begun, until = (x[..., None].to(keys.dtype).exp2() for x in (since, since[..., -1:] - since))
    past, state = states_before((keys * until).mT @ values, begun[:, :, -1:], state)
    out = (queries @ keys.mT * _weights(since, causal, keys.dtype)) @ values + (queries * begun) @ past
    if later is not None:
        out = out + (queries * until) @ later
    return out.flatten(1, 2), state


def _weights(since: Tensor, causal: bool, dtype: torch.dtype) -> Tensor:
    """What is left between two tokens of a chunk, ``(G, chunks, c, c)``."""
    between = (since[..., :, None] - since[..., None, :]).to(dtype)
    if not causal:
        return between.copysign(-1.0).exp2()  # -|x|
    future = torch.full(between.shape[-2:], float("-inf"), dtype=dtype, device=since.device).triu(1)
    return (between + future).exp2()


def last_state(k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """Σ_j 2^(L_n - L_j) k_j v_jᵀ after the last of n >= 0 tokens, ``(B, H, D, E)``.

    Args:
        k: ``(B, H, n, D)``; v: ``(B, H, n, E)``.
        log_decay: log2(a_t), ``(B, H, n, 1)`` or ``(B, H, n, D)``.
    """
    # Of the tokens after each: nothing is subtracted, so that what follows a strong decay keeps its digits.
    until = pad(log_decay[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
    return (k * until.exp2()).mT @ v
