"""Tables of docs/swap.md, made from the committed swaps; ``python -m tests.docs.swap_rows`` draws their figures anew.

A folder that ``attnbench swap`` wrote becomes a committed one as ``results/reference/swap-MODEL``.
"""

from __future__ import annotations

import json
from statistics import median

from safetensors import safe_open

from attnbench.inputs.captured import MINILM, SMOLLM2
from attnbench.plots.style import save
from attnbench.pretrained.figure import draw_swap
from attnbench.pretrained.folder import SwapFolder
from attnbench.pretrained.question import EXACT
from attnbench.pretrained.row import Row
from attnbench.pretrained.summary import Between, Line, lines
from tests.docs.making import RUNS, points, rows, table

SURVIVES = 0.9
"""Share of the answers that must stay as they were; of a model that predicts nothing, of the nearest neighbours."""
ROUNDING = 1e-4
"""Error of a layer below which a variant computed exact attention."""
CAPTURED = {"swap-smollm2": SMOLLM2, "swap-minilm": MINILM}
"""Committed swap -> the q, k and v of the same model that are shipped."""


def swaps() -> list[str]:
    """The committed swaps."""
    return sorted(path.name for path in RUNS.glob("swap-*"))


def stored(name: str) -> list[Row]:
    """The rows of a committed swap, each as it was sealed; of a visit that was repeated, the last."""
    last = {(row.key, row.steps): row for row in SwapFolder(RUNS / name).rows()}
    return list(last.values())


def together(name: str, steps: int = 0) -> list[Line]:
    """What replaced all layers, the least damage first."""
    found = [one for one in lines(stored(name)) if one.layers == "all" and one.steps == steps and one.label != EXACT]
    return sorted(found, key=_damage)


def alone(name: str) -> dict[str, dict[int, Line]]:
    """Label -> layer -> what replaced this layer alone."""
    found: dict[str, dict[int, Line]] = {}
    for one in lines(stored(name)):
        if one.layers.isdecimal():
            found.setdefault(one.label, {})[int(one.layers)] = one
    most = max(map(len, found.values()), default=0)  # a swap that was stopped lacks layers of its last variant
    return {label: of for label, of in found.items() if len(of) == most}


def _damage(line: Line) -> float:
    """KL from the untouched model's answers; of a model that predicts nothing, the error of its last features."""
    return (line.hidden_error if line.kl is None else line.kl) or 0.0


def stays(line: Line) -> float:
    """Share of the answers, or else of the nearest neighbours, that are the untouched model's."""
    return (line.neighbours if line.top1_agreement is None else line.top1_agreement) or 0.0


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "–"
    return "0" if abs(value) < ROUNDING else f"{value:{form}}"


def _short(value: float) -> str:
    """``0.40``, ``0.012``, ``0`` where it is rounding."""
    return "0" if value < ROUNDING else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _above(between: Between | None) -> str:
    if between is None:
        return "–"
    low, middle, high = (round(end, 2) + 0.0 for end in (between.low, between.median, between.high))  # no -0.00
    return f"{middle:+.2f} ({low:.2f} to {high:.2f})"


def _of_all_layers(name: str) -> str:
    found = together(name)
    if any(one.loss is not None for one in found):
        head = ["all layers replaced", "loss over original", "accuracy", "agrees", "KL", "error of a layer"]
        cells = [
            [
                f"`{one.label}`",
                _above(one.over_original),
                _number(one.accuracy, ".3f"),
                _number(one.top1_agreement, ".2f"),
                _number(one.kl, ".2g"),
                _number(one.attention_error, ".2f"),
            ]
            for one in found
        ]
    else:
        head = ["all layers replaced", "cosine", "same neighbour", "error of the features", "error of a layer"]
        cells = [
            [
                f"`{one.label}`",
                _number(one.cosine, ".3f"),
                _number(one.neighbours, ".2f"),
                _number(one.hidden_error, ".2f"),
                _number(one.attention_error, ".2f"),
            ]
            for one in found
        ]
    return table(head, cells)


def _of_single_layers(name: str) -> str:
    found = alone(name)
    features = any(one.kl is None for of in found.values() for one in of.values())
    what = "error of the features" if features else "KL"
    same = "same neighbour" if features else "agrees"
    ordered = sorted(found, key=lambda label: median(map(_damage, found[label].values())))
    cells = []
    for label in ordered:
        of = found[label]
        worst = max(of, key=lambda layer: _damage(of[layer]))
        cells.append(
            [
                f"`{label}`",
                _short(median(map(_damage, of.values()))),
                f"{_short(_damage(of[worst]))}, layer {worst}",
                f"{median(map(stays, of.values())):.2f}",
                f"{min(map(stays, of.values())):.2f}",
            ]
        )
    head = ["one layer replaced", f"{what}, median layer", "largest", f"{same}, median layer", "least"]
    return table(head, cells)


