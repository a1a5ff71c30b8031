"""The findings about a module in words, and the claims that it breaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.laws.modules.questions import CostGrowth, ModuleAnswers

_COMMON = {"identity", "dense", "noise", "local", "graph", "kernel", "pooling", "location", "lstm", "gru", "conv"}
"""Names of variants that are parts of other things' names as well."""
_SHOWN = 4
"""Most names of parameters in a line."""
_LARGE_SHARE = 0.1
"""Share of the square part from which all pairs, or a part of them that grows as n², are in the products."""
_CLOSE = 1e-4
"""Largest gap of a gradient to differences."""
_COSTS = {
    "products": ("FLOPs", "products"),
    "numbers": ("numbers", "numbers that are written"),
    "memory": ("bytes", "memory"),
    "trained_products": ("FLOPs", "products of the backward pass"),
    "trained_memory": ("bytes", "memory of training"),
}
"""Growth of :class:`~attnbench.laws.modules.questions.ModuleAnswers` -> its unit, and its name in a sentence."""


class AnswerLine(NamedTuple):
    """An answer to one question."""

    question: str
    answer: str


def lines(found: ModuleAnswers) -> list[AnswerLine]:
    """The answers in the order for a reader; a question that could not be asked states the reason."""
    drawn = "no: two calls on the same input differ, in eval mode; " + (
        "a call changes what the next one gives, so each question has a new module"
        if found.stateful
        else "it draws random numbers, or drops some"
    )

    def unless(asked: str, answer: str) -> str:
        why = found.unasked.get(asked)
        return answer if why is None else f"could not be asked: {why}"

    forward, backward = "what it costs", "what its backward pass costs"
    return [
        AnswerLine("attention", unless("what it computes", _attention(found))),
        *([] if found.repeats else [AnswerLine("repeats", drawn)]),
        *([] if found.apart else [AnswerLine("examples", "an example of a batch changes another")]),
        *([AnswerLine("zeros", f"small noise in place of {_shown(found.noisy)}")] if found.noisy else []),
        AnswerLine("reads", unless("who reads whom", _reads(found))),
        AnswerLine("future", unless("who reads whom", _future(found))),
        AnswerLine("between tokens", unless("how much passes between tokens", _between(found))),
        AnswerLine("products", unless(forward, _growth(found, "products") or "none that can be counted")),
        AnswerLine("numbers", unless(forward, _growth(found, "numbers") or "not known")),
        AnswerLine("memory", unless(forward, _growth(found, "memory") or "not known")),
        AnswerLine("training", unless(backward, _training(found))),
        AnswerLine("gradient", unless("whether its gradient is that of its output", _gradient(found))),
        AnswerLine("idle parameters", unless("what does nothing", _idle(found))),
    ]


def conclusion(found: ModuleAnswers) -> str:
    """The conclusion of all the costs."""
    if found.squares:
        most = _power(max(getattr(found, name).power for name in found.squares))
        return f"its cost grows as {most}: {', '.join(_COSTS[name][1] for name in found.squares)}"
    unknown = [one for one in ("what it costs", "what its backward pass costs") if one in found.unasked]
    if found.formed:
        return "its cost grows as n²: all n × n pairs are formed"
    costs = {name: growth for name in _COSTS if (growth := getattr(found, name)) is not None}
    reasons = [found.unasked[one] for one in unknown]
    reasons += [f"{_COSTS[name][1]}: {_growth(found, name)}" for name, one in costs.items() if one.power is None]
    if reasons:
        return f"how its cost grows is not fully known: {'; '.join(dict.fromkeys(reasons))}"
    powers = [growth.power for growth in costs.values() if growth.power is not None]
    return f"its cost grows as {_power(max(powers))}" if powers else "how its cost grows is not known"


