"""Masks of pairs: a prefix that all see, documents end to end in one sequence, a sliding window."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, cycle
from random import Random
from typing import Literal, cast, get_args

from attnbench.contract.spec import POSITIONAL, Scalar, Spec, parse_spec, parse_specs
from attnbench.errors import UsageError, did_you_mean

Kind = Literal["none", "causal", "prefix", "document", "padded", "sliding"]
KINDS: tuple[str, ...] = get_args(Kind)
FORMS = "none, causal, prefix:64, document:300+200, document:ragged, padded:300+200 or sliding:128"

_SIZE = {"prefix": "length", "document": "lengths", "padded": "lengths", "sliding": "window"}
"""Kind -> the name of its option, which may be left out."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a position of one sequence may see, always neighbours, so that two numbers give their range.

    - ``prefix:P``: the first P keys and all keys up to its own, as in a prefix language model (Raffel et al. 2020,
      arXiv:1910.10683, section 3.2.1).
    - ``document:A+B+...``: the keys of its own document. Documents of these lengths follow one another, from the first
      length again after the last; the end of the sequence cuts the last one off.
    - ``document:ragged``: the same with lengths that add up to the sequence, of :func:`ragged` with seed 0;
      ``ragged-7`` with seed 7.
    - ``padded:A+B+...`` and ``padded:ragged``: the pairs of ``document``, computed in another way: each document is a
      row of a batch, padded to the longest.
    - ``sliding:W``: the W keys up to its own if causal, otherwise all keys less than W places away.
    """

    kind: Kind = "none"
    sizes: tuple[int, ...] = ()
    drawn: int | None = None
    """Seed of the lengths of ragged documents, which :meth:`among` writes out."""

    def __str__(self) -> str:
        ragged = "" if self.drawn is None else "ragged" + f"-{self.drawn}" * (self.drawn > 0)
        return ":".join(filter(None, (self.kind, ragged or "+".join(map(str, self.sizes)))))

    @property
    def packs(self) -> bool:
        """True if it makes several documents of one sequence."""
        return self.kind in ("document", "padded")

    def among(self, tokens: int) -> Mask:
        """The keys that it lets a position of so many tokens see: documents with lengths, however they are computed."""
        if not self.packs:
            return self
        return Mask("document", self.sizes if self.drawn is None else ragged(tokens, self.drawn))

    def documents(self, tokens: int) -> Iterator[int]:
        """The lengths of the documents of so many tokens, one after another."""
        for size in cycle(self.sizes):
            if not tokens:
                return
            yield min(size, tokens)
            tokens -= min(size, tokens)

    def check(self, tokens: int) -> None:
        """Raise UsageError if documents do not add up to so many tokens, even if their lengths are repeated."""
        whole = sum(self.sizes)
        if self.packs and self.sizes and tokens % whole:
            raise UsageError(
                f"mask {self}: documents of {whole} tokens do not add up to {tokens}; give lengths that do, write "
                f"{self.kind}:ragged, or make the length a multiple of {whole}"
            )

    def span(self, position: int, keys: int, *, causal: bool) -> tuple[int, int]:
        """The first key that a position sees, and the one after the last, of ``keys`` in all."""
        first, stop = 0, position + 1 if causal else keys
        if self.kind == "prefix":
            stop = max(stop, self.sizes[0])
        elif self.kind == "sliding":
            first = max(0, position - self.sizes[0] + 1)
            stop = min(stop, position + self.sizes[0])
        elif self.kind == "document":
            ends = self.ends
            times, rest = divmod(position, ends[-1])
            number = bisect_right(ends, rest)
            first = times * ends[-1] + (ends[number - 1] if number else 0)
            stop = min(stop, times * ends[-1] + ends[number])
        return first, min(stop, keys)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes))

    def pairs(self, positions: int, keys: int, *, causal: bool) -> int:
        """Number of keys that the first positions see, all together, in closed form."""
        T = positions
        if self.kind == "prefix":
            P = min(self.sizes[0], keys)
            return T * P if T <= P else P * P + _up_to(T) - _up_to(P)
        if self.kind == "sliding":
            W = self.sizes[0]
            before = _capped(T + 1, W)
            return before if causal else before + _capped(keys, W - 1) - _capped(keys - T, W - 1)
        if self.kind == "document":
            rounds, rest = divmod(T, self.ends[-1])
            start, seen = rounds * self.ends[-1], rounds * sum(_up_to(n) if causal else n * n for n in self.sizes)
            for size in self.sizes:
                inside = min(max(rest, 0), size)
                seen += _up_to(inside) if causal else inside * min(size, keys - start)
                rest, start = rest - size, start + size
            return seen
        return _up_to(T) if causal else T * keys


def _up_to(n: int) -> int:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2


def _capped(n: int, most: int) -> int:
    """The sum of min(most, i) over i < n."""
    return _up_to(n - 1) if n <= most else _up_to(most) + (n - 1 - most) * most


@lru_cache(maxsize=1000)
def ragged(tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths of documents that add up to ``tokens``, about seven: log-uniform between 1/64 and 1/2 of them, the last
    one cut off. A seed draws the same shares for any number of tokens."""
    source, sizes = Random(seed), list[int]()
    while left := tokens - sum(sizes):
        sizes.append(min(left, max(1, round(tokens * 2 ** source.uniform(-6, -1)))))
    return tuple(sizes)


@lru_cache(maxsize=1000)
def mask_of(text: str) -> Mask:
    """The mask of a text such as ``sliding:128``. Raises UsageError if it is none."""
    return _mask(parse_spec(text))


def masks_of(item: object) -> list[Mask]:
    """The masks of one entry of a suite: text, or a mapping such as ``{name: sliding, window: [64, 128]}``. Raises
    UsageError: one of them is none."""
    return [_mask(spec) for spec in parse_specs(item)]


def _mask(spec: Spec) -> Mask:
    if spec.name not in KINDS:
        raise UsageError(f"unknown mask {spec.name!r}{did_you_mean(spec.name, KINDS) or f'; write {FORMS}'}")
    kind = cast(Kind, spec.name)
    option = _SIZE.get(kind)
    given = [value for name, value in spec.options if name in (option, POSITIONAL)]
    if len(given) != len(spec.options) or len(given) != (option is not None):
        how = "takes no options" if option is None else f"takes its {option} and nothing else"
        raise UsageError(f"mask {spec}: {kind!r} {how}; write {FORMS}")
    packs = Mask(kind).packs
    if packs and (found := _RAGGED.fullmatch(str(given[0]))):
        return Mask(kind, drawn=int(found[1] or 0))
    sizes = _sizes(given[0]) if given else ()
    if sizes is None or (len(sizes) > 1 and not packs):
        what = "whole numbers of at least 1 with + in between, or ragged" if packs else "a whole number of at least 1"
        raise UsageError(f"mask {spec}: {option} must be {what}; write {FORMS}")
    return Mask(kind, sizes)


_RAGGED = re.compile("ragged(?:-([1-9][0-9]{0,8}))?")


def _sizes(value: Scalar) -> tuple[int, ...] | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    parts = str(value).split("+")
    if not all(part.isdecimal() and part.isascii() and len(part) <= 10 and int(part) >= 1 for part in parts):
        return None
    return tuple(map(int, parts))
