"""Tables of docs/swap.md, made from the committed swaps; ``python -m tests.docs.swap_rows`` draws their figures anew.

A folder that ``attnbench swap`` wrote becomes a committed one as ``results/reference/swap-MODEL``. That of the command
at the top of the page lies beside what it printed.

Whatever the page concludes from rows is concluded here, so that other rows change it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from attnbench.catalogue.inputs.captured_qkv import MINILM, SMOLLM2, describe
from attnbench.cli.capture import over_heads
from attnbench.figures.kit.style import save
from attnbench.figures.swap import draw_swap
from attnbench.measure.statistics import median_interval
from attnbench.results.read import read_results
from attnbench.results.store import RunFolder
from attnbench.results.swaps import EXACT, MEAN_VALUE, Between, Row, SwapLine, lines
from attnbench.suite.cell import UNTOUCHED
from tests.docs.making import HERE, RUNS, points, rows, table

SURVIVES = 0.9
"""Share of the answers that must stay as they were; of a model that predicts nothing, of the nearest neighbours."""
ROUNDING = 1e-4
"""Error of a layer below which a variant computed exact attention."""
CAPTURED = {"swap-smollm2": SMOLLM2, "swap-minilm": MINILM}
"""Committed swap -> the q, k and v of the same model that are shipped."""
PRINTED = "printed"
"""The swap at the top of the page."""
FOLDERS = {PRINTED: HERE / "docs/printed/swap"}
CONTROLS = (MEAN_VALUE, UNTOUCHED)


def swaps() -> list[str]:
    """The committed swaps of ``results/reference``."""
    return sorted(path.name for path in RUNS.glob("swap-*"))


def stored(name: str) -> list[Row]:
    """The rows of a committed swap, each as it was sealed; of a visit that was repeated, the last."""
    return [row.to_json() for row in RunFolder(FOLDERS.get(name, RUNS / name)).records().values()]


def together(name: str, steps: int = 0) -> list[SwapLine]:
    """What replaced all layers, the least damage first."""
    found = [one for one in lines(stored(name)) if one.replaced == "all" and one.steps == steps]
    return sorted((one for one in found if one.label not in (EXACT, UNTOUCHED)), key=_damage)


def alone(name: str) -> dict[str, dict[int, SwapLine]]:
    """Label -> layer -> what replaced this layer alone."""
    found: dict[str, dict[int, SwapLine]] = {}
    for one in lines(stored(name)):
        if one.alone:
            found.setdefault(one.label, {})[int(one.replaced)] = one
    most = max(map(len, found.values()), default=0)  # a swap that was stopped lacks layers of its last variant
    return {label: of for label, of in found.items() if len(of) == most}


def _damage(line: SwapLine) -> float:
    """KL from the untouched model's answers; of a model that predicts nothing, the error of its last features."""
    return (line.hidden_error if line.kl is None else line.kl) or 0.0


def stays(line: SwapLine) -> float:
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
                _number(one.feature_cosine, ".3f"),
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
    """How sharp the attention of each captured layer is, and the error of each variant on it."""
    about = describe(CAPTURED[name]).about
    layers, spread = about["layers"], dict(zip(about["layers"], map(median, about["logit_std"]), strict=True))
    keys = dict(zip(layers, map(median, about["attention_perplexity"]), strict=True))
    sharp = [
        ["spread of the logits", *(over_heads(of, 1) for of in about["logit_std"])],
        ["keys that a query attends to", *(over_heads(of, 0) for of in about["attention_perplexity"])],
    ]
    found = {label: of for label, of in alone(name).items() if set(layers) <= of.keys()}
    errors = {label: [of[layer].attention_error or 0.0 for layer in layers] for label, of in found.items()}
    cells = [
        [f"`{label}`, error", *(_number(error, ".2f") for error in of)]
        for label, of in sorted(errors.items(), key=lambda one: one[1][0])
    ]
    texts = [keys_and_spread(spread, keys)]
    approximate = {label: dict(zip(layers, of, strict=True)) for label, of in errors.items() if max(of) >= ROUNDING}
    if approximate:
        texts.append(errors_and_spread(spread, approximate))
    head = ["median head (least to greatest)", *(f"layer {layer}" for layer in layers)]
    return table(head, [*sharp, *cells]) + "\n" + points(*texts)


