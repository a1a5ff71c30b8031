"""A name with options, written the same way everywhere: ``performer:features=512,kernel=relu``."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from attnbench.errors import UsageError

Scalar = bool | int | float | str | None

MAX_TEXT = 1000
MAX_SPECS = 1000

POSITIONAL = "_"
"""Key of a value without a name (``file:qkv.safetensors``), which is for the first option."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")  # in linear time, however long the text
_WORDS: dict[str, Scalar] = {"true": True, "false": False, "null": None, "none": None}


def parse_scalar(text: str) -> Scalar:
    """The value meant by a bare word: ``1e-6`` is a number; ``no``, ``12:30`` and ``010`` are words."""
    if _INT.fullmatch(text):
        return int(text) if len(text) <= 20 else text
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        number = float(text)
        return number if math.isfinite(number) else text
    return _WORDS.get(text.lower(), text)


_THOUSANDS = re.compile(r"(?<!\d)(?<!\d\.)[1-9]\d{0,2}(?:,\d{3})+(?!\d)")
"""A list of numbers that may be one with commas between its thousands."""


def comma_separated(text: str) -> list[str]:
    """The parts of a list, of numbers or of words. Raises UsageError: it may be one number: ``1,024`` or ``8,192`` is
    hardly a list, ``64,128`` is."""
    for found in _THOUSANDS.finditer(text):
        first, *others = found[0].split(",")
        number = whole = int(first + "".join(others))
        while number % 2 == 0:
            number //= 2
        alone = "," not in text[found.start() - 1 : found.start()] + text[found.end() : found.end() + 1]
        if (alone and (len(first) == 1 or number < 10)) or any(part.startswith("0") for part in others):
            several = ", ".join((first, *others))
            raise UsageError(f"{found[0]!r} may be one number; write {whole}, or {several!r} if it is several")
    return [part.strip() for part in text.split(",")]


def format_scalar(value: Scalar) -> str:
    """The inverse of :func:`parse_scalar` for the values that options take."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Spec:
    """A name and its options, sorted so that two ways of writing the same thing are equal."""

    name: str
    options: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def of(cls, name: str, options: Mapping[str, Scalar]) -> Spec:
        return cls(name, tuple(sorted(options.items())))

    @property
    def label(self) -> str:
        """``performer:features=512,kernel=relu``; a name without options stands alone."""
        if not self.options:
            return self.name
        parts = (("" if key == POSITIONAL else f"{key}=") + format_scalar(value) for key, value in self.options)
        return f"{self.name}:{','.join(parts)}"

    def __str__(self) -> str:
        return self.label


def parse_specs(item: object) -> list[Spec]:
    """Parse one entry of a list of variants or inputs, text or a mapping; list values expand to several specs.

    ``performer:features=[64,256]`` and ``{name: performer, features: [64, 256]}`` both give two specs. Raises
    UsageError: not a name with options, a text of more than 1000 characters, or more than 1000 specs.
    """
    name: object
    if isinstance(item, str):
        if len(item) > MAX_TEXT:
            raise UsageError(f"a name with its options has at most {MAX_TEXT} characters, not {len(item)}; shorten it")
        name, options = _split(item)
    elif isinstance(item, Mapping):
        options = {str(key): value for key, value in item.items()}
        name = options.pop("name", None)
    else:
        raise UsageError(f"expected a name such as performer:features=256, got {item!r}")
    if isinstance(name, str) and "," in name:
        raise UsageError(f"{name!r} is not one name; write several in brackets: [{name}]")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a name; write at most 64 letters, digits, '.', '_' and '-'")
    axes: list[list[tuple[str, Scalar]]] = []
    for key, value in options.items():
        values = value if isinstance(value, list) else [value]
        if not values:
            raise UsageError(f"{name}: option {key!r} is an empty list; give at least one value")
        axis: list[tuple[str, Scalar]] = []
        for one in values:
            if one is not None and not isinstance(one, bool | int | float | str):
                raise UsageError(f"{name}: option {key!r} must be a number, word or true/false, got {one!r}")
            axis.append((key, one))
        axes.append(axis)
    count = math.prod(map(len, axes))
    if count > MAX_SPECS:
        raise UsageError(f"{name}: the lists of options make {count} combinations, at most {MAX_SPECS}; shorten them")
    return [Spec.of(name, dict(chosen)) for chosen in itertools.product(*axes)]


def parse_spec(item: object) -> Spec:
    """Like :func:`parse_specs`, where exactly one spec is wanted. Raises UsageError: there are several, or it is not a
    name with options."""
    specs = parse_specs(item)
    if len(specs) != 1:
        raise UsageError(f"{item}: lists are not allowed here; give each option one value")
    return specs[0]


def _split(text: str) -> tuple[str, dict[str, object]]:
    name, colon, rest = text.strip().partition(":")
    options: dict[str, object] = {}
    if colon and not rest:
        raise UsageError(f"{text!r} ends in ':'; write an option after it, or remove it")
    # Commas inside [...] separate the values of one option; all others separate options.
    parts = re.split(r",(?![^\[]*\])", rest) if rest else []
    for position, part in enumerate(parts):
        key, equals, value = part.partition("=")
        if not equals:
            if position:
                raise UsageError(f"{text!r}: {part!r} is not an option; write option=value")
            key, value = POSITIONAL, part
        key, value = key.strip(), value.strip()
        if key in options:
            raise UsageError(f"{text!r}: option {key!r} is given twice; remove one")
        if value.startswith("[") and value.endswith("]"):
            inner = value[1:-1].strip()
            options[key] = [parse_scalar(one) for one in comma_separated(inner)] if inner else []
        else:
            options[key] = parse_scalar(value)
    return name, options
