"""The matrix that each variant applies to the values on real inputs, and that of exact softmax."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.figures.kit.page import Page, narrow, new_page, shorten
from attnbench.figures.kit.palette import palette
from attnbench.figures.kit.style import SMALL_SIZE, in_style
from attnbench.figures.pictures.heads import Head, heads_of, softmax_matrix
from attnbench.figures.pictures.picture import DECADES_BELOW, Picture, by_size, draw_matrix, positive, rows_of
from attnbench.laws.implied import formula_of, implied, mixes_channels
from attnbench.results.frame.marks import OWN_FORM
from attnbench.results.frame.words import own_form_note

TITLE = "Attention weights on real inputs"
N = 128
MOST = 1024
VARIANTS_SHOWN = ("local:window=16", "topk:keys=8", "nystrom:landmarks=16", "performer", "linear")
"""The default variants: one of each way to save the n × n matrix."""
_GAP, _NAME, _KEY = 0.2, 0.34, 0.5


@dataclass(frozen=True)
class Weights:
    """One matrix, and its distance from softmax's."""

    name: str
    matrix: np.ndarray
    error: float
    """‖P - softmax‖ / ‖softmax‖ (Frobenius)."""


def draw_weights(
    variants: Sequence[str] = VARIANTS_SHOWN,
    *,
    inputs: str = "listops",
    layer: int | None = None,
    head: int | None = None,
    n: int = N,
    causal: bool = False,
) -> Picture:
    """Draw softmax's matrix and each variant's, of one head.

    ``variants``: names, with options as one types them. ``layer`` (of a captured input) and ``head`` from 0; the first
    by default. ``n``: first tokens. Raises UsageError for an unknown one of these, or an n below 2 or above
    :data:`MOST`, and Unsupported if a variant is a mixer, mixes channels or refuses the shape, or the input is too
    short.
    """
    if not 2 <= n <= MOST:
        raise UsageError(f"matrices of weights have 2 to {MOST} tokens, not {n}")
    label, found = heads_of(inputs, n, causal=causal, layer=layer, head=0 if head is None else head)
    one = found[0]
    exact = softmax_matrix(one, causal=causal)
    matrices = [Weights("softmax", exact.numpy(), 0.0)]
    for text in variants:
        spec = parse_spec(text)
        # A default that reaches all of so few tokens would show softmax.
        tried = ((at, variant_matrix(at, one, causal=causal)) for at in _narrower(spec, n, causal=causal))
        first = next(tried)
        differing = (found for found in chain([first], tried) if relative_error(found[1], exact) > 1e-9)
        spec, matrix = next(differing, first)
        matrices.append(Weights(_name(spec, causal), matrix.numpy(), relative_error(matrix, exact)))
    about = f"inputs {label} · {one.name} · first {n} tokens" + " · causal" * causal
    numbers = [rows_of(one.matrix, variant=one.name.removesuffix(OWN_FORM), rel_error=one.error) for one in matrices]
    return Picture(_draw(matrices, about), pd.concat(numbers, ignore_index=True))


def _narrower(spec: Spec, n: int, *, causal: bool) -> Iterator[Spec]:
    entry = VARIANTS.get(spec.name)
    yield spec
    if spec.options or entry.claims(spec, causal=causal).exact:
        return
    knob = entry.traits.knob
    if knob and not knob.falling:
        yield Spec.of(spec.name, {knob.option: max(1, n // 8)})
    yield from (parse_spec(f"{spec.name}:{setting}") for setting in entry.settings if setting)


def variant_matrix(spec: Spec, head: Head, *, causal: bool) -> torch.Tensor:
    """The matrix ``(N, M)`` of a variant on a head, in float64; UsageError if unknown, Unsupported if refused."""
    entry = VARIANTS.get(spec.name)
    if entry.kind == "mixer":
        raise Unsupported(f"{spec.name} has no weights of q and k; attnbench plot pattern {spec.name} shows it")
    shape = Shape(batch=1, heads=1, seq_len=head.q.shape[2], head_dim=head.q.shape[3], causal=causal)
    try:
        module = build(spec, shape).double()
    except Unsupported as reason:
        raise Unsupported(f"{spec.label}: {reason}") from None
    formula = formula_of(entry, module, causal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if mixes_channels(formula, head.q, head.k):
            raise Unsupported(f"{spec.name} mixes the channels of a value; attnbench plot pattern {spec.name} shows it")
        return implied(formula, head.q, head.k)[0]


def _name(spec: Spec, causal: bool) -> str:
    entry = VARIANTS.get(spec.name)
    return entry.normalise(spec).label + OWN_FORM * bool(entry.claims(spec, causal=causal).own_form)


@in_style
def _draw(matrices: Sequence[Weights], about: str) -> Figure:
    inside = 3.0 if narrow() else 7.7
    columns = min(2 if narrow() else 3, len(matrices))
    side = min(2.8, (inside - _GAP * (columns - 1)) / columns)
    rows = -(-len(matrices) // columns)
    n, largest = matrices[0].matrix.shape[-1], float(matrices[0].matrix.max())
    signed = any((one.matrix < 0).any() for one in matrices)
    notes = [
        f"Colour: the weight on a log scale, from a hundredth of 1/{n}, which is what uniform weights are, to the "
        "largest of softmax. Below each name: the distance of the matrix from softmax's, ‖P - A‖ / ‖A‖.",
        "Orange: negative weights." if signed else "",
        own_form_note(one.name for one in matrices),
    ]
    lines = [about, "a row is a query, a column a key"]
    page = new_page(TITLE, lines, notes, height=1.0, room=rows * (side + _NAME + 0.1) + _KEY)
    for place, one in enumerate(matrices):
        row, column = divmod(place, columns)
        left, top = page.left + column * (side + _GAP), page.top - row * (side + _NAME + 0.1)
        page.write(left, top - 0.02, shorten(one.name, side, SMALL_SIZE), va="top")
        said = "exact" if place == 0 else f"distance {one.error:.2g}"
        page.write(left, top - 0.17, said, va="top", color=palette().faint)
        ax = page.axes(left, top - _NAME - side, side, side)
        draw_matrix(ax, by_size(one.matrix, largest), positive(), other=one.matrix < 0)
    _key(page, n, largest)
    return page.figure


def _key(page: Page, n: int, largest: float) -> None:
    """Draw a bar of the colour from nothing to full, with the weights at its ends and that of uniform weights."""
    decades = math.log10(max(largest * n, 2 * 10**-DECADES_BELOW)) + DECADES_BELOW
    marks = [(0.0, "0.01/n")]
    if decades > DECADES_BELOW + 0.7:
        marks.append((DECADES_BELOW / decades, "1/n"))
    marks.append((1.0, f"{largest:.2g}"))
    ax = page.axes(page.left + 0.25, page.bottom + 0.26, 2.4, 0.11)
    draw_matrix(ax, np.linspace(0.0, 1.0, 121)[None], positive())
    ax.set_xticks([place * 120 for place, _ in marks], [text for _, text in marks])
    ax.tick_params(length=2, pad=2, labelsize=SMALL_SIZE)
