"""Laws about the numbers: the documented formula, its matrix, its limits, decoding, and a choice of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from time import process_time
from typing import cast

import torch
from torch import Tensor, nn

from attnbench.catalogue.engines.decoding.drafts import behind, rolled_back, taken
from attnbench.catalogue.engines.decoding.unequal import joined
from attnbench.contract.capabilities import Decoding, Prompted, Selecting, chooser, steps
from attnbench.contract.problem.reference import exact_attention, masked_attention, of_query_heads
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.contract.spec import parse_spec
from attnbench.errors import Unsupported
from attnbench.laws.laws import (
    SHAPE,
    Case,
    DoesNotWork,
    Measured,
    NothingClaimed,
    apart,
    gap,
    gradients_apart,
    law,
    worst_place,
)
from attnbench.text import quantity


@law("formula", few_shapes=True)
def formula(case: Case) -> Iterator[Measured]:
    """The output is that of the documented formula, dense, in float64 and float32."""
    start = process_time()
    every = ((case.shape.N, 1.0), (9, 1.0), (case.shape.N, 3.0), (case.shape.N, 8.0))
    for length, scale in every[:1] if case.length > SHAPE.N else every:  # a formula's exponentials may overflow there
        shape = replace(case.shape, seq_len=length)
        module, inputs = case.module(shape), case.draw(shape, seed=length)
        inputs = case.times(inputs, scale)
        oracle = case.oracle(module)
        if oracle is None:
            return
        out, expected = module(*inputs), oracle(*inputs)
        far = gap(out, expected)
        place = worst_place(out, expected)
        where = f"output {place[-2]}" + (f" of head {place[1]}" if case.operator else "")
        yield Measured(far, case.close, f"{where} of {length} differs from the formula by {far:.2g}")
    both = {"float32", "float64"} <= set(case.traits.dtypes)
    if case.length > SHAPE.N and both and process_time() - start < _QUICK:
        yield _in_float32(case)


_QUICK = 0.5
"""Seconds of processor time of a formula that is computed once more."""
_FLOAT32 = 5e-5
"""Largest error of a row in float32. The formulas here are within 4e-6; bfloat16 is off by 2e-3, TF32 by 2e-4."""


def _in_float32(case: Case) -> Measured:
    """The median error of a row in float32, where products are large enough for any library that a run may choose.

    oneDNN gets those of over 4,096 multiplications from torch, and of over two million from
    :mod:`attnbench.catalogue.engines.products`. Where float32 chooses other keys, few rows are another's.
    """
    shape = replace(case.shape, batch=1, head_dim=64)
    inputs = case.draw(shape, dtype=torch.float32)
    oracle = case.oracle(case.module(shape, dtype=torch.float64))
    assert oracle is not None  # it has one in its own dtype
    with torch.no_grad():
        out = case.module(shape, dtype=torch.float32)(*inputs).double()
        expected = oracle(*(x.double() for x in inputs))
    far = float(((out - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).median())
    return Measured(far, _FLOAT32, f"in float32 a row differs from the formula by {far:.2g}: products lose precision")


@law("implied matrix", few_shapes=True, applies=lambda case: case.operator)
def implied_matrix(case: Case) -> Iterator[Measured]:
    """V = I gives the matrix of the formula, weight by weight."""
    n = 11
    shape = replace(case.shape, batch=1, seq_len=n, head_dim=n)
    module, (q, k, _, *gates) = case.module(shape), case.draw(shape)
    oracle = case.oracle(module)
    if oracle is None:
        return
    v = torch.eye(n, dtype=case.dtype).expand(1, shape.H, n, n)
    weights, expected = (function(q, k, v, *gates).detach() for function in (module, oracle))
    _, head, i, j = worst_place(weights, expected)
    got, wanted = float(weights[0, head, i, j]), float(expected[0, head, i, j])
    yield Measured(
        gap(weights, expected), case.close, f"query {i} gives key {j} the weight {got:.3g}, the formula {wanted:.3g}"
    )


@law("average", few_shapes=True, claim="rows_sum_to_one", applies=lambda case: case.operator)
def average(case: Case) -> Iterator[Measured]:
    """The weights of a row sum to one: V = 1 gives 1."""
    q, k, v, *gates = case.draw()
    out = case.module()(q, k, torch.ones_like(v), *gates).detach()
    _, _, i, _ = worst_place(out, torch.ones_like(out))
    yield Measured(
        gap(out, torch.ones_like(out)), case.close, f"the weights of query {i} sum to {float(out[0, 0, i, 0]):.4g}"
    )


@law("exact", few_shapes=True, applies=lambda case: case.traits.exact)
def exact(case: Case) -> Iterator[Measured]:
    """It equals softmax attention."""
    module, inputs = case.module(), case.draw()
    some = torch.rand(2, case.shape.N, generator=torch.Generator().manual_seed(2)) < 0.6
    for key_mask in (None, some) if case.traits.key_padding else (None,):
        expected = exact_attention(*inputs, causal=case.causal, key_mask=key_mask)
        out = module(*inputs, key_mask=key_mask)
        yield apart(out, expected, case.rounding, "it differs from softmax attention")


@law("bias", claim="bias")
def bias(case: Case) -> Iterator[Measured]:
    """A bias of each pair of positions is added to the logits."""
    for kind in ("alibi", "relative"):
        shape = replace(case.shape, bias=kind)
        module, inputs = case.module(shape), case.draw(shape)
        expected = case.expected(module, inputs, shape)
        if expected is None:
            return
        yield apart(module(*inputs), expected, case.close, f"with {kind} it differs from the formula")
        moved = gap(module(*inputs), case.module()(*inputs))
        yield Measured(-moved, -1e-4, f"{kind} changes nothing")


MASKS = ("prefix:9", "document:4+9", "sliding:6")


@law("masks", few_shapes=True, claim="mask")
def masks(case: Case) -> Iterator[Measured]:
    """With pairs hidden by a mask, output and gradients are those of attention to the others."""
    for text in MASKS[2:] if case.traits.compiled else MASKS:
        shape = replace(case.shape, mask=text)
        if shape.causal == case.causal:
            yield from _hidden(case, shape, f"with mask {text}")


@law("later queries", few_shapes=True, claim="q_start", applies=lambda case: case.operator and case.causal)
def later_queries(case: Case) -> Iterator[Measured]:
    """The last queries alone, against all keys, get the same outputs as in the whole sequence."""
    shape = replace(case.shape, seq_len=7, q_start=16)
    q, k, v = case.draw()
    alone, whole = case.module(shape)(q[:, :, 16:], k, v), case.module()(q, k, v)
    yield apart(alone, whole[:, :, 16:], case.close, "the last 7 queries alone differ")
    for mask in ("none", "document:10", "sliding:5")[: 1 if case.traits.compiled else 3]:
        yield from _hidden(case, replace(shape, mask=mask), f"with the last 7 queries alone and mask {mask}")


def _hidden(case: Case, shape: Shape, what: str) -> Iterator[Measured]:
    module, inputs = case.module(shape), case.draw(shape, grad=case.dtype == torch.float64)
    own = [x for name, x in module.named_parameters() if name.endswith("sink.logit")]
    for key_mask in case.key_masks()[: 1 if shape.q_start else 2]:
        expected, padded = case.expected(module, inputs, shape, key_mask), ", padded" * (key_mask is not None)
        if expected is None:
            return
        out = module(*inputs, key_mask=key_mask)
        if own and key_mask is not None:  # the output of a padded token may be anything
            out, expected = out * case.real(key_mask), expected * case.real(key_mask)
        yield apart(out, expected, case.close, f"{what}{padded} it differs from the formula")
        if inputs[0].requires_grad:
            named = case.named(inputs) | dict(zip(["the sink"], own, strict=False))
            yield from gradients_apart(named, out, expected, 10 * case.close, f"{what}{padded}")
    if not shape.q_start and not case.traits.compiled:
        yield from _decoded_too(case, inputs, shape)


@law("sink", claim="sink")
def sink(case: Case) -> Iterator[Measured]:
    """A sink takes its part of the weight of the keys that a query meets, and learns."""
    for more in ("none", "document:4+9", "sliding:6") if case.traits.mask else ("none",):
        shape = replace(case.shape, sink="learned", mask=more)
        yield from _hidden(case, shape, f"with a sink and mask {more}")
        inputs = case.draw(shape)
        moved = gap(case.module(shape)(*inputs), case.module(replace(shape, sink="none"))(*inputs))
        yield Measured(-moved, -1e-4, f"with mask {more} a sink changes nothing")


@law(
    "shared heads",
    applies=lambda case: (
        case.operator and (case.traits.shares == "by itself" or (bool(case.traits.shares) and case.traits.heads_apart))
    ),
)
def shared_heads(case: Case) -> Iterator[Measured]:
    """Heads that share keys and values get what each gets alone, or choose as the formula does."""
    shape = replace(case.shape, heads=2 * case.shape.H, kv_heads=case.shape.H)
    if not case.traits.heads_apart:
        module, inputs = case.module(shape), case.draw(shape)
        oracle = case.oracle(module)
        if oracle is not None:
            what = f"with {shape.K} heads of keys for {shape.H} of queries it differs from its formula"
            yield apart(module(*inputs), oracle(*inputs), case.close, what)
        return
    together, each = case.module(shape), _repeated if _fixed(case) else _in_turn
    alone = case.module(replace(shape, kv_heads=None) if _fixed(case) else None)
    inputs = case.draw(shape, grad=True)
    out, expected = together(*inputs), each(alone, *inputs)
    _, head, *_ = worst_place(out, expected)
    far = gap(out, expected)
    what = f"with {shape.K} heads of keys for {shape.H} of queries, head {head} differs by {far:.2g} from itself alone"
    yield Measured(far, case.close, what)
    yield from gradients_apart(case.named(inputs), out, expected, case.close, "summed over the heads that share it,")
    for mask in filter(torch.is_tensor, case.key_masks(5)):
        out, expected = together(*inputs, key_mask=mask), each(alone, *inputs, key_mask=mask)
        yield apart(out * case.real(mask), expected * case.real(mask), case.close, "padded, it differs from its heads")
    yield from _decoded_too(case, inputs, shape)


def _fixed(case: Case) -> bool:
    """True if nothing in it is drawn or learns: a module for more heads then has the same numbers in each."""
    return not case.traits.stochastic and not any(True for _ in case.module().parameters())


def _repeated(whole: nn.Module, q: Tensor, *others: Tensor, key_mask: Tensor | None = None) -> Tensor:
    out: Tensor = whole(q, *(of_query_heads(x, q.shape[1]) for x in others), key_mask=key_mask)
    return out


def _in_turn(alone: nn.Module, q: Tensor, *others: Tensor, key_mask: Tensor | None = None) -> Tensor:
    of_group = torch.unflatten(q, 1, (others[0].shape[1], -1)).unbind(2)
    return torch.stack([alone(one, *others, key_mask=key_mask) for one in of_group], 2).flatten(1, 2)


def _decoded_too(case: Case, inputs: list[Tensor], shape: Shape) -> Iterator[Measured]:
    if case.causal and case.traits.decode:
        yield _decoded(case, [x.detach() for x in inputs], 9, case.close, shape)


@law("value width", applies=lambda case: case.operator and bool(case.traits.v_dim))
def value_width(case: Case) -> Iterator[Measured]:
    """Each column of the values is averaged alone, however many there are."""
    D, more = case.shape.D, 3
    shape = replace(case.shape, v_dim=D + more)
    inputs = case.draw(shape, grad=True)
    q, k, v, *gates = inputs
    own = [[x[..., some] if x.shape[-1] == D + more else x for x in gates] for some in (slice(D), slice(-D, None))]
    alone, wide = case.module(), case.module(shape)
    expected = torch.cat([alone(q, k, v[..., :D], *own[0]), alone(q, k, v[..., -D:], *own[1])[..., -more:]], -1)
    out = wide(*inputs)
    what = f"with values {D + more} wide"
    yield apart(out, expected, case.close, f"{what} the output differs")
    yield from gradients_apart(case.named(inputs), out, expected, case.close, what)
    few = [x[..., :1] if x.shape[-1] == D + more else x for x in gates]
    narrow = case.module(replace(case.shape, v_dim=1))(q, k, v[..., :1], *few)
    yield apart(narrow, expected[..., :1], case.close, "with values 1 wide the output differs")
    for mask in filter(torch.is_tensor, case.key_masks(5)):
        out, expected = wide(*inputs, key_mask=mask)[..., :D], alone(q, k, v[..., :D], *own[0], key_mask=mask)
        real = case.real(mask)
        yield apart(out * real, expected * real, case.close, f"{what} and padding the output differs")
    yield from _decoded_too(case, inputs, shape)


@law("limit to exact", claim="exact_with", applies=lambda case: case.first)
def limit_to_exact(case: Case) -> Iterator[Measured]:
    """Options that leave nothing out give softmax attention."""
    for template in case.traits.exact_with:
        for n in (7, 16, 23):
            text = template.format(n=n)
            limit = replace(case, spec=parse_spec(f"{case.variant.name}:{text}"))
            shape = replace(case.shape, seq_len=n)
            inputs = case.draw(shape)
            expected = exact_attention(*inputs, causal=case.causal)
            what = f"with {text} at n = {n} it differs from softmax attention"
            yield apart(limit.module(shape)(*inputs), expected, case.close, what)


@law("large inputs", few_shapes=True)
def large_inputs(case: Case) -> Iterator[Measured]:
    """Finite in float32 at logits of standard deviation 64, and at keys or queries far below 0."""
    if "float32" not in case.traits.dtypes:
        return
    module, inputs = case.module(dtype=torch.float32), case.draw(dtype=torch.float32)
    large = [8 * x for x in inputs[:2]] + inputs[2:] if case.operator else [64 * x for x in inputs]
    low = [x - 200 for x in large[:2]] + large[2:] if case.operator else [x - 200 for x in inputs]
    for given, what in ((large, "large inputs"), (low, "inputs around -200")):
        wrong = int((~module(*given).isfinite()).sum())
        yield Measured(wrong, 0, f"{what} give {wrong} outputs that are NaN or infinite")


@law("decoding", few_shapes=True, claim="decode", applies=lambda case: case.causal)
def decoding(case: Case) -> Iterator[Measured]:
    """Token by token it gives the output of the whole sequence."""
    for prompt in (0, 9, case.shape.N - 1):
        yield _decoded(case, case.draw(), prompt, case.close)
    if not case.traits.compiled:  # for each length
        yield _handed_over(case)
    if isinstance(case.module(), Prompted):
        yield _answered(case)
    if "float32" in case.traits.dtypes:
        # Logits of a standard deviation of 64; decays that leave nothing, also of some tokens that are louder still.
        louder = torch.where(torch.arange(case.shape.N) % 5 == 0, 1000.0, 1.0)[:, None]
        for factor in (8.0,) if case.operator else (64.0, 64.0 * louder):
            inputs = case.times(case.draw(dtype=torch.float32), factor)
            # Logits made of x alone grow with its square, and float32 holds no more than seven digits of them.
            bound = LOUD if case.operator else max(LOUD, 4 * _rounding(case, inputs))
            yield _decoded(case, inputs, 0, bound)


@law("several tokens", few_shapes=True, claim="decode", applies=lambda case: case.causal and not case.traits.compiled)
def several_tokens(case: Case) -> Iterator[Measured]:
    """Several tokens in a step give what single steps give; rejected ones leave no trace."""
    for prompt, several, accepted in ((0, 3, 1), (9, 5, 5), (5, case.shape.N - 6, 4)):
        yield _verified(case, prompt, several, accepted)
    for rest in (1, 8):
        yield _shared(case, 9, rest)


@torch.no_grad()
def _verified(case: Case, prompt: int, several: int, accepted: int) -> Measured:
    module, inputs = case.module(), case.draw()
    stop = prompt + accepted
    right = [x[..., prompt:stop, :] for x in inputs]
    wrong = [x.flip(-2)[..., stop : prompt + several, :] for x in inputs]
    before = cast(Decoding, module).begin(*(x[..., :prompt, :] for x in inputs))
    out, after = taken(module, before, *(torch.cat(both, -2) for both in zip(right, wrong, strict=True)))
    state = after if accepted == several else rolled_back(module, before, after, *right, of=several)
    found = [out[..., :accepted, :], *steps(module, state, inputs, stop)]
    far, at = _worst_token(torch.cat(found, -2), module(*inputs)[..., prompt:, :])
    where = f"of {several} in one step" if at < accepted else f"after a rollback of {several - accepted}"
    return Measured(far, case.close, f"behind a prompt of {prompt}, a token {where} differs by {far:.2g}")


@law("unequal lengths", applies=lambda case: case.causal and bool(case.traits.decode) and not case.traits.compiled)
def unequal_lengths(case: Case) -> Iterator[Measured]:
    """Sequences of unequal lengths in one step get what each gets alone."""
    for several in (1, 3):
        yield _side_by_side(case, several)


@torch.no_grad()
def _side_by_side(case: Case, several: int) -> Measured:
    module, inputs, worst = case.module(), case.draw(), -1.0
    decoding, ends = cast(Decoding, module), (4, case.shape.N - 2 * several)
    alone = [[x[row : row + 1] for x in inputs] for row in range(2)]
    states = [decoding.begin(*(x[..., :end, :] for x in one)) for one, end in zip(alone, ends, strict=True)]
    try:
        state = joined(module, states)
    except Unsupported as reason:  # a row with padding says the same
        raise NothingClaimed(str(reason)) from None
    for first in (0, several):
        tokens = [
            [x[..., end + first : end + first + several, :] for x in one] for one, end in zip(alone, ends, strict=True)
        ]
        together = [torch.cat(both) for both in zip(*tokens, strict=True)]
        case.works(taken, module, state, *together)  # the next line must not see that this happened
        out, state = taken(module, state, *together)
        each = [taken(module, before, *token) for before, token in zip(states, tokens, strict=True)]
        states = [after for _, after in each]
        far = gap(out, torch.cat([expected for expected, _ in each]))
        worst = far if not far <= worst else worst
    what = f"{quantity(several, 'token')} behind {ends[0]} and {ends[1]} others"
    return Measured(worst, case.rounding, f"{what} differ by {worst:.2g} from the same alone")


@torch.no_grad()
def _shared(case: Case, prefix: int, rest: int) -> Measured:
    """A second request behind a prefix: the rest of its prompt in one step, then single steps."""
    module, inputs = case.module(), case.draw()
    known = cast(Decoding, module).begin(*(x[..., :prefix, :] for x in inputs))
    for request in ([x.flip(-2) for x in inputs], inputs):
        out, state = behind(module, known, *(x[..., prefix : prefix + rest, :] for x in request))
        found = [out, *steps(module, state, request, prefix + rest)]
    far, _ = _worst_token(torch.cat(found, -2), module(*inputs)[..., prefix:, :])
    return Measured(far, case.close, f"behind a prefix of {prefix}, the second request differs by {far:.2g}")


@torch.no_grad()
def _answered(case: Case) -> Measured:
    module, inputs, worst = case.module(), case.draw(), (-1.0, 0)
    expected = module(*inputs)
    for prompt in (1, 9, case.shape.N - 1):
        out, state = cast(Prompted, module).prompted(*(x[..., :prompt, :] for x in inputs))
        after, _ = cast(Decoding, module).step(state, *(x[..., prompt : prompt + 1, :] for x in inputs))
        found = torch.cat((out[..., -1:, :], after), -2)
        here = gap(found, expected[..., prompt - 1 : prompt + 1, :])
        if not here <= worst[0]:
            worst = here, prompt
    return Measured(
        worst[0], case.close, f"a prompt of {worst[1]} in one go, or what follows it, differs by {worst[0]:.2g}"
    )


@torch.no_grad()
def _handed_over(case: Case) -> Measured:
    module, inputs = case.module(), case.draw()
    decoding, found = cast(Decoding, module), []
    for t in range(case.shape.N):
        state = decoding.begin(*(x[..., :t, :] for x in inputs))
        out, _ = decoding.step(state, *(x[..., t : t + 1, :] for x in inputs))
        found.append(out)
    far, at = _worst_token(torch.cat(found, -2), module(*inputs))
    return Measured(far, case.close, f"right after a prompt of {at}, the next token differs by {far:.2g}")


LOUD = 1e-4
"""Largest gap of two ways to the same numbers in float32 for large inputs."""


@torch.no_grad()
def _rounding(case: Case, inputs: list[Tensor]) -> float:
    """The gap of the worst token in float32 to the same in float64; 0 if that is not taken."""
    if case.dtype != torch.float64:
        return 0.0
    rounded, exact = case.module(dtype=torch.float32)(*inputs), case.module()(*(x.double() for x in inputs))
    return _worst_token(rounded, exact)[0]


@torch.no_grad()
def _decoded(case: Case, inputs: list[Tensor], prompt: int, bound: float, shape: Shape | None = None) -> Measured:
    module = case.module(shape, dtype=inputs[0].dtype)
    decoding = cast(Decoding, module)
    state = decoding.begin(*(x[..., :prompt, :] for x in inputs))
    found = list(steps(module, state, inputs, prompt, before=decoding.step))  # no step must see that this one happened
    far, at = _worst_token(torch.cat(found, -2), module(*inputs)[..., prompt:, :])
    return Measured(far, bound, f"after a prompt of {prompt}, token {prompt + at} differs by {far:.2g}")


def _worst_token(found: Tensor, expected: Tensor) -> tuple[float, int]:
    if found.shape != expected.shape:
        raise DoesNotWork(f"shapes {tuple(found.shape)} and {tuple(expected.shape)} differ")
    numbers = [axis for axis in range(found.ndim) if axis != found.ndim - 2]
    far = (found.double() - expected.double()).abs().amax(numbers)
    far = far / expected.double().abs().amax(numbers).clamp(min=1.0)
    at = int(far.argmax())
    return float(far[at]), at


def _chooses(case: Case) -> bool:
    return issubclass(case.variant.make, Selecting) if isinstance(case.variant.make, type) else False


@law("choice", applies=lambda case: case.operator and _chooses(case))
def choice(case: Case) -> Iterator[Measured]:
    """It attends to its chosen keys, its error is the mass left out, and ties take no more keys."""
    shape = case.shape
    module, (q, k, v) = case.module(), case.draw()
    choosing = chooser(module)
    if choosing is None:
        return  # with these options it does not
    selection = choosing.select(q, k)
    chosen = selection.pairs(slice(0, shape.N))
    visible = Visible.of(shape).pairs(slice(0, shape.N), slice(0, shape.M), shape.M, q.device)
    hidden = int((chosen & ~visible).sum())
    yield Measured(hidden, 0, f"it chooses {hidden} pairs that are hidden")
    out = module(q, k, v)
    # Ties may fall either way, so that only the choice that was used can be held against the output.
    own, values = of_query_heads(k, shape.H), of_query_heads(v, shape.H)
    far = gap(out, masked_attention(q, own, values, chosen))
    yield Measured(far, case.close, f"its output is {far:.2g} off that of the pairs that it says it chose")
    # o - ô = (1 - m)(ō - ô): the mass m of the kept keys, ô their average, ō the average of the rest.
    weights = (q @ own.mT * shape.D**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    mass = (weights * chosen).sum(-1, keepdim=True)
    rest = (weights * ~chosen) @ values  # (1 - m)·ō
    far = gap((weights @ values) - out, rest - (1 - mass) * out)
    yield Measured(far, case.close, f"its error is {far:.2g} off that of the mass that its choice leaves out")
    yield from _attention_to_a_choice(case, module, choosing)
    oracle = case.oracle(module)
    if oracle is not None and case.traits.shares == "by itself":
        equal, every = k[:, :, :1].expand_as(k), torch.eye(shape.M, dtype=v.dtype).expand(*v.shape[:2], -1, -1)
        taken = int(choosing.select(q, equal).pairs(slice(0, shape.N)).sum(-1).max())
        most = int((oracle(q, equal, every) > 0).sum(-1).max())
        yield Measured(max(0, taken - most), 0, f"of keys that are all equal it takes {taken}; its formula {most}")
    if case.causal and not case.traits.reads_ahead:
        for t, factor in ((3, 3), (11, 3), (11, -30), (16, -30)):
            others = [torch.where(torch.arange(shape.M)[:, None] > t, factor * x, x) for x in (q, k)]
            moved = int((choosing.select(*others).pairs(slice(0, t + 1)) ^ chosen[:, :, : t + 1]).sum())
            what = f"tokens after {t} times {factor} change {moved} of the pairs chosen for queries up to {t}"
            yield Measured(moved, 0, what)


def _attention_to_a_choice(case: Case, module: nn.Module, choosing: Selecting) -> Iterator[Measured]:
    q, k, v = case.draw()
    far = gap(choosing.attend(q, k, v, choosing.select(q, k)), module(q, k, v))
    yield Measured(far, case.close, f"attention to what it chose before is {far:.2g} off its output")
    if not case.traits.key_padding:
        return
    real = torch.ones(2, case.shape.N, dtype=torch.bool)
    real[0, :2] = real[0, -3:] = False  # the first as well: where nothing was chosen, an engine may read those
    q, k, v = (x.masked_fill(~real[:, None, :, None], math.nan) for x in (q, k, v))
    found = choosing.attend(q, k, v, choosing.select(q, k, key_mask=real)), module(q, k, v, key_mask=real)
    far = gap(*(x.transpose(1, 2)[real] for x in found))
    yield Measured(far, case.close, f"with NaN at padded tokens, attention to what it chose is {far:.2g} off the whole")
