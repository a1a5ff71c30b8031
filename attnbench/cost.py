"""Read how a cost grows from its text: ``O(n·b·d + n²·d/b)`` grows with the square of n."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\s*(log|sqrt|√|[0-9]+(?:\.[0-9]+)?|[a-zA-Z](?![a-zA-Z]{3})|[²³]|[-+·*/^()])")
"""A letter stands for itself, and ``nd`` for n·d; four letters in a row are a word, not a product."""
_SQUARE = {"²": 2.0, "³": 3.0}


class _Unreadable(Exception):
    pass


def power_of_n(cost: str) -> float | None:
    """The largest power of n in ``O(...)``, ignoring logarithms; None where the text is not of that form.

    It understands products and powers of n, other letters and numbers, and roots as ``√n`` or ``n^0.5``.
    """
    text = cost.strip()
    if not (text.startswith("O(") and text.endswith(")")):
        return None
    try:
        reader = _Reader(text[1:])
        power = reader.atom()
        return power if reader.at_end() else None
    except _Unreadable:
        return None


class _Reader:
    """Reads a cost from left to right; each method returns the power of n in what it has read."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise _Unreadable
            self.tokens.append(match[1].lower())
            at = match.end()
        self.tokens.append("")
        self.at = 0

    def at_end(self) -> bool:
        return self.tokens[self.at] == ""

    def next_is(self, *wanted: str) -> str:
        """Take the next token if it is one of these; otherwise return the empty string."""
        token = self.tokens[self.at]
        if token not in wanted:
            return ""
        self.at += 1
        return token

    def sum(self) -> float:
        power = self.product()
        while self.next_is("+", "-"):
            power = max(power, self.product())
        return power

    def product(self) -> float:
        power = self.factor()
        while self.tokens[self.at] not in ("", "+", "-", ")"):
            divided = self.next_is("·", "*", "/") == "/"
            power += -self.factor() if divided else self.factor()
        return power

    def factor(self) -> float:
        power = self.atom()
        if square := self.next_is(*_SQUARE):
            power *= _SQUARE[square]
        elif self.next_is("^"):
            power = self.raised(power)
        return power

    def raised(self, power: float) -> float:
        """Raise ``power`` to a number; the exponent may be a letter only where the base has no n."""
        token = self.tokens[self.at]
        self.at += 1
        if token and token[0].isdigit():
            return power * float(token)
        if power or not token.isalpha() or token == "n":
            raise _Unreadable
        return 0.0

    def atom(self) -> float:
        token = self.tokens[self.at]
        self.at += 1
        if token == "(":
            power = self.sum()
            if not self.next_is(")"):
                raise _Unreadable
            return power
        if token in ("√", "sqrt"):
            return self.atom() / 2
        if token == "log":
            self.atom()
            return 0.0
        if token == "n":
            return 1.0
        if token.isalpha() or (token and token[0].isdigit()):
            return 0.0
        raise _Unreadable
