"""Laws about what may influence what: later tokens, padding, other examples, other heads, the order of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from attnbench.contract.capabilities import chooser
from attnbench.laws.laws import Case, DoesNotWork, Measured, apart, gap, gradients_along, gradients_apart, law

SINGLE = 2e-5
"""Largest gap of two ways to the same numbers in float32."""
PADDED = "anything in padding"
PADDED_REMEDY = "; empty k and v first (attnbench.catalogue.engines.masks.emptied), or claim baseline='...' in Traits"
"""Ends the fault of what multiplies padded tokens by 0, as a call of torch's own attention does."""


def _padded(case: Case) -> bool:
    return bool(case.traits.key_padding)


@law("causality", few_shapes=True, claim="causal", applies=lambda case: case.causal, of_any=True)
def causality(case: Case) -> Iterator[Measured]:
    """Tokens after t change no output up to t."""
    before, last = case.draw(), case.shape.N - 1
    inner = case.module()
    module = _with_choice(case, inner, before)
    norms = {type(part).__name__ for part in inner.modules() if isinstance(part, _NormBase | nn.GroupNorm)}
    why = f": {', '.join(sorted(norms))} is over all tokens" * bool(norms)
    for training in (False,) if case.traits.compiled else (False, True):
        inner.train(training)
        expected = _seeded(module, before)
        if training and not torch.equal(_seeded(module, before), expected):  # it drops what others than torch draw
            break
        for t in (0, 11, last - 1):
            after = [x.clone() for x in before]
            for x, other in _changed(case, after, case.draw(seed=1)):
                x[..., t + 1 :, :] = other[..., t + 1 :, :]
            moved = gap(_seeded(module, after)[..., : t + 1, :], expected[..., : t + 1, :])
            what = "in training mode, " * training + f"other tokens after {t} moved the outputs up to {t}"
            yield Measured(moved, case.close, f"{what} by {moved:.2g}{why}")
    if _values_together(case):
        return
    for factor in (3, 30):
        yield _loud(case, case.dtype, factor, case.close)
    if "float32" in case.dtypes and not case.inside:  # 3,000 is beyond what halves can hold
        for factor in (60, 3000):
            yield _loud(case, torch.float32, factor, SINGLE)