def _of_captured_layers(name: str) -> str:
    """The error of each captured layer's answer beside the spread of its logits."""
    with safe_open(CAPTURED[name], framework="pt") as file:
        about = json.loads(file.metadata()["attnbench"])
    layers = about["layers"]
    spread = ["spread of the logits", *(f"{std:.1f}" for std in about["logit_std"])]
    found = {label: of for label, of in alone(name).items() if set(layers) <= of.keys()}
    errors = [
        [f"`{label}`, error", *(_number(of[layer].attention_error, ".2f") for layer in layers)]
        for label, of in sorted(found.items(), key=lambda one: one[1][layers[0]].attention_error or 0.0)
    ]
    return table(["", *(f"layer {layer}" for layer in layers)], [spread, *errors])


def _names(labels: list[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels) or "none"


def _says(name: str) -> str:
    """Which variants survive, and where in depth the damage is done."""
    of_all, single = together(name), alone(name)
    exact = [one.label for one in of_all if (one.attention_error or 0.0) < ROUNDING]
    of_all = [one for one in of_all if one.label not in exact]
    single = {label: of for label, of in single.items() if label not in exact}
    what = "nearest neighbours" if all(one.loss is None for one in of_all) else "answers"
    every = [one.label for one in of_all if stays(one) >= SURVIVES]
    texts = [f"All layers replaced, untrained: at least {SURVIVES:.0%} of the {what} stay with {_names(every)}."]
    for row in stored(name):
        if row.layers == "all" and not row.ok:
            texts.append(f"`{row.label}` cannot take part ({row.status}): {row.reason}")
    if exact:
        texts.insert(0, f"At this length {_names(exact)} computes exact attention, and says nothing of longer texts.")
    if single:
        one_layer = [label for label, of in single.items() if median(map(stays, of.values())) >= SURVIVES]
        whichever = [label for label, of in single.items() if min(map(stays, of.values())) >= SURVIVES]
        texts.append(
            f"One layer replaced, untrained: so many stay in the median layer with {_names(one_layer)}, and in every "
            f"layer with {_names(whichever)}."
        )
        layers = sorted({layer for of in single.values() for layer in of})
        half = len(layers) // 2
        first, last = (
            median(_damage(of[layer]) for of in single.values() for layer in part if layer in of)
            for part in (layers[:half], layers[half:])
        )
        worst = [max(of, key=lambda layer: _damage(of[layer])) for of in single.values()]
        most = max(set(worst), key=worst.count)
        texts.append(
            f"Depth: the median damage of one layer is {_short(first)} in the first half of the layers and "
            f"{_short(last)} in the second. The layer that hurts most is layer {most} for {worst.count(most)} of "
            f"{len(worst)} variants."
        )
    return points(*texts)


def _of_model(name: str) -> str:
    parts = [_of_all_layers(name), *([_of_single_layers(name)] if alone(name) else []), _says(name)]
    return "\n".join(parts)


@rows
def swap_smollm2() -> str:
    """The causal language model."""
    return _of_model("swap-smollm2")


@rows
def swap_smollm2_transfer() -> str:
    """The accuracy of the language model with and without its attention."""
    name = "swap-smollm2"
    base = next(row.accuracy_base for row in stored(name) if row.accuracy_base is not None)
    of = {one.label: one.accuracy for one in together(name)}
    return points(
        f"Share of the next tokens that the language model guesses: {base:.3f} as it was, "
        f"{of['performer']:.3f} with `performer` in all layers and {of['mean-value']:.3f} with `mean-value`, which "
        "attends to nothing. The paper on Performers reports 0.07 for its own model and text."
    )


@rows
def swap_minilm() -> str:
    """The encoder of sentences: all layers, each layer, and what the rows say."""
    return _of_model("swap-minilm")


@rows
def swap_minilm_spread() -> str:
    """The encoder's captured layers."""
    return _of_captured_layers("swap-minilm")


def draw(name: str) -> None:
    """Draw the figure of a committed swap into its folder."""
    folder = RUNS / name / "plots"
    folder.mkdir(exist_ok=True)
    save(draw_swap(stored(name)), folder / "swap", ("png",))


if __name__ == "__main__":
    for name in swaps():
        draw(name)
