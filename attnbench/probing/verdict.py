"""What was found in a module, in words, and where its name says otherwise."""

from __future__ import annotations

import re
from typing import NamedTuple

from attnbench.probing.questions import Found, Growth
from attnbench.variant import VARIANTS, Variant

_COMMON = {"identity", "dense", "noise", "local", "graph", "kernel", "pooling", "location", "lstm", "gru", "conv"}
"""Names of variants that are parts of other things' names as well."""
_ALSO = {
    "localattention": "local",
    "slidingwindow": "local",
    "lshattention": "reformer",
    "favor": "performer",
    "retention": "retnet",
}
"""Parts of the names of classes that name a variant by another word."""
_CAUSAL = re.compile("(?<!non)(?<!a)causal|autoregressive|gpt")
"""What the name of a class says of one that does not see the future."""
_SHOWN = 4
"""Most names of idle parameters in a line."""
_LARGE_SHARE = 0.1
"""Share of the square part from which all pairs, or a part of them that grows as n², are in the products."""


class Line(NamedTuple):
    """An answer to one question."""

    question: str
    answer: str


def lines(found: Found) -> list[Line]:
    """The answers in the order in which a reader wants them."""
    drawn = "no: two calls on the same input differ, in eval mode; it draws random numbers, or drops some"
    return [
        Line("attention", _attention(found)),
        *([] if found.repeats else [Line("repeats", drawn)]),
        Line("reads", _reads(found)),
        Line("future", _future(found)),
        Line("between tokens", _between(found)),
        Line("products", _growth(found.products, "grow", "multiplications") or "none that can be counted"),
        Line("memory", _growth(found.memory, "grows", "bytes") or "not known"),
        Line("idle parameters", _idle(found)),
    ]


def _attention(found: Found) -> str:
    pairs = found.pairs
    if not found.mixes:
        return "none: no token reads another"
    hidden = "; a mask then hides what is not read" if found.per_token and not found.reads_all else ""
    if pairs.fused or pairs.softmax:
        calls = pairs.fused + pairs.softmax
        how = "a fused kernel" if pairs.fused else "a softmax"
        return f"plain softmax attention: {how} weighs all n tokens for each token, {_times(calls)} in a call{hidden}"
    if pairs.products:
        return f"all n × n pairs are formed, without a softmax over them: {_times(pairs.products)} in a call{hidden}"
    if pairs.fixed:
        rows = ", ".join(map(str, pairs.fixed))
        what = "summaries of the whole sequence" if pairs.pooled else "keys"
        return f"each token attends to a fixed number of {what}: {rows}"
    if found.state is not None:
        end = ", which weighs the tokens once for the whole sequence" if pairs.pooled else ""
        return f"none: a recurrence, a window or an average{end}"
    if found.products is not None and found.products.square_share > _LARGE_SHARE:
        return "no operation forms n × n pairs at once, and products grow as n²: tiles, or windows that are long for n"
    if pairs.pooled:
        return "pooling: the tokens are weighed once for the whole sequence"
    return "no pairs are formed, but more numbers pass between tokens than a small state holds: linear, FFT or hashing"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _reads(found: Found) -> str:
    if not found.per_token:
        unread = [j for j, seen in enumerate(found.reads[0]) if not seen]
        return (
            f"the output does not depend on token {_several(unread)}" if unread else "the output depends on every token"
        )
    if not found.mixes:
        return "each output depends only on its own token"
    n = len(found.reads)
    if found.reads_all:
        return (
            "each output depends on every token"
            if found.sees_future
            else "each output depends on its token and all earlier ones"
        )
    last = [j for j, seen in enumerate(found.reads[n - 1]) if seen]
    return f"some: the last of {n} outputs depends on token {_several(last)}"