def _attention(found: ModuleAnswers) -> str:
    pairs, reads = found.pairs, found.reads
    if pairs is None:
        return ""
    if not found.mixes:
        return "none: no token reads another"
    hidden = "; a mask then hides what is not read" if reads and reads.reach else ""
    if pairs.fused or pairs.softmax:
        calls = pairs.fused + pairs.softmax
        how = "a fused kernel" if pairs.fused else "a softmax"
        return f"plain softmax attention: {how} weighs all n tokens for each token, {_times(calls)} in a call{hidden}"
    if pairs.products:
        times = _times(pairs.products)
        return f"all n × n pairs are formed, without torch's softmax over them: {times} in a call{hidden}"
    large = [
        name
        for name in ("products", "numbers")
        if (one := getattr(found, name)) is not None and one.square_share > _LARGE_SHARE and one.power == 2
    ]
    if pairs.fixed and "products" not in large:
        rows = ", ".join(map(str, pairs.fixed))
        what = "summaries of the whole sequence" if pairs.pooled else "keys or summaries"
        return f"each token attends to a fixed number of {what}: {rows}"
    if reads and reads.reach and not any(one.faint for one in reads.local):
        return "a window: no pairs are formed, and no token reads far"
    if found.state is not None:
        end = f", beside {_rows(pairs.pooled)} that weigh all tokens" if pairs.pooled else ""
        return f"none: a recurrence or an average{end}"
    if large:
        ways = {"products": "tiles, long windows or buckets", "numbers": "row by row, or a mask, say"}
        grow = f"{_COSTS[large[0]][1]} grow as n²: {ways[large[0]]}"
        return f"no operation forms n × n pairs at once, and {'the ' * (large[0] == 'numbers')}{grow}"
    if pairs.pooled:
        if found.per_token:
            return f"summaries: {_rows(pairs.pooled)} over all n tokens, which tokens read"
        return "pooling: the tokens are weighed once for the whole sequence"
    end = "no end of what passes between tokens was seen"
    return f"no pairs are formed, and {end}: linear, FFT, hashing or a large state, say"


