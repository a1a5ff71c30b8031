"""The keys that each query of a variant may see: n × n, from its documented formula, for one variant or for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from attnbench.contract.spec import Spec
from attnbench.contract.variant import FAMILIES, HOME, VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.figures.kit.page import NothingToDraw, Page, narrow, new_page, shorten, text_width, wrap
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.pictures.picture import LEVELS, Picture, by_share, draw_matrix, rows_of
from attnbench.laws.implied import random_weights, share_of_largest, small_setting
from attnbench.results.frame.marks import OWN_FORM
from attnbench.results.frame.words import own_form_note

TITLE = "Which keys each query may see"
N = 32
MOST = 512
"""Most tokens: beyond, no printed pair could be told from its neighbour."""

_SIDES = ((1, 2.4), (4, 1.44), (12, 0.96))
"""Side of one matrix in inches, for up to so many variants."""
_SMALL = 0.64
_BETWEEN, _GAP = 0.08, 0.2
"""Inches between the two matrices of a variant, and between variants."""
_NAME, _LINE, _BELOW = 0.22, 0.115, 0.12
"""Inches above a matrix for its name, and for each line of options, and below it."""
_TINY = 6.5
_OTHER_WAY = {False: "only causal", True: "no causal form"}


@dataclass(frozen=True)
class VariantPattern:
    """One variant's matrices."""

    spec: Spec
    family: str
    own_form: bool
    shares: dict[bool, np.ndarray]
    """Causal or not -> ``(n, n)``, each weight over the largest of its row; no entry if the variant refuses."""

    @property
    def name(self) -> str:
        return self.spec.name + OWN_FORM * self.own_form

    def setting(self, width: float) -> list[str]:
        options = self.spec.label.partition(":")[2]
        return [line.replace(" ", "") for line in wrap(options.replace(",", ", "), width / 0.96, _TINY)]


def draw_pattern(variants: Sequence[str] = (), *, n: int = N, causal: bool | None = None) -> Picture:
    """Draw n × n pairs of each variant, without and with causality.

    Default variants: all shipped ones. A name without options means the first setting of its checks, which suits few
    tokens. ``causal``: both by default. Raises UsageError for an unknown variant or option, or an n below 2 or above
    :data:`MOST`, and Unsupported if a named variant refuses the length.
    """
    if not 2 <= n <= MOST:
        raise UsageError(f"a pattern has 2 to {MOST} tokens, not {n}")
    forms = (False, True) if causal is None else (causal,)
    specs = [small_setting(text) for text in variants] or shipped()
    found = [_pattern(spec, n, forms, must=bool(variants)) for spec in specs]
    drawn = [one for one in found if one.shares]
    if not drawn:
        raise NothingToDraw(_OTHER_WAY[forms[0]] if len(forms) == 1 else "no variant allows this length")
    missing = [one.name for one in found if not one.shares]
    numbers = [
        rows_of(share, variant=one.spec.label, family=one.family, causal=causal)
        for one in drawn
        for causal, share in one.shares.items()
    ]
    return Picture(_draw(drawn, forms, n, missing), pd.concat(numbers, ignore_index=True))


def shipped() -> list[Spec]:
    """Every variant of the catalogue, by family."""
    entries = [entry for entry in VARIANTS if entry.make.__module__.startswith(f"{HOME}.")]
    return [small_setting(entry.name) for entry in sorted(entries, key=lambda entry: FAMILIES.index(entry.family))]


def _pattern(spec: Spec, n: int, forms: Sequence[bool], *, must: bool) -> VariantPattern:
    entry = VARIANTS.get(spec.name)
    shares: dict[bool, np.ndarray] = {}
    refusal = None
    for causal in forms:
        try:
            shares[causal] = share_of_largest(random_weights(spec, n, causal=causal)).numpy()
        except Unsupported as reason:
            refusal = reason
    if must and not shares and refusal is not None:
        raise Unsupported(f"{spec.label}: {refusal}") from None
    own = bool(shares) and all(entry.claims(spec, causal=causal).own_form for causal in shares)
    return VariantPattern(spec, entry.family, own, shares)


def density(share: np.ndarray) -> float:
    """Share of the pairs that are seen at all."""
    return float((share > 0).mean())


