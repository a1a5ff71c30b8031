"""``attnbench capture MODEL``: q, k and v of a trained model as a file for ``inputs: file:...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from attnbench.cli.options import TEXT, AsJson, Count, Device, File, ModelName, Threads, WindowLength
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import refuse_files
from attnbench.errors import UsageError
from attnbench.text import quantity

if TYPE_CHECKING:
    from attnbench.catalogue.inputs.captured_qkv import CapturedFile


def capture(
    model: ModelName,
    text: Annotated[Path | None, TEXT] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="all, or numbers such as 0,7; default the first, the middle, the last."),
    ] = None,
    length: WindowLength = None,
    windows: Annotated[int, Count(min=1, max=100_000, help="Windows of text.")] = 4,
    heads: Annotated[int | None, Count(min=1, help="The first so many heads of each layer; default all.")] = None,
    gates: Annotated[
        bool, typer.Option("--gates", help="Take the layers that are recurrences, with their gates.")
    ] = False,
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], typer.Option(help="Data type in the file.")
    ] = "float16",
    device: Device = "auto",
    threads: Threads = None,
    out: Annotated[Path, File(help="File to write.")] = Path("qkv.safetensors"),
    as_json: AsJson = False,
) -> None:
    """Write q, k and v as a trained model's attention sees them, to measure errors on them.

    They are taken after rotary embeddings, with the model's scale folded into q. The file holds (S, L, H, N, D):
    windows, layers, heads, positions, width; where heads share keys and values, k and v have fewer. A suite reads it
    as inputs: file:path=qkv.safetensors.

    With --gates the layers are those with a gated delta rule, Kimi's or the state space of Mamba-2, counted from 0, and
    the file has what their kernel gets: q, k, v, log2_decay and beta, for gated-delta, kda or ssd at level operator.
    """
    of_model = (Path(model) / name for name in ("config.json", "model.safetensors", "tokenizer.json"))
    refuse_files(out, inputs=(text, model, *of_model))

    from attnbench.harness.outside.capture import TakeCapture, take_capture
    from attnbench.harness.swap.swap_question import parse_layers
    from attnbench.measure.machine import default_threads, resolve_device
    from attnbench.models.pretrained.capture import Wish
    from attnbench.units import format_bytes

    wanted = parse_layers(layers) if layers is not None else None
    if wanted is not None and wanted.each:
        raise UsageError(f"--layers {layers!r}: each means nothing here; write all, or numbers such as 0,7")
    some, every = (wanted.some, wanted.whole) if wanted is not None else ((), False)
    wish = Wish(some, windows, heads, dtype, every, gates)
    request = TakeCapture(model, text, length, wish, out, resolve_device(device))
    found = take_capture(request, threads or default_threads())
    if as_json:
        sizes = {"shape": list(found.shape), "kv_heads": found.v_shape[2]}
        console.data({"file": str(out), **sizes, "left_out": list(found.left_out), **found.about})
        return
    _, L, H, N, D = found.shape
    _print_layers(found.about, f"{model}, {found.about['text']}")
    for line in found.left_out:
        console.warning(line)
    there = (
        f"{quantity(windows, 'window')}, {quantity(L, 'layer')}, {quantity(H, 'head')} of {D}, {quantity(N, 'token')}"
    )
    console.line(f"{out}: {there}, {format_bytes(found.bytes)}")
    _print_use(out, found.shape, found.v_shape, found.about["causal"])


_FACTS = ("model", "task", "text", "made_by")


def _print_layers(about: Mapping[str, Any], title: str) -> None:
    found = {name: (layers, 3) for name, layers in about.get("gates", {}).items()} or {
        "logit std": (about["logit_std"], 2),
        "keys attended to": (about["attention_perplexity"], 1),
    }
    cells = ([over_heads(one, places) for one in layers] for layers, places in found.values())
    rows = [list(row) for row in zip(map(str, about["layers"]), about["kinds"], *cells, strict=True)]
    kind = "operator" if about.get("gates") else "sees"
    console.table(["layer", kind, *found], rows, right=["layer", *found], title=title)
    console.note(f"{', '.join(found)}: of the median head, and of the heads with the least and the most")


def print_described(file: Path, found: CapturedFile) -> None:
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
        _print_layers(about, f"\n{file}")
    _print_use(file, q, v, about.get("causal"))


def _print_use(file: Path, q: Sequence[int], v: Sequence[int], causal: object) -> None:
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
