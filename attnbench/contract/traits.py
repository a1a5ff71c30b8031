"""The claims of a variant about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any, Literal, TypedDict, get_args

from attnbench.contract.problem.mask import Mask
from attnbench.contract.reads import Read
from attnbench.errors import did_you_mean


class No(str):
    """A capability that a variant lacks, with the mathematical reason; false in conditions."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


Target = Literal["softmax", "learned", "other"]
Meets = Literal["all keys", "chosen keys", "mixtures", "state", "places", "nothing"]
Unsaid = Literal[""]
Sharing = Literal["by itself", "query by query", "head by head"]
Dtypes = tuple[str, ...]
ABILITIES = (
    *("causal", "cross", "key_padding", "decode", "bias", "mask"),
    *("documents", "q_start", "sink", "v_dim", "longer"),
)
"""The traits that are True or a :class:`No`."""


@dataclass(frozen=True)
class Knob:
    """The option by which a variant buys accuracy: a larger value costs more time or memory, never less.

    ``attnbench match`` turns it until a budget is met.
    """

    option: str
    """Name of an option that takes whole numbers."""
    step: int = 8
    """Values worth trying are the multiples of this."""
    falling: bool = False
    """A larger value costs less, as a compression does."""


@dataclass(frozen=True)
class Rounds:
    """The options by which a variant rounds its inputs to a few bits."""

    blocks: tuple[str, ...] = ()
    """Options that count what shares a scale: the error falls as all of them shrink. None where a scale decides little,
    as for numbers that have exponents of their own."""
    smooth: str = ""
    """The option that takes off the keys what all of them have in common before they are rounded, which then moves no
    output; ``always`` where there is no choice."""
    kept: str = ""
    """The option that counts the last tokens, which are not rounded."""
    values: bool = False
    """Values of several tokens share scales, too. Laws about later tokens then turn the signs of their values alone."""


class TraitChanges(TypedDict, total=False):
    """Claims of a variant that differ with certain options: fields of :class:`Traits`."""

    target: Target
    exact: bool
    causal: bool | No
    cross: bool | No
    key_padding: bool | No
    stochastic: bool
    rows_sum_to_one: bool
    decode: bool | No
    meets: Meets | Unsaid
    bias: bool | No
    mask: bool | No
    documents: bool | No
    q_start: bool | No
    sink: bool | No
    shares: Sharing | No
    heads_apart: bool
    reads: tuple[Read, ...]
    v_dim: bool | No
    longer: bool | No
    permutable: bool | None
    dtypes: Dtypes
    compiled: bool
    rounds_together: bool
    rounds: Rounds | None
    emulated: str
    exact_with: tuple[str, ...]
    converges_with: str
    knob: Knob | None
    reads_ahead: str
    baseline: str
    own_form: str
    cost: str


Given = tuple[tuple[str, TraitChanges], ...]


