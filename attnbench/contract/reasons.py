"""Default reasons why a variant takes no bias, mask, documents, later queries or sink.

The reasons follow from :attr:`Traits.meets`, so that each is written once. One that begins with ``not built here`` is
no mathematics, only missing code. Any other would be true of every implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnbench.contract.traits import Meets, No, Traits

OF_FAMILY: Mapping[str, Meets] = {
    "exact": "all keys",
    "reference": "chosen keys",
    "fixed pattern": "chosen keys",
    "learned pattern": "chosen keys",
    "low rank": "mixtures",
    "kernel": "state",
    "pairwise": "all keys",
    "recurrence": "state",
    "memory": "mixtures",
    "synthetic": "all keys",
    "mixing": "places",
}
"""Family -> the default of :attr:`Traits.meets` for its variants."""

REASONS: Mapping[Meets, Mapping[str, No]] = {
    "all keys": {
        "bias": No("not built here: nothing is added to the logits of its pairs"),
        "mask": No("not built here: it forms a weight for every pair, and hides later tokens and padding alone"),
        "sink": No("not built here: the sum that divides its weights has no term beside those of the keys"),
    },
    "chosen keys": {
        "bias": No("not built here: its pairs are chosen and weighed by their logits alone"),
        "mask": No("not built here: it has a choice of pairs of its own, which no mask cuts again"),
        "sink": No(
            "not built here: the sum that divides its weights has no term beside those of the keys that it chose"
        ),
    },
    "mixtures": {
        "bias": No("a bias belongs to a pair of tokens, and a mixture of several tokens has no one place"),
        "mask": No("it mixes tokens before a query meets them, and a mixture cannot be hidden in part"),
        "sink": No("a sink stands beside logits of single keys, and these are mixed before a query meets them"),
    },
    "state": {
        "bias": No("a bias belongs to a pair of tokens, and what all queries read has no weight for each pair"),
        "mask": No(
            "not built here: all queries read one running sum or state; a prefix would come into it early, and a "
            "window would leave it"
        ),
        "sink": No("a sink stands beside logits of single keys, and what all queries read has none"),
    },
    "places": {
        "bias": No("a bias is added to logits of queries and keys, and there are none"),
        "mask": No("not built here: its weights are those of places, and none is left out"),
        "sink": No("a sink stands beside logits of queries and keys, and there are none"),
    },
    "nothing": {
        "bias": No("a bias belongs to a pair of tokens, and an output is made of its own token alone"),
        "mask": No("an output is made of its own token alone, so that there is nothing to hide"),
        "sink": No("a sink takes its weight from keys, and an output is made of its own token alone"),
    },
}

_START = {
    "operator": No("not built here: its first query stands at the first key"),
    "mixer": No("a mixer makes queries and keys of the same tokens, so that the first ones stand at one place"),
}
_OWN_HEADS = No("a mixer makes of x what it needs, and has no heads of keys and values that come from outside")


def with_reasons(traits: Traits, family: str, kind: str) -> Traits:
    """The traits with a reason for each of these abilities that is neither claimed nor refused.

    Documents need no code of the variant's: whatever takes any length, and mixes no tokens beforehand, takes them.
    """
    meets = traits.meets or OF_FAMILY[family]
    reasons: dict[str, bool | No] = {**REASONS[meets], "q_start": _START[kind], "documents": traits.longer}
    if traits.mask:
        reasons["documents"] = True
    elif meets in ("mixtures", "places", "nothing"):
        reasons["documents"] = reasons["mask"] if traits.mask == Traits.mask else traits.mask
    unsaid: dict[str, Any] = {
        name: no for name, no in reasons.items() if getattr(traits, name) == getattr(Traits, name)
    }
    own: dict[str, Any] = {"shares": _OWN_HEADS, "v_dim": _OWN_HEADS} if kind == "mixer" else {}
    return replace(traits, meets=meets, **unsaid, **own)
