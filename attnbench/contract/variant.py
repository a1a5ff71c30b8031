"""The contract of an attention variant, the claims it may make about itself, and the table of all variants.

An *operator* is an ``nn.Module`` made by ``Class(shape, **options)`` whose ``forward(q, k, v, *, key_mask=None)``
maps q ``(B, H, N, D)``, k ``(B, K, M, D)`` and v ``(B, K, M, E)`` to ``(B, H, N, E)``. K is H, unless the variant
shares heads by itself (``Traits.shares``): then head h of the queries reads head h // (H / K) of k and v. A *mixer*
replaces the whole attention layer: ``forward(x, *, key_mask=None)`` maps ``(B, N, C)`` to ``(B, N, C)``; one that
claims ``cross`` also takes ``source=``, the tokens ``(B, M, C)`` that are asked in place of its own. ``key_mask``
is ``(B, M)`` bool, True where a key is real. The constructor is never timed; ``forward`` is. So the output is as long
as q, and that of a mixer as its input; a layer around an operator may ask fewer queries (``Shape.outputs``).

The content of a padded token, even NaN or infinity, must not reach the output of a real token. If it stands in k, v or
x, it must not reach a gradient either. A weight of 0 is not enough, since 0·NaN is NaN: first replace the content
of padded tokens by zeros, as :func:`attnbench.catalogue.engines.masks.emptied` does. The output of a padded token may
be anything.

A mixer may have a *core* (:class:`Core`): the operator within it, which level operator measures under the same name. It
reads gates after q, k and v (``Traits.reads``), ``forward(q, k, v, *gates, key_mask=None)``, as do its other methods.

A module may have more methods. Other passes and ``attnbench check`` use them if they exist:

- ``dense(*inputs, key_mask=None)``: the output of ``forward``, computed from the documented formula with plain N × M
  matrices. It is the oracle that the fast path is tested against.
- ``begin(*prompt) -> state`` and ``step(state, *token) -> (output, state)``: decoding (``Traits.decode``). Both take
  the inputs of ``forward``, q, k, v or x: ``begin`` for a prompt of any number of tokens, including none, and ``step``
  for one token. A state is a tuple of tensors, numbers and such tuples. ``step`` leaves the state that it was given
  usable: the same step twice gives the same output, and another token may take the place of the first. Sequences of
  unequal length share a step if their states differ in numbers of tensors alone, with the batch as their first axis.
- ``at_once``: True if ``step`` also takes n > 1 tokens, ``(B, H, n, ·)`` or ``(B, n, C)``, and gives n outputs. Other
  modules take several one after the other (:mod:`attnbench.catalogue.engines.decoding.drafts`). A state that is a named
  tuple says in ``overwrites`` the names of its fields in which a second token takes the place of an earlier one.
- ``tied``: names of parameters that all layers of a model share.
- ``position_bias``: the :class:`~attnbench.contract.problem.position_bias.PositionBias` that it adds to the logits,
  made from ``shape.bias``, or None (``Traits.bias``).
- ``sink``: the :class:`~attnbench.contract.problem.sink.Sink` beside its logits, made from ``shape.sink``, or None
  (``Traits.sink``).
- ``cached_bytes(shape, width, **options)``, static: the bytes a cache holds of each token, with numbers of ``width``
  bytes, where that is not a key and a value in each head of keys; ``options`` are those that are not None.
- ``kernel(q, k)``: ``(B, H, N, M)``, the random estimate of a kernel for each pair, before any normalisation and with
  every stabiliser undone. ``kernel_mean(q, k)`` is the mean of these estimates, exp(q·k/√D) if there is no such method;
  ``kernel_variance(q, k)`` is their variance in closed form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import signature
from string import Formatter
from typing import Any, TypeVar

from attnbench.contract.cost import power_of_n
from attnbench.contract.problem.mask import mask_of
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import counted
from attnbench.contract.reasons import with_reasons
from attnbench.contract.registry import Entry, Registry
from attnbench.contract.registry import Needs as Needs
from attnbench.contract.rules import FAMILIES as FAMILIES
from attnbench.contract.rules import Facts, broken_class, broken_fact, broken_option
from attnbench.contract.spec import Scalar, Spec, format_scalar, parse_spec
from attnbench.contract.traits import CORE as CORE
from attnbench.contract.traits import EXACT as EXACT
from attnbench.contract.traits import MIRRORED as MIRRORED
from attnbench.contract.traits import RECURRENCE as RECURRENCE
from attnbench.contract.traits import SUMMED as SUMMED
from attnbench.contract.traits import Knob as Knob
from attnbench.contract.traits import No as No
from attnbench.contract.traits import Rounds as Rounds
from attnbench.contract.traits import Target as Target
from attnbench.contract.traits import Traits as Traits
from attnbench.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Core:
    """The operator within a mixer, between the projections of the layer and under its name.

    Its options are options of the layer, with the same defaults.
    """

    make: Callable[..., Any]
    formula: str
    traits: Traits
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Variant(Entry, Facts):
    """A registered variant: what ``show`` prints."""

    core: Variant | None = None
    """The operator within a mixer, if it has one."""
    around: tuple[str, ...] = ()
    """Options of the layer around a core that the core does not have."""

    def at(self, level: str) -> Variant:
        """The entry that a level measures: at level operator the core of a mixer that has one, else the variant."""
        return self.core if level == "operator" and self.core is not None else self

    def check(self, options: Mapping[str, Scalar]) -> dict[str, Any]:
        """As :meth:`Entry.check`; an option of the layer around a core is refused with those that the core has."""
        for option in self.around:
            if option in options:
                has = ", ".join(self.options)
                raise UsageError(f"{self.name}: option {option!r} belongs to the layer; level operator has {has}")
        return super().check(options)

    @property
    def families(self) -> tuple[str, ...]:
        return (self.family, *self.also)

    @property
    def year(self) -> int | None:
        found = _YEAR.search(self.source)
        return int(found[0]) if found else None

    def claims(self, spec: Spec, *, causal: bool = False) -> Traits:
        """The traits with the options of ``spec``, causal or not; they may differ from those with the defaults.

        Where :attr:`Traits.given` cannot say how, a class may have a class method ``claims(traits, options)``, in which
        ``causal`` is one of the options.
        """
        traits, options = self.traits, {**dict(self.complete(spec).options), "causal": causal}
        for condition, instead in traits.given:
            if all(_holds(part, options) for part in condition.split(",")):
                traits = replace(traits, **instead)
        if traits.reads:
            traits = replace(traits, reads=counted(traits.reads, options))
        own: Callable[[Traits, Mapping[str, Scalar]], Traits] | None = getattr(self.make, "claims", None)
        return traits if own is None else own(traits, options)

    @property
    def own_form(self) -> bool:
        """True if its defaults, causal or not, are a form of its own; not if either is the source's."""
        forms = (False, True) if self.traits.causal else (False,)
        return all(self.claims(Spec(self.name), causal=causal).own_form for causal in forms)

    def target(self, spec: Spec) -> Target:
        """The meaning of this variant's error with the options of ``spec``."""
        return self.claims(spec).target

    def fused_as(self, spec: Spec) -> Spec | None:
        """The same in fused kernels for a GPU; None if there is none with the options of ``spec``."""
        if not self.fused:
            return None
        options, usual = (dict(self.complete(one).options) for one in (spec, Spec(self.name)))
        kept = {name for _, name, _, _ in Formatter().parse(self.fused) if name}
        if any(options.get(name) != usual.get(name) for name in {*options, *usual} - kept):
            return None
        return parse_spec(self.fused.format(**{name: format_scalar(options[name]) for name in kept}))

    def cached_bytes(self, spec: Spec, shape: Shape, width: int) -> int | None:
        """Bytes that a cache of all tokens holds of each in one layer, ``width`` to a number; None if it keeps none.

        An operator keeps a key and a value in each shared head, K·(D + E) numbers, or less, unless its class says
        otherwise, or its queries read a state or nothing.
        """
        own: Callable[..., int] | None = getattr(self.make, "cached_bytes", None)
        if own is not None:
            return own(shape, width, **dict(self.complete(spec).options))
        keeps = self.kind == "operator" and self.claims(spec).meets not in ("state", "nothing")
        return shape.K * (shape.D + shape.E) * width if keeps else None

    def idle_option(self, spec: Spec) -> str | None:
        """The first option of ``spec`` that does nothing beside the others, and the remedy; None if there is none."""
        options = dict(self.complete(spec).options)
        for name, needed in self.needs:
            is_default = options.get(name) == self.options[name].default
            if not is_default and not any(_holds(setting, options) for setting in needed.settings):
                return f"{name}: does nothing without {needed}; write that as well, or leave {name} out"
        return None

    def unsupported_reason(
        self, shape: Shape, *, key_mask: bool = False, decode: bool = False, spec: Spec | None = None
    ) -> str | None:
        """Why the traits or the options of ``spec``, if that is given, rule out this shape; None if they do not."""
        if spec is not None and (idle := self.idle_option(spec)):
            return idle
        traits = self.traits if spec is None else self.claims(spec, causal=shape.causal)
        # With some options steps do not repeat the output of the whole sequence, and can be taken all the same.
        steps = self.traits.decode
        shares: bool | No = traits.shares if isinstance(traits.shares, No) else True
        if traits.shares != "by itself" and (shape.bias, shape.sink) != ("none", "none"):
            shares = No(_TURNS)
        mask = mask_of(shape.mask)
        alone = traits.splits(mask)
        for wanted, trait, what in (
            (decode and not traits.causal, traits.causal, "decode"),
            (shape.causal, traits.causal, "causal"),
            (shape.cross, traits.cross, "cross-attention"),
            (key_mask or mask.kind == "padded", traits.key_padding, "key padding"),
            (decode, steps, "decode"),
            (shape.bias != "none", traits.bias, "bias"),
            (shape.mask != "none", traits.documents if mask.packs else traits.mask, "mask"),
            (alone and (decode or shape.q_start > 0), _ALONE, "mask"),
            (shape.q_start > 0, traits.q_start, "q_start"),
            (shape.sink != "none", traits.sink, "sink"),
            (shape.G > 1, shares, "kv_heads"),
            (shape.Q < shape.H, traits.reads or _GATELESS, "qk_heads"),
            (shape.E != shape.D, traits.v_dim, "v_dim"),
        ):
            if wanted and not trait:
                return f"{what}: {trait}"
        return None


