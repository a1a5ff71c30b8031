"""The rules of the contract that can be checked without building anything."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

from attnbench.contract.cost import power_of_n
from attnbench.contract.registry import Entry
from attnbench.contract.spec import parse_spec
from attnbench.contract.traits import Knob, Traits
from attnbench.errors import UsageError, did_you_mean

FAMILIES = (
    "exact",
    "reference",
    "fixed pattern",
    "learned pattern",
    "low rank",
    "kernel",
    "pairwise",
    "recurrence",
    "memory",
    "synthetic",
    "mixing",
)
"""Families in the order shown to users; after Tay et al. 2020, "Efficient Transformers: A Survey", figure 2.

``pairwise`` is not theirs: a weight for every pair, of another score than q·k, or of a softmax changed afterwards."""

Kind = Literal["operator", "mixer"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts written above the class of a variant."""

    family: str
    also: tuple[str, ...] = ()
    """Further families that it belongs to; figures take their colour from ``family``."""
    source: str
    formula: str
    cost: str
    """``O(n·d²)``, say."""
    time_exponent: float | None = None
    """Power of n in the claimed time, or None."""
    memory_exponent: float | None = None
    """Power of n in the claimed memory, or None."""
    traits: Traits = Traits()
    kind: Kind = "operator"
    settings: tuple[str, ...] = ("",)
    """Options with which ``attnbench check`` tests it against the laws: ``("window=3", "block=5,look_around=1")``. Give
    one for each algorithm under the name, small enough that sequences of about 20 tokens have several tiles."""
    fused: str = ""


def broken_fact(name: object, facts: Facts) -> str | None:
    """The first bad argument of ``@register`` as a message with the choices; None if all are fine."""
    try:
        parse_spec({"name": name})
    except UsageError as error:
        return str(error)
    if name == "all":
        return "the name 'all' means every variant; choose another"
    for key, choices in (("family", FAMILIES), ("kind", get_args(Kind))):
        if (value := getattr(facts, key)) not in choices:
            return f"{key} {value!r} is not one of {', '.join(choices)}"
    also: object = facts.also
    if not isinstance(also, tuple) or not all(one in FAMILIES for one in also) or facts.family in also:
        return f"also={also!r}: give a tuple of further families: {', '.join(FAMILIES)}"
    for key in ("source", "formula", "cost", "fused"):
        if not isinstance(value := getattr(facts, key), str) or not value.isprintable():
            return f"{key}={value!r}: give one line of text"
    for key in ("time_exponent", "memory_exponent"):
        if not _is_power(value := getattr(facts, key)):
            return f"{key}={value!r}: give a power of n, 0 or more, or None where nothing is claimed"
    settings: object = facts.settings
    if not isinstance(settings, tuple) or not all(isinstance(one, str) for one in settings):
        return f"settings={settings!r}: give a tuple of options as one types them: ('window=3', 'block=5')"
    return _broken_growth(facts.cost, facts.time_exponent) or _broken_traits(facts.traits, facts.kind)


def _is_power(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _broken_growth(cost: str, claimed: float | None) -> str | None:
    said = power_of_n(cost)
    if said is None or claimed is None or claimed >= said:
        return None
    return f"cost {cost} grows as n^{said:g}, time_exponent={claimed:g} as n^{claimed:g}; leave time_exponent out"


def _broken_traits(traits: object, kind: str) -> str | None:
    if not isinstance(traits, Traits):
        return f"traits={traits!r}: give Traits(...)"
    if kind == "mixer" and traits.exact:
        return "Traits(exact=True): a mixer has projections of its own, so it cannot equal softmax attention of q, k, v"
    return traits.problem()


def broken_class(cls: object, traits: Traits) -> str | None:
    """The first rule that the class breaks; None if it breaks none."""
    from torch import nn

    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        return "@register stands above a class that is a torch.nn.Module"
    parameters = list(inspect.signature(cls).parameters.values())
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return "__init__ must take the shape first: __init__(self, shape, *, ...)"
    for option in parameters[1:]:
        if option.kind is option.VAR_KEYWORD:
            return f"name the options that **{option.name} stands for: nobody could check or list them"
        if option.kind is not option.KEYWORD_ONLY:
            return f"option {option.name!r} must be keyword-only: write a * before it in __init__"
        if option.default is option.empty:
            return f"option {option.name!r} needs a default"
        if option.annotation is option.empty:
            return f"option {option.name!r} needs a type: {option.name}: {type(option.default).__name__} = ..."
        if option.name == "causal":
            return "option 'causal': the shape says it already, as shape.causal"
    forward = getattr(cls, "forward", None)
    if forward is None or forward.__name__ == "_forward_unimplemented":  # the one that nn.Module has
        return "it has no forward"
    if "key_mask" not in inspect.signature(forward).parameters:
        return "forward must take key_mask=None, also where it can only refuse it"
    if not traits.decode:
        return None
    begin = getattr(cls, "begin", None)
    if begin is None or not hasattr(cls, "step"):
        return "it claims to decode and lacks begin or step"
    if _inputs(begin) != _inputs(forward):
        return f"begin must take the inputs of forward, of a prompt: begin(self, {', '.join(_inputs(forward))})"
    return None


def _inputs(method: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


def broken_option(entry: Entry, traits: Traits, settings: tuple[str, ...]) -> str | None:
    """The first option of a claim or setting that the class lacks, or whose value it does not take."""
    try:
        known = entry.options
    except Exception as error:  # a type that pydantic does not understand may raise anything
        return f"a type of its options is not understood: {' '.join(str(error).split())[:100]}"
    needed = [(f"{name}: needs {setting!r}", setting) for name, mark in entry.needs for setting in mark.settings]
    for where, options in (*_mentioned(traits, settings), *needed):
        try:
            entry.check(dict(parse_spec(f"{entry.name}:{options}".rstrip(":")).options))
        except UsageError as error:
            return f"{where}: {str(error).removeprefix(f'{entry.name}: ')}"
    for where, option in _named(traits):
        if option not in known:
            return f"{where}: there is no option {option!r}{did_you_mean(option, known)}"
    for knob in _knobs(traits):
        kinds = {*get_args(known[knob.option].annotation)} or {known[knob.option].annotation}
        if int not in kinds or not kinds <= {int, NoneType}:
            return f"knob {knob.option!r}: a knob is an option that takes whole numbers, or none"
    return None


def _knobs(traits: Traits) -> list[Knob]:
    every = (traits.knob, *(instead.get("knob") for _, instead in traits.given))
    return [knob for knob in every if knob is not None]


def _mentioned(traits: Traits, settings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for text in settings:
        yield f"settings {text!r}", text
    for text in traits.exact_with:
        yield f"exact_with {text!r}", text.replace("{n}", "8")
    for condition, _ in traits.given:
        yield f"given {condition!r}", ",".join(part for part in _of_options(condition) if "=" in part)


def _named(traits: Traits) -> Iterator[tuple[str, str]]:
    if traits.converges_with:
        yield f"converges_with {traits.converges_with!r}", traits.converges_with
    yield from ((f"knob {knob.option!r}", knob.option) for knob in _knobs(traits))
    for one in (traits.rounds, *(instead.get("rounds") for _, instead in traits.given)):
        if one is not None:
            yield from ((f"rounds {name!r}", name) for name in (*one.blocks, one.smooth) if name not in ("", "always"))
    for condition, _ in traits.given:
        yield from ((f"given {condition!r}", part) for part in _of_options(condition) if "=" not in part)


def _of_options(condition: str) -> list[str]:
    return [part for part in condition.split(",") if part not in ("causal=true", "causal=false")]