@dataclass(frozen=True)
class Traits:
    """The claims of a variant. The runner, ``list``, ``show``, the figures and the tests all read this one object.

    An ability that is given as False becomes a :class:`No` without a particular reason.
    """

    target: Target = "softmax"
    """The meaning of an error. ``softmax``: the variant approximates softmax attention of the same q, k, v;
    ``learned``: it would after fitting; ``other``: it is another operator, and a difference is only a distance."""
    exact: bool = False
    """It equals softmax attention up to rounding."""
    causal: bool | No = True
    cross: bool | No = True
    """Keys and values may come from another sequence, M != N."""
    key_padding: bool | No = True
    stochastic: bool = False
    """The constructor draws random numbers, so that errors need several draws."""
    rows_sum_to_one: bool = True
    """V = 1 gives 1: the output is an average of the values."""
    decode: bool | No = No("it has no begin and step")
    """Decoding one token at a time from a state or cache gives the same as ``forward``; only where causal is true."""
    meets: Meets | Unsaid = ""
    """Things a query meets. ``all keys``: each that it sees, with a weight that is formed for the pair;
    ``chosen keys``: the same of some of them; ``mixtures``: keys that were mixed before; ``state``: a sum or state that
    all queries read; ``places``: weights that belong to places or channels; ``nothing``: no other token. Empty where
    most of its family meet the same. From it follows why it lacks the next four, if it says no reason:
    :mod:`attnbench.contract.reasons`.
    """
    bias: bool | No = No("not built here: bias")
    """A number for each pair of positions can be added to the logits."""
    mask: bool | No = No("not built here: mask")
    """Any pairs of places can be hidden (:mod:`attnbench.contract.problem.mask`)."""
    documents: bool | No = No("not built here: documents")
    """A sequence may hold several documents that do not see one another. Unless it claims ``mask``, it is called with
    each document alone (:mod:`attnbench.catalogue.engines.documents`)."""
    q_start: bool | No = No("not built here: q_start")
    """If it is causal or has a mask, the queries may be the last tokens of the keys' sequence alone."""
    sink: bool | No = No("not built here: sink")
    """A learned logit without a key can stand beside those of the keys (:mod:`attnbench.contract.problem.sink`)."""
    shares: Sharing | No = "head by head"
    """Way it attends where several heads of queries share a head of keys and values. ``by itself``: its class reads
    ``shape.kv_heads``. ``query by query``: without causality the output of a query depends on no other query and not on
    its position, so that a shared head answers the queries of all its heads as one sequence. ``head by head``: the
    shared heads answer one head of queries each, then the next one. See
    :mod:`attnbench.catalogue.engines.shared_heads`."""
    heads_apart: bool = True
    """The output of a head depends on no other head of queries. Not so where keys are chosen for several at once."""
    reads: tuple[Read, ...] = ()
    """Gates that an operator reads of each token after q, k and v, in order (:mod:`attnbench.contract.reads`)."""
    v_dim: bool | No = True
    """Values may be wider or narrower than keys; each of their columns is treated alone."""
    longer: bool | No = True
    """A module that was made for n tokens takes longer sequences, too: nothing in it belongs to a position."""
    permutable: bool | None = False
    """Permuting the tokens permutes the output: nothing depends on a token's position. None if unknown."""
    dtypes: Dtypes = ("bfloat16", "float16", "float32", "float64")
    """Dtypes in which it runs on a CPU; none if it needs a GPU. Gradients may have fewer."""
    compiled: bool = False
    """The first call compiles it for each shape and type, which takes seconds."""
    rounds_together: bool = False
    """Several tokens are rounded by one scale, so that one that is hidden still moves how others are rounded. Laws
    about later tokens then change their values alone."""
    rounds: Rounds | None = None
    """The options by which it rounds its inputs to a few bits, or None."""
    emulated: str = ""
    """Why its time and memory say nothing of the method, where its numbers are those of it. Both are refused with this
    reason; errors and scores are not. Empty where it is the method itself."""
    exact_with: tuple[str, ...] = ()
    """Options under which it equals softmax attention at length n: ``("window={n}",)``."""
    converges_with: str = ""
    """Name of an option that counts random features or samples: the squared error falls as 1 / its value."""
    knob: Knob | None = None
    """The option that trades accuracy for cost; None if there is none, or if its values have no order by cost."""
    reads_ahead: str = ""
    """If it is causal: one sentence on the share of tokens behind a query in its choice of pairs. Weights and values
    are of earlier tokens alone, but which of them count is then known when a prompt is read, and not when it is
    written. Empty where no output depends on a later token."""
    baseline: str = ""
    """One sentence on the code a user would write in its place, where others are held against it. It computes no more
    than that: NaN in padded tokens spreads as in such a call. Empty where it is no baseline."""
    own_form: str = ""
    """One sentence on where this variant is not the method that its source describes; tables and figures then mark its
    name with a dagger. Empty where it is that method."""
    cost: str = ""
    """The cost with certain options, as ``O(n²·d)``: for ``given`` only; the variant itself has its cost."""
    given: Given = ()
    """The claims with certain options, or if the shape is ``causal``:
    ``(("kernel=relu", {"target": "other"}), ("causal=true,sort=learned", {"own_form": "..."}))``. An option without a
    value holds for any value but none. See :meth:`Variant.claims`."""
    own_form_both_ways: InitVar[str] = ""
    """``own_form`` where the shape is not causal, as the last of ``given``."""

    def __post_init__(self, own_form_both_ways: str) -> None:
        if own_form_both_ways:
            both_ways: tuple[str, TraitChanges] = ("causal=false", {"own_form": own_form_both_ways})
            object.__setattr__(self, "given", (*self.given, both_ways))
        for ability in ABILITIES:
            if getattr(self, ability) is False:
                object.__setattr__(self, ability, No("not defined for this variant"))

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in fields(self))
        said = (f"{field.name}={value!r}" for field, value in values if value != field.default)
        return f"Traits({', '.join(said)})"

    def splits(self, mask: Mask) -> bool:
        """True if it is called with each document of such a sequence alone."""
        return mask.kind == "padded" or (mask.kind == "document" and not self.mask)

    def problem(self) -> str | None:
        """The first field whose value is not allowed, with the choices; None if there is none."""
        for field in fields(self):
            value = getattr(self, field.name)
            allowed, choices = _RULES[str(field.type)]
            if not allowed(value):
                return f"Traits({field.name}={value!r}): {choices}"
        if self.exact and self.target != "softmax":
            return f"Traits(exact=True, target={self.target!r}): what equals softmax attention has target='softmax'"
        if self.exact and self.knob:
            return "Traits(exact=True, knob=...): what equals softmax attention has no accuracy to buy"
        if self.decode and not self.causal:
            return "Traits(decode=True, causal=False): only what is causal can decode"
        known = {field.name for field in fields(self)} - {"given"}
        for condition, instead in self.given:
            for name in instead.keys() - known:
                return f"given {condition!r} claims {name!r}, which is no trait{did_you_mean(name, known)}"
            if problem := replace(self, given=(), **instead).problem():
                return f"given {condition!r}, {problem}"
        return None