def keys_and_spread(spread: dict[int, float], keys: dict[int, float]) -> str:
    """Whether the layers whose logits spread more are those with fewer keys."""
    order = sorted(spread, key=spread.__getitem__)
    if all(keys[a] > keys[b] for a, b in pairwise(order)):
        return "The wider the logits of the median head spread, the fewer keys a query attends to."
    return "The layers with a wider spread in the median head are not those in which a query attends to fewer keys."


def errors_and_spread(spread: dict[int, float], errors: dict[str, dict[int, float]]) -> str:
    """Which variants have errors that go with the spread of a layer's logits."""
    order = sorted(spread, key=spread.__getitem__)
    rising, falling, neither = list[str](), list[str](), list[str]()
    for label, of in errors.items():
        steps = [of[b] - of[a] for a, b in pairwise(order)]
        (rising if min(steps) > 0 else falling if max(steps) < 0 else neither).append(label)
    parts = ((rising, "rises with that spread"), (falling, "falls"), (neither, "does neither"))
    said = "; ".join(f"it {what} for {_names(labels)}" for labels, what in parts if labels)
    return f"The error of {len(errors)} variants, from the layer of the least spread to that of the widest: {said}."


def _names(labels: Sequence[str]) -> str:
    """``a``, `a` and `b`, `a`, `b` and `c`."""
    quoted = [f"`{label}`" for label in labels]
    return " and ".join([*([", ".join(quoted[:-1])] if len(quoted) > 1 else []), *quoted[-1:]])


def keep(labels: Sequence[str], what: str, where: str) -> str:
    """``No approximation keeps 90% of the answers.``, or which ones do."""
    share = f"{SURVIVES:.0%} of the {what}"
    if not labels:
        return f"{where}, no approximation keeps {share}."
    return (
        f"{where}, {_names(labels)} {'keeps' if len(labels) == 1 else 'keep'} {share}, and no other approximation does."
    )


def no_better(name: str, labels: Sequence[str], steps: int = 0) -> list[str]:
    """Which of these do at least as much damage as ``mean-value``, in all layers.

    Losses are compared in pairs of windows: a variant is better where the 95 % interval of the median difference lies
    below 0. A model that predicts nothing has the error of its last features.
    """
    found = {
        row["label"]: row
        for row in stored(name)
        if row["replaced"] == "all" and row["tuned"] == steps and row["status"] == "ok"
    }
    nothing = found[MEAN_VALUE]

    def better(row: Row) -> bool:
        if not row["window_losses"]:
            return (row["hidden_error"] or math.inf) < (nothing["hidden_error"] or 0.0)
        pairs = zip(json.loads(row["window_losses"]), json.loads(nothing["window_losses"]), strict=True)
        interval = median_interval([a - b for a, b in pairs])
        return interval is not None and interval[1] < 0

    return [label for label in labels if not better(found[label])]


def _says(name: str) -> str:
    """Which variants survive, which are no better than no attention, and where in depth the damage is done."""
    of_all, single = together(name), alone(name)
    exact = [one.label for one in of_all if (one.attention_error or 0.0) < ROUNDING]
    of_all = [one for one in of_all if one.label not in (*exact, *CONTROLS)]
    single = {label: of for label, of in single.items() if label not in (*exact, *CONTROLS)}
    features = all(one.loss is None for one in of_all)
    what = "nearest neighbours" if features else "answers"
    texts = [
        f"`{one}` is exact at this length, so no line below counts it; of longer texts its row says nothing."
        for one in exact
    ]
    for row in stored(name):
        if row["replaced"] == "all" and row["status"] != "ok":
            texts.append(f"`{row['label']}` cannot take part ({row['status']}): {row['reason']}")
    texts.append(keep([one.label for one in of_all if stays(one) >= SURVIVES], what, "With all layers replaced"))
    texts.append(f"Of the approximations, {_names([of_all[0].label])} does the least damage.")
    if lost := no_better(name, [one.label for one in of_all]):
        texts.append(f"No better than `{MEAN_VALUE}`, which attends to nothing: {_names(lost)}.")
    if far := [one.label for one in of_all if (one.attention_error or 0.0) > 1]:
        texts.append(f"The error of a layer is above 1, where an answer of zeros would be nearer, with {_names(far)}.")
    against = "the error of the features" if features else "the KL"
    from scipy.stats import spearmanr

    order = spearmanr([one.attention_error for one in of_all], [_damage(one) for one in of_all]).statistic
    texts.append(
        f"The rank correlation between the error of a layer and {against} is {order:.2f} over these {len(of_all)} "
        "approximations."
    )
    return points(*texts, *(_of_depth(single, what) if single else ()))


