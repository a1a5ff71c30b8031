"""The contract of an attention variant, what it may claim about itself, and the table of all variants.

An *operator* is an ``nn.Module`` made by ``Class(shape, **options)`` whose ``forward(q, k, v, *, key_mask=None)``
maps q ``(B, H, N, D)`` and k, v ``(B, H, M, D)`` to ``(B, H, N, D)``. A *mixer* replaces the whole attention layer:
``forward(x, *, key_mask=None)`` maps ``(B, N, C)`` to ``(B, N, C)``. ``key_mask`` is ``(B, M)`` bool, True where a key
is real. The constructor is never timed; ``forward`` is.

A module may have more methods, which other passes and ``attnbench check`` use where they are there:

- ``dense(*inputs, key_mask=None)``: the output of ``forward`` again, written out from the documented formula with
  plain N × M matrices. It is the oracle; the fast path is what is tested.
- ``begin(*prompt) -> state`` and ``step(state, *token) -> (output, state)``: decoding (``Traits.decode``). Both take
  the inputs of ``forward``, q, k, v or x: of a prompt of any number of tokens, none included, and of one token. A
  state is a tuple of tensors, numbers and such tuples. ``step`` leaves the state that it was given usable: the same
  step twice gives the same output.
- ``tied``: names of parameters of which all layers of a model have the same one.
- ``position_bias``: the :class:`~attnbench.position_bias.PositionBias` that it adds to the logits, made from
  ``shape.bias``, or None (``Traits.bias``).
- ``kernel(q, k)``: ``(B, H, N, M)``, the random estimates of a kernel of each pair, before any normalisation and with
  every stabiliser undone; ``kernel_mean(q, k)``: what they are on average, exp(q·k/√D) where there is no such method;
  ``kernel_variance(q, k)``: their variance in closed form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from attnbench.errors import Unsupported, UsageError
from attnbench.registry import Entry, Registry
from attnbench.shape import Shape
from attnbench.spec import Scalar, Spec, format_scalar, parse_spec

if TYPE_CHECKING:
    from torch import nn

FAMILIES = (
    "exact",
    "reference",
    "fixed pattern",
    "learned pattern",
    "low rank",
    "kernel",
    "recurrence",
    "memory",
    "synthetic",
    "mixing",
)
"""In the order shown to users; after Tay et al. 2020, "Efficient Transformers: A Survey", figure 2."""


class No(str):
    """A capability that a variant lacks, with the mathematical reason; false in conditions."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


Target = Literal["softmax", "learned", "other"]


