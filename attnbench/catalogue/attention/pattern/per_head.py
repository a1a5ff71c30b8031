"""Different variants on different heads of one layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines.head_groups import HeadGroups
from attnbench.catalogue.engines.masks import emptied
from attnbench.contract.problem.position_bias import position_bias
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Scalar, Spec, parse_spec
from attnbench.contract.variant import VARIANTS, No, Traits, Variant, register
from attnbench.errors import Unsupported, UsageError

_PART = re.compile(r"(?:([1-9][0-9]*)\*)?([^\[\]*]+)(?:\[([^\[\]]*)\])?")


class Part(NamedTuple):
    """One summand of ``parts``."""

    spec: Spec
    heads: int | None
    """None: a share of the heads not given to other parts."""


def parse_parts(text: str) -> list[Part]:
    """``2*local[window=64]+performer`` gives two heads to local:window=64 and the others to performer.

    Raises:
        UsageError: the text is not variants with options in brackets, joined by +.
    """
    parts = []
    for one in re.split(r"\+(?![^\[]*\])", text):  # a + inside brackets belongs to a number
        match = _PART.fullmatch(one.strip())
        if match is None:
            raise UsageError(
                f"per-head: {one!r} is not a variant such as local, 2*local or local[window=64,dilation=2]"
            )
        heads, name, options = match.groups()
        spec = parse_spec(f"{name}:{options}" if options else name)
        parts.append(Part(spec, int(heads) if heads else None))
    return parts


def heads_of(parts: list[Part], total: int) -> list[int]:
    """Number of heads of each part: the number named, or an equal share of the rest, larger shares first.

    Raises:
        Unsupported: there are not as many heads as the parts name.
    """
    left = total - sum(part.heads or 0 for part in parts)
    sharing = sum(part.heads is None for part in parts)
    if left < 0 or (left and not sharing):
        raise Unsupported(f"the parts name {total - left} heads, and there are {total}")
    sizes = []
    for part in parts:
        size = -(-left // sharing) if part.heads is None else part.heads
        if part.heads is None:
            left, sharing = left - size, sharing - 1
        sizes.append(size)
    return sizes


@register(
    "per-head",
    family="fixed pattern",
    source="Child et al. 2019, arXiv:1904.10509, section 5.1; Roy et al. 2021, arXiv:2003.05997",
    formula="o = concat over heads h of f_h(q_h, k_h, v_h), each f_h a variant of its own",
    cost="sum of its parts",
    time_exponent=1.0,
    memory_exponent=1.0,
    traits=Traits(
        sink=No("not built here: its heads have variants of their own, most of which have none"),
        mask=No("not built here: its heads have variants of their own, most of which hide no pairs"),
        # These hold for the default parts; for others see PerHead.claims.
        stochastic=True,
        decode=True,
        bias=True,
        shares=No("each head of queries has a variant of its own, which may not read the keys of another"),
        exact_with=("parts=softmax", "parts=local[window={n}]+softmax", "parts=1*softmax+sparse[length={n}]"),
    ),
    settings=("parts=softmax+topk[keys=5]", "parts=local[window=3]+performer[features=16,chunk=5]"),
)
class PerHead(nn.Module):
    """Each group of heads in a layer has a variant of its own.

    ``parts`` joins variants by +, options in brackets: ``parts=2*local[window=64]+performer`` gives two heads to local
    attention and the others to the Performer. The parts without a number share the other heads equally; the first ones
    take what does not divide, and with fewer heads than such parts the last ones have none. The groups run one after
    another on views of their heads, so that times add up. Random parts draw one after another: with the same seed, a
    group alone is bit for bit the variant that it names.

    It can do what all of its parts can: causality, cross-attention, key padding, decoding and a bias are refused with
    the reason of the first part that cannot. A part gets those rows of the layer's bias that belong to its heads. It
    approximates softmax attention if all of its parts do. If one is another operator, the error is only a distance; if
    one has to be fitted, the error means nothing. Parts that do not average the values have outputs on another scale
    than those that do.

    Differs from the papers: Child et al. give the heads parts of one pattern, Roy et al. mix local and routing heads;
    here any operators can be mixed.

    q ``(B, H, N, D)``, k and v ``(B, H, M, D)`` -> ``(B, H, N, D)``.

    Raises:
        UsageError: ``parts`` is not of this form, or names a mixer, which has no heads to give.
        Unsupported: there are more or fewer heads than the parts name, or a part does not allow the shape; in
            ``forward``, a part does not allow ``key_mask``; in ``begin``, a part does not decode.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        parts: Annotated[
            str, Field(description="variants joined by +, options in [ ], heads before *: 2*local[window=64]+performer")
        ] = "local+performer",
    ) -> None:
        super().__init__()
        named = parse_parts(parts)
        self.entries: list[Variant] = []
        modules: list[nn.Module] = []
        sizes = []
        for part, heads in zip(named, heads_of(named, shape.H), strict=True):
            entry = VARIANTS.get(part.spec.name)
            if entry.kind == "mixer":
                raise UsageError(f"per-head: {entry.name} replaces the whole layer, so it cannot take single heads")
            options = entry.check(dict(part.spec.options))
            own = replace(shape, heads=max(1, heads))
            if reason := entry.unsupported_reason(own, spec=part.spec):
                raise Unsupported(f"{entry.name}: {reason}")
            if heads:
                # Not with build(), whose seed would be the same for every part.
                modules.append(entry.make(own, **options))
                self.entries.append(entry)
                sizes.append(heads)
        self.shape = shape
        self.groups, self.position_bias = HeadGroups(modules, sizes), position_bias(shape)
        if self.position_bias is not None:
            self.groups.share(self.position_bias)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.groups.joined(lambda part, *x: _formula(part, self.shape.causal)(*x, key_mask=key_mask), q, k, v)

    @classmethod
    def claims(cls, traits: Traits, options: Mapping[str, Scalar]) -> Traits:
        """The claims that all parts share."""
        try:
            named = [part.spec for part in parse_parts(str(options["parts"]))]
            each = [VARIANTS.get(spec.name).claims(spec, causal=bool(options["causal"])) for spec in named]
        except UsageError:  # said when it is built
            return traits

        def said(trait: str) -> str:
            parts = ((spec.name, getattr(one, trait)) for spec, one in zip(named, each, strict=True))
            return "; ".join(f"{name}: {words}" for name, words in parts if words)

        targets = {one.target for one in each}
        return replace(
            traits,
            target="other" if "other" in targets else "learned" if "learned" in targets else "softmax",
            exact=all(one.exact for one in each),
            stochastic=any(one.stochastic for one in each),
            rows_sum_to_one=all(one.rows_sum_to_one for one in each),
            permutable=all(one.permutable for one in each),
            rounds_together=any(one.rounds_together for one in each),
            emulated=said("emulated"),
            bias=_all_can("bias", named, each),
            documents=_all_can("documents", named, each),
            own_form=said("own_form"),
        )

    def _require(self, *, key_mask: bool = False, decode: bool = False) -> None:
        for entry in self.entries:
            if reason := entry.unsupported_reason(self.shape, key_mask=key_mask, decode=decode):
                raise Unsupported(f"{entry.name}: {reason}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None:
            self._require(key_mask=True)
        k, v = emptied(key_mask, k, v)  # some parts leave that to their callers
        out: Tensor = self.groups(q, k, v, key_mask=key_mask)
        return out

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        self._require(decode=True)
        return self.groups.begin(q, k, v)

    def step(self, state: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        return self.groups.step(state, q, k, v)


def _all_can(ability: str, named: Sequence[Spec], each: Sequence[Traits]) -> bool | No:
    """True, or the reason of the first part that lacks the ability."""
    lacking = ((spec, no) for spec, one in zip(named, each, strict=True) if not (no := getattr(one, ability)))
    return next((No(f"{spec.name}: {no}") for spec, no in lacking), True)


def _formula(part: Any, causal: bool) -> Callable[..., Tensor]:
    """The documented formula of a part, or softmax attention if it has none, as only exact variants do."""

    def softmax(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        bias = getattr(part, "position_bias", None)
        return exact_attention(q, k, v, causal=causal, key_mask=key_mask, bias=bias).to(q.dtype)

    return getattr(part, "dense", softmax)
