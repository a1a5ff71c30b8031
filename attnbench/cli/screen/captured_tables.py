"""The facts in a file of captured q, k and v, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.cli.screen import console

if TYPE_CHECKING:
    from attnbench.catalogue.inputs.captured import Described

_FACTS = ("model", "task", "text", "made_by")


def print_layers(about: Mapping[str, Any], title: str) -> None:
    """Print the sharpness of each captured layer's attention: the median over its heads, with their range."""
    columns = ["layer", "sees", "logit std", "keys attended to"]
    rows = [
        [str(layer), kind, over_heads(std, 2), over_heads(keys, 1)]
        for layer, kind, std, keys in zip(
            *(about[name] for name in ("layers", "kinds", "logit_std", "attention_perplexity")), strict=True
        )
    ]
    console.table(columns, rows, right=["layer", "logit std", "keys attended to"], title=title)
    console.note("logit std, keys attended to: of the median head, and of the heads with the least and the most")


def print_described(file: Path, found: Described) -> None:
    """Print the shape of a file, its source, and the line for a suite."""
    about = found.about
    S, L, H, N, D = found.q
    K, M, E = found.v[2:]
    for name in _FACTS:
        if isinstance(about.get(name), str):
            console.line(f"{name.replace('_', ' ')}: {about[name]}")
    if not about:
        console.line("no metadata of attnbench capture")
    console.line(f"{S} windows, {L} layers, {H} heads of queries and {K} of keys, {N} queries, {M} keys of width {D}")
    if about.get("made_by") == "attnbench capture":
        print_layers(about, f"\n{file}")
    shared = f", kv_heads: {K}" * (K != H)
    wide = f", v_dim: {E}" * (E != D)
    lengths = f"seq_len: {N}" + f", kv_len: {M}" * (M != N)
    causal = f", causal: {str(about['causal']).lower()}" if isinstance(about.get("causal"), bool) else ""
    console.line(f"in a suite: inputs: file:path={file}, {lengths}, heads: {H}{shared}, head_dim: {D}{wide}{causal}")


def over_heads(values: float | list[float], places: int) -> str:
    """``2.41 (0.90 to 5.13)``: the median head, the least and the greatest."""
    from statistics import median

    if isinstance(values, float):  # a file of the first format has the mean alone
        return f"{values:.{places}f}"
    return f"{median(values):.{places}f} ({min(values):.{places}f} to {max(values):.{places}f})"