def _of_depth(single: dict[str, dict[int, SwapLine]], what: str) -> list[str]:
    median_layer = [label for label, of in single.items() if median(map(stays, of.values())) >= SURVIVES]
    every_layer = [label for label, of in single.items() if min(map(stays, of.values())) >= SURVIVES]
    layers = sorted({layer for of in single.values() for layer in of})
    half = len(layers) // 2
    first, last = (
        median(_damage(of[layer]) for of in single.values() for layer in part if layer in of)
        for part in (layers[:half], layers[half:])
    )
    worst = [max(of, key=lambda layer: _damage(of[layer])) for of in single.values()]
    most = max(sorted(set(worst)), key=worst.count)
    return [
        keep(median_layer, what, "With one layer replaced, and in the median layer"),
        keep(every_layer, what, "With one layer replaced, and whichever it is"),
        f"The median damage of one layer is {_short(first)} in the first half of the layers and {_short(last)} in the "
        f"second. Layer {most} is the most harmful one for {worst.count(most)} of the {len(worst)} approximations.",
    ]


def _repairs(name: str) -> list[str]:
    """What training took back, and which variants end no better than ``mean-value``; empty without training."""
    last = max(one.steps for one in lines(stored(name)))
    found = {one.label: one.repaired for one in together(name, last) if one.repaired is not None} if last else {}
    if MEAN_VALUE not in found:
        return []
    order = sorted(found, key=lambda label: -found[label])
    same = no_better(name, [label for label in order if label not in CONTROLS], last)
    shares = ", ".join(
        f"{found[label]:.0%} with `{label}`" for label in order if found[label] > 0 and label not in same
    )
    texts = [f"Share of the damage that {last} steps repair: {shares}."] if shares else []
    if none := [label for label in order if found[label] <= 0]:
        texts.append(f"{last} steps repair nothing with {_names(none)}.")
    if same:
        texts.append(
            f"After {last} steps, no better than `{MEAN_VALUE}`, in which no attention is left to recover: "
            f"{_names(same)}."
        )
    return texts


def _of_model(name: str) -> str:
    of = stored(name)[0]
    one = "" if of["loss"] is not None else f"; one window is a share of {1 / of['windows']:.2f}"
    heading = f"On {of['windows']} windows of {of['seq_len']} tokens{one}.\n"
    parts = [heading, _of_all_layers(name), *([_of_single_layers(name)] if alone(name) else []), _says(name)]
    return "\n".join([*parts, *([points(*repaired)] if (repaired := _repairs(name)) else [])])


@rows
def swap_printed() -> str:
    """What the printed swap says."""
    labels = [one.label for one in together(PRINTED) if one.label not in CONTROLS]
    lost = no_better(PRINTED, labels)
    texts = []
    for said, of in (
        (f"Untrained, no better than `{MEAN_VALUE}`, which attends to nothing", lost),
        (f"Untrained, better than `{MEAN_VALUE}`", [label for label in labels if label not in lost]),
    ):
        texts += [f"{said}: {_names(of)}."] if of else []
    return points(*texts, *_repairs(PRINTED))