def _seeded(module: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of dropout
        return module(*inputs)


@law("both directions", applies=lambda case: not case.causal and bool(case.traits.causal), gates=False)
def both_directions(case: Case) -> Iterator[Measured]:
    """Without causality, what reads tokens before it reads tokens after it as well."""
    before, other, module, half = case.draw(), case.draw(seed=1), case.module(), case.shape.N // 2
    expected, moved = module(*before), []
    for changed, seen in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        after = [x.clone() for x in before]
        for x, new in zip(after, other, strict=True):
            x[..., changed, :] = new[..., changed, :]
        moved.append(gap(module(*after)[..., seen, :], expected[..., seen, :]))
    earlier, later = moved
    what = f"other tokens before {half} moved the outputs behind by {earlier:.2g}, and those behind none before it"
    yield Measured(float(earlier > case.close >= later), 0, what)


def _changed(case: Case, after: list[Tensor], others: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The inputs, also with other later tokens: values alone if tokens are rounded together, and then perhaps only
    their signs."""
    if _values_together(case):
        return [(after[-1], -after[-1])]
    pairs = list(zip(after, others, strict=True))
    return pairs[-1:] if case.traits.rounds_together else pairs


def _values_together(case: Case) -> bool:
    return case.traits.rounds is not None and case.traits.rounds.values


def _with_choice(case: Case, module: nn.Module, inputs: list[Tensor]) -> Callable[..., Tensor]:
    if not case.traits.reads_ahead:
        return module
    choosing = chooser(module)
    if choosing is None:
        raise DoesNotWork("reads_ahead: it has no select and attend, so that its choice cannot be held")
    chosen = choosing.select(*inputs[:2])
    return lambda q, k, v: choosing.attend(q, k, v, chosen)


def _loud(case: Case, dtype: torch.dtype, factor: float, bound: float) -> Measured:
    before = case.draw(dtype=dtype)
    module = _with_choice(case, case.module(dtype=dtype), before)
    after = [x.clone() for x in before]
    for x, _ in _changed(case, after, before)[:3]:
        x[..., -1, :] *= factor
    moved = gap(module(*after)[..., :-1, :], module(*before)[..., :-1, :])
    return Measured(
        moved, bound, f"the last token times {factor} moved earlier outputs by {moved:.2g} in {str(dtype)[6:]}"
    )


@law("receptive field", few_shapes=True, applies=lambda case: case.first or case.operator)
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


def _reach(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[list[int]]:
    at = 2 if len(inputs) > 2 else 0
    last = inputs[at].detach().requires_grad_()
    out = function(*inputs[:at], last, *inputs[at + 1 :])
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


@law("padding", claim="key_padding")
def padding(case: Case) -> Iterator[Measured]:
    """Padded input gives the output of the shorter input."""
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
    """The content of padded keys and values changes nothing."""
    module, inputs = case.module(), case.draw()
    mask = torch.rand(2, case.shape.N, generator=torch.Generator().manual_seed(2)) < 0.6
    real = case.real(mask)
    expected = module(*inputs, key_mask=mask) * real
    others = [torch.where(real, x, 10 * y) for x, y in zip(inputs, case.draw(seed=1), strict=True)]
    moved = module(*others, key_mask=mask) * real
    yield apart(moved, expected, case.close, "other values at the padded positions moved the output")
    oracle = case.oracle(module)
    if oracle is not None:
        yield Measured(gap(expected, oracle(*inputs, key_mask=mask) * real), case.close, "not the formula with a mask")
    if case.operator and case.traits.cross and not case.causal:
        shape = replace(case.shape, kv_len=17)
        module, (q, k, v) = case.module(shape), case.draw(shape)
        mask = torch.arange(17) < torch.tensor([[11], [17]])
        short = module(q[:1], k[:1, :, :11], v[:1, :, :11])
        out = module(q, k, v, key_mask=mask)
        yield apart(out[:1], short, case.close, "padding of another sequence moves the output")


@law("anything in padding", applies=_padded)
def anything_in_padding(case: Case) -> Iterator[Measured]:
    """Padded tokens' content reaches no real one; baselines are asked about finite numbers."""
    mask = torch.ones(2, case.shape.N, dtype=torch.bool)
    mask[0, 15:] = mask[0, 3] = mask[1, 0] = mask[1, 9] = False
    inputs = case.draw()
    real = case.real(mask)
    expected = _real_parts(case, inputs, mask, real)
    # A baseline multiplies what padded tokens hold by 0, as a user's own call does; NaN times 0 is NaN.
    for value in (1e30,) if case.traits.baseline else (float("nan"), float("inf"), 1e30):
        # A padded query may spoil its own output; keys, values and the tokens of a mixer are seen by others.
        kept = inputs[:1] if case.operator else []
        found = _real_parts(case, [*kept, *(torch.where(real, x, value) for x in inputs[len(kept) :])], mask, real)
        moved = {name: gap(mine, expected[name]) for name, mine in found.items()}
        name = max(moved, key=lambda name: math.inf if math.isnan(moved[name]) else moved[name])
        remedy = "" if math.isfinite(value) else PADDED_REMEDY
        yield Measured(moved[name], case.close, f"{value} in padded tokens moves {name} by {moved[name]:.2g}{remedy}")
    if case.operator and not case.traits.baseline:
        out = case.module()(*(torch.where(real, x, float("nan")) for x in inputs), key_mask=mask)
        out = torch.where(real, out, 0.0)
        yield apart(out, expected["the output"], case.close, "NaN in padded queries moves the output")


def _real_parts(case: Case, inputs: list[Tensor], mask: Tensor, real: Tensor) -> dict[str, Tensor]:
    module = case.module()
    leaves = [x.detach().requires_grad_() for x in inputs]
    wanted = case.named(leaves) | dict(module.named_parameters())
    out = torch.where(real, module(*leaves, key_mask=mask), 0.0)
    grads = gradients_along(out, list(wanted.values()), 2 * out.detach())
    found = [torch.where(real, x, 0.0) for x in grads[: len(leaves)]] + list(grads[len(leaves) :])
    return {"the output": out.detach(), **{f"the gradient of {n}": x for n, x in zip(wanted, found, strict=True)}}


@law(
    "hidden pairs",
    few_shapes=True,
    applies=lambda case: case.operator and "float16" in case.dtypes and (case.causal or _padded(case)),
)
def hidden_pairs(case: Case) -> Iterator[Measured]:
    """In float16 too, a hidden key may have any logit: its value reaches nobody."""
    shape = replace(case.shape, batch=1, heads=1)
    module, tokens = case.module(shape, dtype=torch.float16), torch.arange(shape.N)
    # A padded key comes first, where causality does not hide it as well.
    for how, at in (("later", shape.N - 1),) * case.causal + (("padded", 0),) * _padded(case):
        q, k, v, *gates = case.draw(shape, dtype=torch.float16)
        # Logits of 30,000 where a key is hidden, of -30,000 where it is not.
        q, k = q / 8 + 120, k / 8 - 120
        k[..., at, :] = 120
        loud = v.clone()
        loud[..., at, :] = -v[..., at, :] if how == "later" and _values_together(case) else 1000
        real = tokens != at
        mask = real[None] if how == "padded" else None
        one, other = (module(q, k, x, *gates, key_mask=mask)[..., real, :] for x in (v, loud))
        # Where no output is finite in float16 there is none to be moved.
        moved = gap(torch.where(one.isfinite(), other, 0.0), torch.where(one.isfinite(), one, 0.0))
        yield Measured(moved, 0.0, f"the value of a {how} key with a large logit moves the output by {moved:.2g}")


@law(
    "hidden weights",
    few_shapes=True,
    applies=lambda case: not case.operator and "float32" in case.traits.dtypes and (case.causal or _padded(case)),
)
def hidden_weights(case: Case) -> Iterator[Measured]:
    """Parameters of positions that no visible pair uses change nothing, however large they are."""
    module, inputs = case.module(dtype=torch.float32), case.draw(dtype=torch.float32)
    mask = None
    if case.traits.key_padding:
        mask = (torch.arange(case.shape.N) < case.shape.N - 6).expand(2, -1)
    seen = slice(0, case.shape.N - 6)
    before = module(*inputs, key_mask=mask)[..., seen, :]
    wanted = [x for x in module.parameters() if x.requires_grad]
    if not wanted:
        return
    weight = torch.randn(before.shape, generator=torch.Generator().manual_seed(6))
    grads = gradients_along(before, wanted, weight)
    with torch.no_grad():
        for parameter, grad in zip(wanted, grads, strict=True):
            parameter[grad == 0] = 120.0
        after = module(*inputs, key_mask=mask)[..., seen, :]
    yield apart(after, before, SINGLE, "parameters that no visible pair uses, set to 120, move the output")


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


@law("batch", few_shapes=True, of_any=True)
def batch(case: Case) -> Iterator[Measured]:
    """An example does not depend on the others in its batch."""
    module, inputs = case.module(), case.draw()
    for x in inputs[:3]:
        x[1] *= 20
    together = module(*inputs)
    for i in range(2):
        alone = module(*(x[i : i + 1] for x in inputs))
        yield apart(together[i : i + 1], alone, case.close, "an example alone and the same in a batch differ")
    for lost in (0, 1):
        spoilt = [x.index_fill(0, torch.tensor(lost), math.nan) for x in inputs]
        expected, found = (_of_example(case, given, 1 - lost) for given in (inputs, spoilt))
        for name, one, other in zip(("the output", "the gradient of an input"), expected, found, strict=False):
            yield Measured(gap(other, one), case.close, f"NaN in example {lost} reaches {name} of the other")


def _of_example(case: Case, inputs: list[Tensor], example: int) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(not case.traits.compiled) for x in inputs]
    out = case.module()(*leaves)[example]
    if not out.requires_grad:
        return [out]
    out.square().sum().backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [out.detach(), torch.cat([x[example].flatten() for x in grads])]


@law("heads", few_shapes=True, applies=lambda case: case.operator and case.traits.heads_apart)
def heads(case: Case) -> Iterator[Measured]:
    """A head does not depend on the other heads."""
    module, inputs = case.module(), case.draw()
    expected = module(*inputs)[:, 0]
    for x, other in zip(inputs, case.times(case.draw(seed=1), 5), strict=True):
        x[:, 1] = other[:, 1]
    yield apart(module(*inputs)[:, 0], expected, case.close, "other inputs of head 1 moved head 0")


@law("documents", few_shapes=True, claim="documents", gates=False)
def documents(case: Case) -> Iterator[Measured]:
    """Documents of one sequence get what each gets alone; none reaches another, either way."""
    lengths = [5, 4, 5, case.shape.N - 14]
    for way in ("document", *["padded"] * (_padded(case) and not case.traits.compiled)):
        mask = f"{way}:{'+'.join(map(str, lengths))}"
        shape, what = replace(case.shape, mask=mask), f"with mask {mask}"
        module, inputs = case.module(shape), case.draw(shape, grad=not case.traits.compiled)
        out, places = module(*inputs), torch.split(torch.arange(case.shape.N), lengths)
        for number, one in enumerate(places):
            others = torch.cat([place for place in places if place is not one])
            after = [x.detach().clone() for x in inputs]
            for x, other in _changed(case, after, case.draw(seed=1)):
                x[..., one, :] = other[..., one, :]
            moved = gap(module(*after)[..., others, :], out[..., others, :])
            yield Measured(moved, case.close, f"{what} document {number} moves the outputs of others by {moved:.2g}")
            if not inputs[0].requires_grad or case.traits.rounds_together:
                continue
            within = torch.zeros_like(out).index_fill(-2, one, 1.0)
            for name, grad in zip(case.names, gradients_along(out, inputs, within * out.detach()), strict=True):
                leak = float(grad[..., others, :].abs().max())
                yield Measured(leak, 0.0, f"{what} the gradient of {name} leaves document {number}, by {leak:.2g}")
        if not case.traits.mask or case.traits.exact:
            yield from _alone(case, module, inputs, lengths, what)


def _alone(case: Case, module: nn.Module, inputs: list[Tensor], lengths: list[int], what: str) -> Iterator[Measured]:
    formula = case.oracle(whole := case.module()) or whole
    parts = list(zip(*(torch.split(x, lengths, -2) for x in inputs), strict=True))
    for mask in case.key_masks()[: 1 if case.traits.compiled else 2]:
        masks = [None] * len(parts) if mask is None else torch.split(mask, lengths, 1)
        expected = torch.cat([formula(*part, key_mask=own) for part, own in zip(parts, masks, strict=True)], -2)
        out = module(*inputs, key_mask=mask)
        if mask is not None:
            out, expected, what = out * case.real(mask), expected * case.real(mask), f"{what}, padded,"
        yield apart(out, expected, case.close, f"{what} it differs from its documents alone")
        if inputs[0].requires_grad:
            yield from gradients_apart(case.named(inputs), out, expected, 10 * case.close, what)


@law("permutation", applies=lambda case: not case.causal and case.traits.permutable is not None)
def permutation(case: Case) -> Iterator[Measured]:
    """Permuting the tokens permutes the output, where claimed and only there."""
    module, inputs = case.module(), case.draw()
    order = torch.randperm(case.shape.N, generator=torch.Generator().manual_seed(4))
    moved = gap(module(*(x[..., order, :] for x in inputs)), module(*inputs)[..., order, :])
    if case.traits.permutable:
        yield Measured(moved, 10 * case.close, f"permuted tokens give another output, by {moved:.2g}")
    elif case.first:
        yield Measured(
            -moved, -1e-6, "it claims to depend on positions, and a permutation of the tokens changes nothing"
        )