_YEAR = re.compile(r"(?<![\d.:/])(18|19|20)\d\d(?![\d.]\d)(?!\d)")
"""A year, and not the beginning of a number such as arXiv:2009.14794."""


def _holds(condition: str, options: Mapping[str, Scalar]) -> bool:
    option, equals, value = condition.partition("=")
    return option in options and (not equals or value == format_scalar(options[option]))


HOME = "attnbench.catalogue.attention"
OWN = "read a file of your own with --plugin FILE.py or FILE.py:Class"
VARIANTS: Registry[Variant] = Registry(
    "variant",
    home=HOME,
    elsewhere={"peer.": "make peers"},
    own=OWN,
)


def without_core() -> str:
    """The reason why a mixer is no operator, and the names of those that have one within."""
    able = ", ".join(entry.name for entry in VARIANTS if entry.core is not None)
    others = f"; operators within: {able}" if able else ""
    return f"a mixer replaces the whole layer and has no q, k, v; use --level layer or model{others}"


ModuleClass = TypeVar("ModuleClass", bound=Callable[..., Any])

_ALONE = No(
    "not built here: a document is a sequence of its own, which no step or later query continues; remove the mask"
)
_GATELESS = No("an operator that reads gates has them, at level operator; kv_heads shares keys and values")
_TURNS = (
    "not built here: with a bias or a sink every head of queries has numbers of its own, and heads that share keys "
    "take turns in one module"
)