@in_style
def _draw(drawn: Sequence[VariantPattern], forms: Sequence[bool], n: int, missing: Sequence[str]) -> Figure:
    inside = 3.0 if narrow() else 7.7
    side = next((side for most, side in _SIDES if len(drawn) <= most), _SMALL)
    side = min(side, (inside - _BETWEEN) / len(forms) - 0.02)
    wide = len(forms) * (side + _BETWEEN) - _BETWEEN
    if len(drawn) <= _SIDES[-1][0] or len(forms) == 1:
        wide = max(wide, min(max(text_width(one.name, SMALL_SIZE) for one in drawn) + 0.05, 1.36))
    columns = max(1, min(len(drawn), int((inside + _GAP) / (wide + _GAP))))
    rows = [drawn[start : start + columns] for start in range(0, len(drawn), columns)]
    heads = [_NAME + _LINE * max(1, *(len(one.setting(wide + 0.1)) for one in row)) for row in rows]
    tall = side + (0.2 if side > _SMALL else _BELOW)
    families = list(dict.fromkeys(one.family for one in drawn))
    legend = _legend(families, inside)
    about = [f"{n} tokens · a row is a query, a column a key"]
    if len(forms) == 2:
        about.append("left: every key may be seen · right: causal")
    elif forms[0]:
        about.append("causal")
    steps = ", ".join(f"{least:g}" for least, _ in LEVELS)
    notes = [
        f"Colour: the weight over the largest in its row, in steps from {steps} and from anything at all; a white pair "
        "is not seen. Weights are those of the documented formula, on random inputs. A variant that replaces the whole "
        "layer, or mixes the channels of a value, has none: there it is how much the token moves the output.",
        "Options are small, so that the pattern shows on a few tokens.",
        f"Not drawn, since they refuse this: {', '.join(missing)}." if missing else "",
        own_form_note(one.name for one in drawn),
    ]
    page = new_page(TITLE, about, notes, height=1.0, room=sum(heads) + len(rows) * tall + 0.17 * len(legend) + 0.1)
    for number, line in enumerate(legend):
        _write_legend(page, line, page.top - 0.08 - 0.17 * number)
    top = page.top - 0.17 * len(legend) - 0.1
    for row, head in zip(rows, heads, strict=True):
        for column, one in enumerate(row):
            at = replace(page, left=page.left + column * (wide + _GAP), top=top)
            _draw_one(at, one, forms, side, wide, head)
        top -= head + tall
    return page.figure


def _legend(families: Sequence[str], inside: float) -> list[list[str]]:
    fewest = len(_in_lines(families, inside))
    width = min(inside, max(text_width(family, SMALL_SIZE) + 0.32 for family in families))
    while len(lines := _in_lines(families, width)) > fewest:
        width += 0.1
    return lines


def _in_lines(families: Sequence[str], inside: float) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    used = 0.0
    for family in families:
        width = text_width(family, SMALL_SIZE) + 0.32
        if lines[-1] and used + width > inside:
            lines.append([])
            used = 0.0
        lines[-1].append(family)
        used += width
    return lines


def _write_legend(page: Page, families: Sequence[str], y: float) -> None:
    x = page.left
    box = page.blank(page.left, y - 0.08, page.right - page.left, 0.16)
    for family in families:
        box.plot([x - page.left + 0.05], [0.08], "s", color=palette().family(family), markersize=5)
        page.write(x + 0.14, y, family, va="center")
        x += text_width(family, SMALL_SIZE) + 0.32


def _draw_one(at: Page, one: VariantPattern, forms: Sequence[bool], side: float, wide: float, head: float) -> None:
    at.write(at.left, at.top - 0.02, shorten(one.name, wide + 0.1, SMALL_SIZE), va="top")
    for place, line in enumerate(one.setting(wide + 0.1)):
        y = at.top - 0.17 - _LINE * place
        at.write(at.left, y, line, va="top", fontsize=_TINY, color=palette().faint)
    bottom = at.top - head - side
    for place, causal in enumerate(forms):
        left = at.left + place * (side + _BETWEEN)
        share = one.shares.get(causal)
        if share is None:
            words = _OTHER_WAY[causal].replace(" ", "\n", 1) if side <= _SMALL else _OTHER_WAY[causal]
            at.write(left + side / 2, bottom + side / 2, words, ha="center", va="center", fontsize=_TINY,
                     color=palette().faint)  # fmt: skip
            continue
        draw_matrix(at.axes(left, bottom, side, side), by_share(share), palette().family(one.family))
        if side > _SMALL:
            at.write(left, bottom - 0.03, f"{density(share):.0%} of the pairs", va="top", fontsize=_TINY,
                     color=palette().faint)  # fmt: skip