def _several(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    ends = f"{numbers[0]} to {numbers[-1]}"
    return (
        ends
        if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 2
        else ", ".join(map(str, numbers))
    )


def _future(found: Found) -> str:
    if not found.per_token:
        return "no question: there is one output for the whole sequence"
    if not found.sees_future:
        return "not seen"
    i, j = next((i, j) for i, row in enumerate(found.reads) for j, seen in enumerate(row) if seen and j > i)
    return f"seen: token {j} changes output {i}"


def _between(found: Found) -> str:
    if found.crossing is None:
        return "not measured"
    if not found.crossing or not any(rank for _, rank, _ in found.crossing):
        return "nothing passes from earlier tokens to later ones"
    told = ", ".join(str(rank) for _, rank, _ in found.crossing)
    tokens = ", ".join(str(half) for half, _, _ in found.crossing)
    if found.state is not None:
        return f"about {found.state} numbers, however many tokens went before ({told} after {tokens})"
    return f"more numbers, the more tokens went before ({told} after {tokens})"


def _growth(growth: Growth | None, verb: str, what: str) -> str:
    """Empty where nothing is known."""
    if growth is None:
        return ""
    if growth.power == 1:
        return f"{verb} as n ({growth.values[2]:,} {what} at n = {growth.lengths[2]})"
    share = f"{100 * growth.square_share:.{0 if growth.square_share > 0.01 else 1}f} %"
    return f"{verb} as n² ({share} of {growth.values[2]:,} {what} at n = {growth.lengths[2]})"


def _idle(found: Found) -> str:
    if not found.idle:
        return f"none of {found.parameters}"
    names = ", ".join(name for name, _ in found.idle[:_SHOWN])
    more = f" and {len(found.idle) - _SHOWN} more" if len(found.idle) > _SHOWN else ""
    numbers = sum(count for _, count in found.idle)
    return f"{len(found.idle)} of {found.parameters}, {numbers:,} numbers: {names}{more}"


def named_after(name: str) -> Variant | None:
    """The variant whose name is part of a class's name; the longest, where there are several."""
    plain = _plain(name)
    names = {one.replace("-", ""): one for one in VARIANTS.names() if one not in _COMMON} | _ALSO
    found = [part for part in names if part in plain]
    return VARIANTS.get(names[max(found, key=len)]) if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def contradictions(found: Found, name: str, label: str | None = None) -> list[str]:
    """Promises of the class's name, or of the variant that it is said to be, that the module does not keep.

    Raises:
        UsageError: ``label`` is no variant.
    """
    variant = VARIANTS.get(label) if label else named_after(name)
    known = label or (variant.name if variant else "attention" if "attention" in name.lower() else "transformer")
    called = f"it is said to be {known}" if label else f"its name says {known}"
    said = []
    if variant is not None and found.pairs.formed and (variant.time_exponent or 2) < 2:
        said.append(f"{called}, which costs {variant.cost}; it forms all n × n pairs")
    linear = found.mixes and not found.pairs.formed and found.products is not None and found.products.power == 1
    if variant is not None and variant.family == "exact" and linear:
        said.append(f"{called}, which costs {variant.cost}; its products grow as n")
    promises = variant is not None or "attention" in name.lower() or "transformer" in name.lower()
    if promises and found.per_token and not found.pairs.formed:
        if not found.mixes:
            said.append(f"{called}; no token reads another")
        elif found.state is not None and not found.pairs.fixed and not _is_recurrent(variant):
            said.append(f"{called}; between tokens a recurrence of {found.state} numbers passes")
    causal = _CAUSAL.search(_plain(name))
    if causal and found.sees_future:
        said.append(f"its name says {causal[0]}; {_future(found).removeprefix('seen: ')}")
    if promises and not found.per_token and not (found.pairs.formed or found.pairs.pooled or found.pairs.fixed):
        said.append(f"{called}; it weighs no tokens")
    return said


def _is_recurrent(variant: Variant | None) -> bool:
    return variant is not None and variant.family in ("recurrence", "kernel", "mixing", "fixed pattern")