@dataclass(frozen=True)
class Traits:
    """What a variant claims. The runner, ``list``, ``show``, the figures and the tests all read this one object."""

    target: Target = "softmax"
    """What an error number means: it approximates softmax attention of the same q, k, v; it would after fitting; or it
    is another operator, so that a difference is only a distance."""
    exact: bool = False
    """Equals softmax attention up to rounding."""
    causal: bool | No = True
    cross: bool | No = True
    """Keys and values may come from another sequence, M != N."""
    key_padding: bool | No = True
    stochastic: bool = False
    """Draws random numbers in the constructor, so that errors need several draws."""
    rows_sum_to_one: bool = True
    """V = 1 gives 1: the output is an average of the values."""
    decode: bool | No = False
    """One token at a time against a state or cache gives what ``forward`` gives; where causal is true only."""
    bias: bool | No = No("a bias belongs to a pair of tokens, and the weight of a pair is never formed")
    """A number for each pair of positions may be added to the logits."""
    permutable: bool = False
    """Permuting the tokens permutes the output: nothing depends on where a token stands."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "float64")
    """In which it runs on a CPU; gradients may be limited further."""
    compiled: bool = False
    """Compiled for each shape and type at the first call, which takes seconds."""
    exact_with: tuple[str, ...] = ()
    """Options under which it equals softmax attention at length n: ``("window={n}",)``."""
    converges_with: str = ""
    """Option, a number of random features or samples: the squared error falls as 1 / its value."""
    given: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """What it claims instead with an option: ``(("kernel=relu", {"target": "other"}),)``; an option alone stands for
    every value of it but none. See :meth:`Variant.claims`."""


@dataclass(frozen=True)
class Variant(Entry):
    """A registered variant: what ``show`` prints."""

    family: str = "exact"
    source: str = ""
    formula: str = ""
    cost: str = ""
    time_exponent: float = 1.0
    """Power of n in the time that the paper claims."""
    memory_exponent: float = 1.0
    """Power of n in the memory that the paper claims."""
    traits: Traits = Traits()
    kind: Literal["operator", "mixer"] = "operator"
    settings: tuple[str, ...] = ("",)
    """Options under which ``attnbench check`` holds it to the laws: ``("window=3", "block=5,look_around=1")``. Small
    enough that sequences of some 20 tokens have several tiles, one for each algorithm under the name."""

    def claims(self, spec: Spec) -> Traits:
        """The traits with the options of ``spec``, which may be others than with the defaults.

        A class may say so itself, where :attr:`Traits.given` cannot: by a class method ``claims(traits, options)``.
        """
        traits, options = self.traits, dict(self.complete(spec).options)
        for text, instead in traits.given:
            option, equals, value = text.partition("=")
            if option in options and (not equals or value == format_scalar(options[option])):
                traits = replace(traits, **instead)
        own: Callable[[Traits, Mapping[str, Scalar]], Traits] | None = getattr(self.make, "claims", None)
        return traits if own is None else own(traits, options)

    def target(self, spec: Spec) -> Target:
        """What an error number of this variant means with the options of ``spec``."""
        return self.claims(spec).target

    def unsupported_reason(self, shape: Shape, *, key_mask: bool = False, decode: bool = False) -> str | None:
        """Why the traits rule this shape out, or None."""
        traits = self.traits
        for wanted, trait, what in (
            (decode and not traits.causal, traits.causal, "decode"),
            (shape.causal, traits.causal, "causal"),
            (shape.cross, traits.cross, "cross-attention"),
            (key_mask, traits.key_padding, "key padding"),
            (decode, traits.decode, "decode"),
            (shape.bias != "none", traits.bias, "bias"),
        ):
            if wanted and not trait:
                return f"{what}: {trait if isinstance(trait, No) else 'not defined for this variant'}"
        return None


VARIANTS: Registry[Variant] = Registry("variant", elsewhere={"peer.": "make peers"})

ModuleClass = TypeVar("ModuleClass", bound=Callable[..., Any])


def register(
    name: str,
    *,
    family: str,
    source: str,
    formula: str,
    cost: str,
    time_exponent: float = 1.0,
    memory_exponent: float = 1.0,
    traits: Traits | None = None,
    kind: Literal["operator", "mixer"] = "operator",
    settings: tuple[str, ...] = ("",),
) -> Callable[[ModuleClass], ModuleClass]:
    """Class decorator: put a variant into the table. The first line of the class's docstring is its summary.

    Raises:
        UsageError: the name is taken, or the class breaks the contract; the message says which rule.
    """
    traits = traits or Traits()

    def add(cls: ModuleClass) -> ModuleClass:
        broken = _broken_rule(cls, family, kind, traits)
        if broken:
            raise UsageError(f"variant {name!r}: {broken}")
        summary = (cls.__doc__ or "").strip().partition("\n")[0]
        VARIANTS.add(
            Variant(
                name=name,
                make=cls,
                summary=summary,
                family=family,
                source=source,
                formula=formula,
                cost=cost,
                time_exponent=time_exponent,
                memory_exponent=memory_exponent,
                traits=traits,
                kind=kind,
                settings=settings,
            )
        )
        return cls

    return add


def _broken_rule(cls: Callable[..., Any], family: str, kind: str, traits: Traits) -> str | None:
    """The first rule of the contract that can be seen to be broken without building anything."""
    if family not in FAMILIES:
        return f"family {family!r} is not one of {', '.join(FAMILIES)}"
    _, *options = inspect.signature(cls).parameters.values() or (None,)
    for option in options:
        if option.kind is not option.KEYWORD_ONLY:
            return f"option {option.name!r} must be keyword-only: write a * before it in __init__"
        if option.default is option.empty:
            return f"option {option.name!r} needs a default"
    forward = getattr(cls, "forward", None)
    if forward is None or forward.__name__ == "_forward_unimplemented":  # what nn.Module brings
        return "it has no forward"
    if "key_mask" not in inspect.signature(forward).parameters:
        return "forward must take key_mask=None, also where it can only refuse it"
    if traits.decode and not (hasattr(cls, "begin") and hasattr(cls, "step")):
        return "it claims to decode and lacks begin or step"
    if traits.decode and _inputs(cls.begin) != _inputs(forward):  # type: ignore[attr-defined]  # seen the line before
        return f"begin must take the inputs of forward, of a prompt: begin(self, {', '.join(_inputs(forward))})"
    return None


def _inputs(method: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]


def build(variant: str | Spec, shape: Shape, *, seed: int = 0, **options: Any) -> nn.Module:
    """Make a variant for ``shape``, on the CPU in float32; move it with ``.to``.

    Random projections and initial weights are drawn from ``seed`` here, never in ``forward``; the global generator is
    left as it was.

    Args:
        variant: a name, or text such as ``performer:features=512``.
        options: further options, overriding those in the text.

    Raises:
        UsageError: unknown variant or option, or a value out of range.
        Unsupported: the mathematics does not allow this shape; the message is the reason.
    """
    import torch

    spec = variant if isinstance(variant, Spec) else parse_spec(variant)
    entry = VARIANTS.get(spec.name)
    checked = entry.check({**dict(spec.options), **options})
    reason = entry.unsupported_reason(shape)
    if reason:
        raise Unsupported(reason)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module: nn.Module = entry.make(shape, **checked)
    return module.eval()
