"""The facts in a file of captured q, k and v, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.cli.screen import console
from attnbench.text import quantity

if TYPE_CHECKING:
    from attnbench.catalogue.inputs.captured import Stored

_FACTS = ("model", "task", "text", "made_by")


def print_layers(about: Mapping[str, Any], title: str) -> None:
    """Print the sharpness of each captured layer's attention, or the means of its gates: the median over its heads,
    with their range."""
    found = {name: (layers, 3) for name, layers in about.get("gates", {}).items()} or {
        "logit std": (about["logit_std"], 2),
        "keys attended to": (about["attention_perplexity"], 1),
    }
    cells = ([over_heads(one, places) for one in layers] for layers, places in found.values())
    rows = [list(row) for row in zip(map(str, about["layers"]), about["kinds"], *cells, strict=True)]
    kind = "operator" if about.get("gates") else "sees"
    console.table(["layer", kind, *found], rows, right=["layer", *found], title=title)
    console.note(f"{', '.join(found)}: of the median head, and of the heads with the least and the most")


def print_described(file: Path, found: Stored) -> None:
    """Print the shape of a file, its source, and the line for a suite."""
    about = found.about
    q, v = found.sizes["q"], found.sizes["v"]
    (S, L, H, N, D), (K, M, _) = q, v[2:]
    for name in _FACTS:
        if isinstance(about.get(name), str):
            console.line(f"{name.replace('_', ' ')}: {about[name]}")
    if not about:
        console.line("no metadata of attnbench capture")
    gates = "".join(f", {gate} of width {width}" for gate, width in found.gates.items())
    sizes = f"{H} heads of queries and {K} of keys, {N} queries, {M} keys of width {D}"
    console.line(f"{quantity(S, 'window')}, {quantity(L, 'layer')}, {sizes}{gates}")
    if about.get("made_by") == "attnbench capture":
        print_layers(about, f"\n{file}")
    print_use(file, q, v, about.get("causal"))


def print_use(file: Path, q: Sequence[int], v: Sequence[int], causal: object) -> None:
    """Print the line for a suite that reads a file of these shapes."""
    _, _, H, N, D = q
    K, M, E = v[2:]
    shared = f", kv_heads: {K}" * (K != H)
    wide = f", v_dim: {E}" * (E != D)
    lengths = f"seq_len: {N}" + f", kv_len: {M}" * (M != N)
    said = f", causal: {str(causal).lower()}" if isinstance(causal, bool) else ""
    console.line(f"in a suite: inputs: file:path={file}, {lengths}, heads: {H}{shared}, head_dim: {D}{wide}{said}")


def over_heads(values: float | list[float], places: int) -> str:
    """``2.41 (0.90 to 5.13)``: the median head, the least and the greatest."""
    from statistics import median

    if isinstance(values, float):  # a file of the first format has the mean alone
        return f"{values:.{places}f}"
    return f"{median(values):.{places}f} ({min(values):.{places}f} to {max(values):.{places}f})"
