"""The committed reference runs: command, machine, date, and what can be had of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from attnbench.files import stored
from generators.markdown import ROOT, code, page, table, text
from generators.reference_rows import RUNS, all_rows, environment

ORIGIN = {
    "catalogue-cpu": "attnbench run catalogue",
    "catalogue-h200": "attnbench run catalogue",
    "catalogue-models-cpu": "attnbench run catalogue -k 'smollm2 or minilm'",
    "claims-1-thread-cpu": "attnbench run claims -k parallel --threads 1",
    "claims-24-cpu": "attnbench run claims -k 'orders or score or head-counts or vocabulary or parallel'",
    "claims-cpu": "attnbench run claims",
    "compare-cpu": "attnbench compare performer linformer --n 1024..16384",
    "decoding-cpu": "attnbench run decoding",
    "founding-cpu": "attnbench run founding",
    "forms-h100": "attnbench run forms --rounds 1",
    "gpu-h200": "attnbench run gpu --min-time 0.1 -k '(causal or layers) and not training and n4096 "
    "and not (reformer or nsa or minference)'",
    "generate-cpu": "attnbench run generate",
    "headline-cpu": "attnbench run headline",
    "headline-long-cpu": "make bench-long",
    "heads-cpu": "attnbench run heads",
    "kernels-cpu": "attnbench run kernels",
    "linformer-cpu": "attnbench run linformer --cell-timeout 300",
    "long-cpu": "attnbench run results/reference/long-cpu/suite.yaml",
    "long-cpu-again": "attnbench run results/reference/long-cpu-again/suite.yaml",
    "lra-cpu": "attnbench run lra --rounds 5",
    "lra-h100": "attnbench run lra --rounds 1 -k training",
    "lra-h200": "attnbench run lra",
    "lra-models-cpu": "attnbench run lra -k 'smollm2 or minilm' --rounds 5",
    "operators-cpu": "attnbench run operators --rounds 2",
    "peers-cpu": "make peers",
    "peers-cpu-as-shipped": "attnbench run peers --set seq_len=4096 --process as-shipped --rounds 6",
    "positions-biases-cpu": "attnbench run positions -k biases/ --threads 1",
    "positions-cpu": "attnbench run positions",
    "prefill-cpu": "attnbench run prefill",
    "pretrained-cpu": "attnbench run pretrained",
    "recall-state-cpu": "attnbench run recall-state",
    "score-cpu": "attnbench run score",
    "score-rates": "attnbench run results/reference/score-rates/suite.yaml",
    "score-short-cpu": "attnbench score performer:features=32 linear linformer:rank=32 softmax --n 128 --rates 0.004",
    "selection-cpu": "attnbench run selection",
    "served-cpu": "attnbench run served --rounds 2",
    "share-cpu": "attnbench run share",
    "swap-listops": "make swap-listops SWAP_OPTIONS='--threads 1'",
    "swap-minilm": "make swap SWAP_OPTIONS='--threads 1'",
    "swap-smollm2": "make swap SWAP_OPTIONS='--threads 1'",
}
"""The command that made each run."""


def pages() -> Iterator[tuple[str, str]]:
    """One page for all of them."""
    parts = [
        "# The reference runs",
        "Every measured figure of this site is made from these runs, and a test compares them. They are in "
        "`results/reference/` of the repository, with every raw sample. `suite.yaml` is the suite "
        "as it was run. The shipped suite of that name may have changed since.",
        "Files that end in `.xz` are compressed: `attnbench` and pandas read them as they are, `xz -dk FILE` unpacks "
        "one. `attnbench plot results/reference/RUN` draws the figures of a run, also those that no page shows.",
    ]
    for folder in sorted(path for path in RUNS.iterdir() if path.is_dir()):
        parts += [f"## {folder.name}", table(["", ""], _facts(folder.name))]
        files = sorted(folder.glob("*.csv*"))
        files += [path for path in (folder / "suite.yaml", folder / "environment.json") if path.exists()]
        links = [f"{{download}}`{path.name} <../../{path.relative_to(ROOT).as_posix()}>`" for path in files]
        parts.append(f"Files: {', '.join(links)}.")
        parts += [
            f"![Figure {path.stem} of {folder.name}](../../{path.relative_to(ROOT).as_posix()})"
            for path in sorted((folder / "plots").glob("*.svg"))
        ]
    yield "reference/runs.md", page(*parts)


def _facts(name: str) -> list[list[str]]:
    known = environment(name)
    rows = [["Command", code(ORIGIN[name])]]
    if (file := stored(RUNS / name / "swap.csv")).exists():
        frame = pd.read_csv(file)
        ended = ", ".join(f"{count} {status}" for status, count in frame["status"].value_counts().items())
        rows += [
            ["Date", str(known["started_at"])[:10]],
            ["Model", code(known["model"])],
            ["Windows", f"{known['windows']} of {known['length']} tokens"],
            ["torch", text(str(frame["torch_version"].iloc[0]))],
            ["Rows", ended],
        ]
    elif known:
        machine: dict[str, Any] = dict(known["environment"])  # type: ignore[call-overload]
        processor = machine.get("gpu") or machine.get("processor")
        cores = f", {known['threads']} threads" if machine.get("device") == "cpu" else ""
        frame = all_rows(name)
        ended = ", ".join(f"{count} {status}" for status, count in frame["status"].value_counts().items())
        rows += [
            ["Date", str(known["started_at"])[:10]],
            ["Machine", text(f"{processor}{cores}, {machine.get('system', '')}")],
            ["torch", text(f"{machine['torch']}, Python {machine.get('python', '')}")],
            ["Rows", ended],
        ]
    return rows