@rows
def swap_listops() -> str:
    """What a longer training of the small encoder repairs, beside the control that was trained as long."""
    name = "swap-listops"
    steps = sorted({one.steps for one in lines(stored(name))})
    after = {at: {one.label: one for one in together(name, at)} for at in steps}
    control = {one.steps: one.over_original for one in lines(stored(name)) if one.label == UNTOUCHED}
    head = ["all layers replaced", "untrained", *(f"{at} steps" for at in steps[1:]), "repaired"]
    order = sorted(after[steps[-1]].values(), key=lambda one: one.over_control.median if one.over_control else math.inf)
    cells = [
        [
            f"`{last.label}`",
            _above(after[0][last.label].over_original),
            *(_above(after[at][last.label].over_control) for at in steps[1:]),
            f"as `{MEAN_VALUE}`" if last.as_trivial else _number(last.repaired, ".0%"),
        ]
        for last in order
    ]
    shown = table(head, [*cells, [f"`{UNTOUCHED}`, over the original", *(_above(control[at]) for at in steps), "–"]])
    return shown + "\n" + points(*_after_long_training(order, steps[-1]), *_repairs(name))


def _after_long_training(order: Sequence[SwapLine], steps: int) -> list[str]:
    """Which variants end with the control, and which stay apart from it; a variant is apart by its whole interval."""
    found = [(one.label, one.over_control) for one in order if one.label not in CONTROLS and one.over_control]
    level = [label for label, over in found if over.low <= 0]
    apart = [label for label, over in found if over.low > 0]
    texts = []
    if level:
        texts.append(f"After {steps} steps, not told from the model that was left whole and trained as long: ")
        texts[-1] += f"{_names(level)}."
    if apart:
        texts.append(f"After {steps} steps still worse than that model: {_names(apart)}.")
    return texts


@rows
def swap_smollm2() -> str:
    """The causal language model."""
    return _of_model("swap-smollm2")


@rows
def swap_smollm2_transfer() -> str:
    """The accuracy of the language model with and without its attention, and what training gives back."""
    name = "swap-smollm2"
    base = next(row["accuracy_base"] for row in stored(name) if row["accuracy_base"] is not None)
    of = {one.label: one.accuracy for one in together(name)}
    texts = [
        f"Untrained: the language model guesses {base:.3f} of the next tokens as it was, "
        f"{of['performer']:.3f} with `performer` in all layers and {of[MEAN_VALUE]:.3f} with `{MEAN_VALUE}`, which "
        "attends to nothing. The paper on Performers reports 0.07 for its own model and text."
    ]
    small = "the small model at the top of this page"
    for trained, model in ((PRINTED, small), ("swap-listops", small), (name, "the language model")):
        after = {one.label: one for one in together(trained, max(one.steps for one in lines(stored(trained))))}
        ours, nothing = (after[label].repaired if label in after else None for label in ("performer", MEAN_VALUE))
        if ours is not None and nothing is not None:
            more = "more than" if ours > nothing else "no more than"
            texts.append(
                f"Trained: in {model}, {after['performer'].steps} steps take back {ours:.0%} of what `performer` cost. "
                f"That is {more} the {nothing:.0%} with `{MEAN_VALUE}`."
            )
    return points(*texts)


@rows
def swap_minilm() -> str:
    """The encoder of sentences: all layers, each layer, and what the rows say."""
    return _of_model("swap-minilm")


@rows
def swap_minilm_spread() -> str:
    """The encoder's captured layers."""
    return _of_captured_layers("swap-minilm")


@rows
def swap_smollm2_spread() -> str:
    """The language model's captured layers."""
    return _of_captured_layers("swap-smollm2")


def draw(name: str) -> None:
    """Draw the figure of a committed swap into its folder; that of the printed one beside the page."""
    stem = HERE / "docs/swap" if name == PRINTED else RUNS / name / "plots/swap"
    save(draw_swap(read_results(FOLDERS.get(name, RUNS / name))), stem, ("svg",))


if __name__ == "__main__":
    for name in (PRINTED, *swaps()):
        draw(name)
