"""``attnbench capture MODEL``: q, k and v of a trained model as a file for ``inputs: file:...``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from attnbench.cli.options import TEXT, AsJson, Count, Device, File, ModelName, Threads, WindowLength
from attnbench.cli.screen import console
from attnbench.cli.screen.outputs import refuse_files
from attnbench.errors import UsageError
from attnbench.text import quantity


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
    refuse_files(out)

    from attnbench.cli.screen.captured_tables import print_layers, print_use
    from attnbench.harness.outside.capture import TakeCapture, take_capture
    from attnbench.harness.swap.question import parse_layers
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
    print_layers(found.about, f"{model}, {found.about['text']}")
    for line in found.left_out:
        console.warning(line)
    there = (
        f"{quantity(windows, 'window')}, {quantity(L, 'layer')}, {quantity(H, 'head')} of {D}, {quantity(N, 'token')}"
    )
    console.line(f"{out}: {there}, {format_bytes(found.bytes)}")
    print_use(out, found.shape, found.v_shape, found.about["causal"])