DTYPES = Traits.dtypes
EXACT = Traits(
    exact=True,
    decode=True,
    bias=True,
    mask=True,
    q_start=True,
    sink=True,
    shares="by itself",
    permutable=True,
)
"""The claims of softmax attention that leaves nothing out."""
RECURRENCE = Traits(
    target="other",
    cross=No("one recurrence runs over one sequence: each token is both a query and a key"),
    bias=No("there are no logits: the decay is what depends on the distance"),
    decode=True,
    stochastic=True,
    rows_sum_to_one=False,
)
"""The claims of a layer that carries a fading state through its own sequence."""

SUMMED = replace(
    RECURRENCE,
    own_form_both_ways="the sum of one recurrence from either end; the paper defines the causal form only",
)
"""Its claims if it runs from either end where it is not causal."""
MIRRORED = replace(
    RECURRENCE,
    own_form_both_ways="the decay between two tokens is the same in both directions; the paper is causal",
)
"""Its claims if a distance weighs alike on both sides."""
CORE = replace(SUMMED, stochastic=False)
"""The claims of the operator within such a layer, which draws nothing; the gates that it reads are its own."""


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_lines(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_line, value))


def _are_claims(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and _is_line(pair[0]) and isinstance(pair[1], Mapping)
        for pair in value
    )


def _is_knob(value: object) -> bool:
    if not isinstance(value, Knob):
        return value is None
    return _is_line(value.option) and type(value.step) is int and value.step >= 1 and isinstance(value.falling, bool)


def _is_rounding(value: object) -> bool:
    return value is None or (isinstance(value, Rounds) and _are_lines(value.blocks) and _is_line(value.smooth))


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "choose True or False"),
    "bool | No": (lambda value: isinstance(value, bool | No), "choose True, False or No('the reason')"),
    "bool | None": (
        lambda value: value is None or isinstance(value, bool),
        "choose True or False, or None if it is not known",
    ),
    "str": (_is_line, "give one line of text"),
    "Target": (
        lambda value: value in get_args(Target),
        "choose 'softmax', 'learned' or 'other'; exact=True says that it equals softmax attention",
    ),
    "Meets | Unsaid": (
        lambda value: value in ("", *get_args(Meets)),
        f"choose {', '.join(map(repr, get_args(Meets)))}, or nothing for what most of the family meet",
    ),
    "Sharing | No": (
        lambda value: isinstance(value, No) or value in get_args(Sharing),
        f"choose {', '.join(map(repr, get_args(Sharing)))} or No('the reason')",
    ),
    "Dtypes": (
        lambda value: isinstance(value, tuple) and all(one in DTYPES for one in value),
        f"give a tuple of {', '.join(map(repr, DTYPES))}",
    ),
    "Rounds | None": (_is_rounding, "give Rounds(('an option', ...), smooth='an option'), or None"),
    "tuple[str, ...]": (_are_lines, "give a tuple of options as one types them: ('window={n}',)"),
    "tuple[Read, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(one, Read) for one in value),
        "give a tuple of Read(...), as (DECAY, BETA) of attnbench.contract.reads",
    ),
    "Knob | None": (_is_knob, "give Knob('the option'), with step=1 for what counts rounds or blocks, or None"),
    "Given": (_are_claims, "give a tuple of pairs: (('kernel=relu', {'target': 'other'}),)"),
}
"""Type of a trait, as it stands in :class:`Traits` -> whether it takes a value, and what to do if it does not."""