def _rows(count: int) -> str:
    return "one row of weights" if count == 1 else f"{count} rows of weights"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _reads(found: ModuleAnswers) -> str:
    reads = found.reads
    if reads is None:
        return ""
    n, exchanged = reads.n, reads.exchanged
    seen = f" ({len(exchanged)} of {n:,} tokens were exchanged)"
    if not found.per_token:
        unread = [one.token for one in exchanged if not one.own]
        which = f"the output does not depend on token {_several(unread)}" if unread else "the output depends on each"
        return which + seen
    if n < 2:
        return "no question: it takes one token"
    if not found.mixes:
        return f"each output depends only on its own token{seen}"
    if reads.everything and reads.future is None:
        return f"each output depends on its token and all earlier ones{seen}"
    if reads.future is None and all(one.own and (one.faint or one.after == n - 1 - one.token) for one in exchanged):
        return f"each output depends on its token and all earlier ones, more and more faintly{seen}"
    if all(one.own and one.before + one.after == n - 1 for one in exchanged):
        return f"each output depends on every token{seen}"
    if reads.reach:
        back, ahead = reads.reach
        sides = [f"{count} {side}" for count, side in ((back, "before it"), (ahead, "after it")) if count]
        faint = ", more and more faintly" if any(one.faint for one in reads.local) else ""
        whole = [one.token for one in exchanged if one not in reads.local]
        rest = f"; token {_several(whole)} changes nearly all" if whole else ""
        return f"each output depends on its token and at most {' and '.join(sides)}{faint}{rest}{seen}"
    one = min(exchanged, key=lambda one: abs(one.token - n // 2))
    count = one.before + one.after + one.own
    return f"some: token {one.token} changes {count} of {n:,} outputs, from {one.first} to {one.last}{seen}"


def _several(numbers: list[int]) -> str:
    ends = f"{numbers[0]} to {numbers[-1]}"
    run = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
    return ends if run else ", ".join(map(str, numbers))


def _future(found: ModuleAnswers) -> str:
    if not found.per_token:
        return "no question: there is one output for the whole sequence"
    seen = found.reads and (found.reads.future or found.reads.in_training)
    if not found.reads or not seen:
        return "not seen"
    where = "" if found.reads.future else "in training mode "
    return f"seen: {where}token {seen.token} changes output {seen.first}"


def _between(found: ModuleAnswers) -> str:
    if not found.per_token:
        return "no question: there is one output for the whole sequence"
    if not found.crossing:
        taken = f"{found.reads.n} tokens at most" if found.reads else "too few tokens"
        return f"could not be asked: it takes {taken}"
    if not any(rank for _, rank, _ in found.crossing):
        return "nothing passes from earlier tokens to later ones"
    told = ", ".join(str(rank) for _, rank, _ in found.crossing)
    tokens = ", ".join(str(half) for half, _, _ in found.crossing)
    if found.state is not None:
        return f"about {found.state} numbers, however many tokens went before ({told} after {tokens})"
    most = max(rank for _, rank, _ in found.crossing)
    return f"more numbers, the more tokens went before ({told} after {tokens}); no end was seen up to {most:,}"


def _power(power: float) -> str:
    whole = {1.0: "n", 2.0: "n²", 3.0: "n³"}.get(round(power, 1))
    return whole or f"about n^{power:.2f}"


def _growth(found: ModuleAnswers, name: str) -> str:
    growth: CostGrowth | None = getattr(found, name)
    if growth is None:
        return ""
    what, last = _COSTS[name][0], f"{growth.values[-1]:,}"
    span = f"n = {growth.lengths[-1]:,}, seen from {growth.lengths[0]:,} on"
    if growth.power is None:
        return f"faster from one length to the next, and not yet as one power ({last} {what} at {span})"
    if growth.power < 2:
        return f"as {_power(growth.power)} ({last} {what} at {span})"
    share = f"{100 * growth.square_share:.{0 if growth.square_share > 0.01 else 1}f} %"
    return f"as {_power(growth.power)} ({share} of {last} {what} at {span})"


def _training(found: ModuleAnswers) -> str:
    parts = [("products of the backward pass", "trained_products"), ("memory", "trained_memory")]
    told = [f"{what} {grows}" for what, name in parts if (grows := _growth(found, name))]
    return "; ".join(told) or "not known"


def _gradient(found: ModuleAnswers) -> str:
    if found.gradient is None:
        return ""
    if found.gradient <= _CLOSE:
        return "that of the output"
    return f"not that of the output: {found.gradient:.2g} of the change along a direction is missing or too much"


def _idle(found: ModuleAnswers) -> str:
    if not found.idle:
        return f"none of {found.parameters}"
    numbers = sum(count for _, count in found.idle)
    names = _shown([name for name, _ in found.idle])
    return f"{len(found.idle)} of {found.parameters}, {numbers:,} numbers: {names}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def named_after(name: str) -> Variant | None:
    """The variant with its name inside a class's name, which claims nothing; the longest of several."""
    plain = name.lower().replace("_", "")
    names = {one.replace("-", ""): one for one in VARIANTS.names() if one not in _COMMON}
    found = [part for part in names if part in plain]
    return VARIANTS.get(names[max(found, key=len)]) if found else None


def contradictions(found: ModuleAnswers, label: str | None = None) -> list[str]:
    """Claims that are not kept: of ``causal=true`` in the options, and of the variant named ``label``.

    A class's name claims nothing. Raises UsageError if ``label`` is no variant.
    """
    said = []
    if found.claims_past and found.sees_future:
        said.append(f"its options say causal; {_future(found).removeprefix('seen: ')}")
    if label is None:
        return said
    variant = VARIANTS.get(parse_spec(label).name)
    called = f"it is said to be {label}"
    costs = f"{called}, which costs {variant.cost}; "
    if (variant.time_exponent or 2) < 2:
        if found.formed:
            said.append(f"{costs}it forms all n × n pairs")
        elif square := [name for name in found.squares if "memory" not in name or (variant.memory_exponent or 2) < 2]:
            said.append(
                f"{costs}its {_COSTS[square[0]][1]} grow{'s' * ('memory' in square[0])} {_growth(found, square[0])}"
            )
    known = None not in (found.pairs, found.products, found.numbers)
    if variant.family == "exact" and found.mixes and known and not found.formed and not found.squares:
        said.append(f"{costs}nothing in it grows as n²")
    if found.reads is not None and not found.mixes:
        said.append(f"{called}; no token reads another")
    elif variant.traits.exact and found.per_token and found.reads and (one := found.reads.unread):
        changed = one.own + one.before + one.after
        said.append(f"{called}; token {one.token} changes {changed:,} of {found.reads.n:,} outputs")
    recurs = found.state is not None and found.pairs and not (found.formed or found.pairs.fixed)
    if found.mixes and recurs and variant.family not in ("recurrence", "kernel", "pairwise", "mixing", "fixed pattern"):
        said.append(f"{called}; between tokens a recurrence of {found.state} numbers passes")
    if (
        found.pairs is not None
        and not found.per_token
        and not (found.formed or found.pairs.pooled or found.pairs.fixed)
    ):
        said.append(f"{called}; it weighs no tokens")
    if found.gradient is not None and found.gradient > _CLOSE:
        said.append(f"{called}; its gradient is {_gradient(found)}")
    return said
