"""Models with several variants in turn as layers: ``stack:3*gla+sdpa``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Scalar, Spec, parse_spec
from attnbench.contract.traits import No, Traits
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported, UsageError

NAME = "stack"
MOST = 1000
_PART = re.compile(r"(?:([1-9][0-9]{0,9})\*)?([^\[\]*]+)(?:\[([^\[\]]*)\])?")
_ABILITIES = ("causal", "key_padding", "decode", "bias", "mask", "documents", "sink", "longer")


def turns(spec: Spec) -> list[Spec]:
    """The variants of the layers in turn: those of a stack, or the one that ``spec`` names.

    Raises:
        UsageError: the stack names no variants, or one that does not exist.
    """
    if spec.name != NAME:
        return [spec]
    return _parsed(str(dict(VARIANTS.get(NAME).complete(spec).options)["layers"]))


def refusal(spec: Spec, shape: Shape, *, key_mask: bool = False, decode: bool = False, level: str = "") -> str | None:
    """The reason why a variant, or one of those of a stack, rules out this shape; None if none does."""
    for one in dict.fromkeys(turns(spec)):
        entry = VARIANTS.get(one.name).at(level)
        reason = entry.unsupported_reason(shape, key_mask=key_mask, decode=decode, spec=one)
        if reason:
            return reason if one == spec else f"{one.label}: {reason}"
    return None


def _parsed(text: str) -> list[Spec]:
    """``3*gla[rank=4]+sdpa`` is gla:rank=4 three times, and then sdpa."""
    specs: list[Spec] = []
    for part in re.split(r"\+(?![^\[]*\])", text):  # a + inside brackets belongs to a number
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{part!r} is not a variant such as gla, 3*gla or gla[rank=4]")
        times, name, options = int(match[1] or 1), match[2].strip(), match[3]
        if name == NAME:
            raise UsageError("a stack has no stack in it; write its variants")
        if len(specs) + times > MOST:
            raise UsageError(f"more than {MOST} layers in one turn; write fewer")
        entry = VARIANTS.get(name)
        specs += [entry.normalise(parse_spec(f"{name}:{options}" if options else name))] * times
    return specs


def _readable(text: str) -> str:
    try:
        _parsed(text)
    except UsageError as error:
        raise ValueError(f"cannot be read: {error}") from None
    return text


class Stack:
    """Layers of several variants in turn, in one model.

    ``stack:3*gla+sdpa`` has three layers of ``gla`` and one of ``sdpa``, and then the same again until the model has
    all of its layers: the form of Jamba, Qwen3-Next and Kimi-Linear. Options of a variant stand in brackets:
    ``stack:layers=5*local[window=512]+sdpa``. The last turn may be cut short. A layer is the same as in a model of its
    variant alone, down to the seed of its weights; what layers of one variant share, they share in a stack as well.

    It can do what all of its variants can. There is no such attention and no such layer: it is for level model.

    Raises:
        Unsupported: wherever a single layer is asked for.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        layers: Annotated[
            str,
            AfterValidator(_readable),
            Field(description="variants joined by +, options in [ ], how many layers before *: 3*gla+sdpa"),
        ],
    ) -> None:
        raise Unsupported("a stack has layers of several variants; use level model")

    @classmethod
    def claims(cls, traits: Traits, options: Mapping[str, Scalar]) -> Traits:
        specs = dict.fromkeys(_parsed(str(options["layers"])))
        each = [(one.label, VARIANTS.get(one.name).claims(one, causal=bool(options["causal"]))) for one in specs]
        able: dict[str, Any] = {
            ability: next(
                (No(f"{label}: {found}") for label, one in each if not (found := getattr(one, ability))), True
            )
            for ability in _ABILITIES
        }
        return replace(
            traits,
            **able,
            stochastic=any(one.stochastic for _, one in each),
            rounds_together=any(one.rounds_together for _, one in each),
            emulated="; ".join(f"{label}: {one.emulated}" for label, one in each if one.emulated),
            own_form="; ".join(f"{label}: {one.own_form}" for label, one in each if one.own_form),
        )


VARIANTS.add_compound(
    Variant(
        NAME,
        Stack,
        (Stack.__doc__ or "").partition("\n")[0],
        family="mixing",
        source="Lieber et al. 2024, arXiv:2403.19887, section 2",
        formula="layer l of a model is f_(l mod p), each f a variant of its own",
        cost="sum of its layers",
        kind="mixer",
        traits=Traits(
            target="other",
            cross=No("a layer reads one sequence"),
            key_padding=True,
            decode=True,
            bias=True,
            mask=True,
            documents=True,
            sink=True,
            rows_sum_to_one=False,
            shares=No("each layer has a variant of its own, which says whether it shares heads"),
        ),
    )
)