@dataclass(frozen=True)
class register(Facts):  # noqa: N801  # it is used as a function
    """Class decorator that puts a variant into the table. The first line of the class's docstring is its summary.

    The power of n in ``cost``, ``O(n·d²)`` say, is claimed for time, unless ``time_exponent`` claims a larger one.
    Raises UsageError if the name is taken, or an argument or the class breaks the contract; the message names the rule.
    """

    name: str
    core: Core | None = None

    def __call__(self, cls: ModuleClass) -> ModuleClass:
        facts = {fact.name: getattr(self, fact.name) for fact in fields(Facts)}
        entry = _entry(self.name, cls, facts)
        if self.core is not None:
            core = _entry(
                self.name,
                self.core.make,
                {
                    **facts,
                    **{part.name: getattr(self.core, part.name) for part in fields(Core)[1:]},
                    "kind": "operator",
                },
            )
            around = tuple(option for option in _options(cls) if option not in _options(core.make))
            entry = replace(entry, core=replace(core, around=around))
        VARIANTS.add(entry)
        return cls


def _entry(name: str, cls: Callable[..., Any], facts: dict[str, Any]) -> Variant:
    """The entry of a class. Raises UsageError: a fact or the class breaks the contract."""
    given = Facts(**facts)
    broken = broken_fact(name, given) or broken_class(cls, given.traits)
    if broken:
        raise UsageError(f"variant {name!r}: {broken}")
    more: dict[str, Any] = {"traits": with_reasons(given.traits, given.family, given.kind)}
    if given.time_exponent is None:
        more["time_exponent"] = power_of_n(given.cost)
    entry = Variant(name, cls, (cls.__doc__ or "").strip().partition("\n")[0], **{**facts, **more})
    if not cls.__module__.startswith(f"{HOME}."):  # tests check the shipped ones; it takes a fifth of a second
        broken = broken_option(entry, entry.traits, entry.settings)
        if broken:
            raise UsageError(f"variant {name!r}: {broken}")
    return entry


def _options(cls: Callable[..., Any]) -> list[str]:
    return [one.name for one in signature(cls).parameters.values() if one.kind is one.KEYWORD_ONLY]
