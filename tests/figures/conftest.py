"""Tables that imitate real runs: a Long Range Arena run, a Performer map, a Linformer table."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from attnbench.figures.kit.style import notes_of, texts
from attnbench.results.record import COLUMNS, SCHEMA_VERSION

Rows = list[dict[str, Any]]

# label: family, target, seconds at n = 1024 of the attention alone, power of n, bytes at n = 1024, power of n,
# relative error on listops inputs (None: no error of its own), claimed powers
LRA: dict[str, tuple[str, str, float, float, float, float, float | None, float, float]] = {
    "softmax": ("exact", "softmax", 0.060, 2.0, 60e6, 2.0, 2e-7, 2, 2),
    "chunked": ("exact", "softmax", 0.058, 1.97, 9e6, 1.05, 2e-7, 2, 1),
    "sdpa": ("exact", "softmax", 0.021, 1.9, 6e6, 1.0, 2e-7, 2, 1),
    "identity": ("reference", "other", 0.0005, 1.0, 3e6, 1.0, 1.31, 1, 1),
    "mean-value": ("reference", "softmax", 0.0009, 1.0, 3e6, 1.0, 0.62, 1, 1),
    "oracle-lowrank": ("reference", "softmax", 0.9, 2.7, 70e6, 2.0, 0.21, 3, 2),
    "oracle-topk": ("reference", "softmax", 0.12, 2.1, 90e6, 2.0, 0.09, 2, 2),
    "local": ("fixed pattern", "softmax", 0.014, 1.02, 9e6, 1.0, 0.92, 1, 1),
    "sparse": ("fixed pattern", "softmax", 0.022, 1.45, 14e6, 1.5, 0.71, 1.5, 1.5),
    "longformer": ("fixed pattern", "softmax", 0.019, 1.04, 11e6, 1.0, 0.83, 1, 1),
    "bigbird": ("fixed pattern", "softmax", 0.026, 1.05, 15e6, 1.0, 0.66, 1, 1),
    "reformer": ("learned pattern", "softmax", 0.048, 1.08, 30e6, 1.0, 0.74, 1, 1),
    "sinkhorn": ("learned pattern", "other", 0.020, 1.06, 12e6, 1.0, 1.1, 1, 1),
    "synthesizer": ("synthetic", "learned", 0.045, 2.0, 50e6, 2.0, 0.99, 2, 2),
    "linformer": ("low rank", "learned", 0.010, 1.0, 6e6, 1.0, 0.97, 1, 1),
    "linear": ("kernel", "other", 0.006, 1.0, 5e6, 1.0, 0.6, 1, 1),
    "performer": ("kernel", "softmax", 0.016, 1.0, 12e6, 1.0, 0.33, 1, 1),
    "performer:features=64": ("kernel", "softmax", 0.008, 1.0, 7e6, 1.0, 0.55, 1, 1),
}


def row(label: str, **columns: Any) -> dict[str, Any]:
    """One row with every column; numbers None unless given."""
    name, _, rest = label.partition(":")
    options = dict(part.split("=") for part in rest.split(",")) if rest else {}
    family, target, *_, time_power, memory_power = LRA.get(label, LRA.get(name, ("kernel", "softmax", 1, 1)))
    base: dict[str, Any] = dict.fromkeys(COLUMNS)
    base |= {
        "suite": "lra", "sweep": "speed", "cell_id": "0" * 16, "variant": name, "label": label,
        "options": json.dumps({key: int(value) if value.isdigit() else value for key, value in options.items()}),
        "family": family, "target": target, "cost": "O(n·d)", "claimed_time_exponent": time_power,
        "claimed_memory_exponent": memory_power, "level": "operator", "pass": "forward", "batch": 1, "heads": 4,
        "head_dim": 64, "seq_len": 1024, "causal": False, "bias": "none", "padding": 0.0, "dtype": "float32",
        "architecture": "encoder", "added_tokens": 0, "query_stride": 1,
        "device": "cpu", "inputs": "gaussian", "compile": False, "mask": "none", "q_start": 0, "sink": "none",
        "new_tokens": 0, "kept_prefix": 0, "state_dtype": "auto", "launch": "auto", "launched": "", "launch_note": "",
        "replaced": "all", "tuned": 0, "train": "all",
        "seed": 0, "status": "ok", "reason": "", "compiled": False, "process": "tuned", "quick": False, "warnings": "",
        "machine_id": "3f9c2a71", "torch_version": "2.13.0", "threads": 2, "method_version": 1,
        "schema_version": SCHEMA_VERSION, "started_at": "2026-11-20T09:40:00", "error_kind": "",
        "task": "", "kernel": "", "own_form": "", "laws": "", "rel_error_steps": "", "positions": "",
        "own_error_note": "",
    }  # fmt: skip
    base |= columns
    base["kv_len"] = columns.get("kv_len", base["seq_len"])
    base["test_len"] = columns.get("test_len", base["seq_len"])
    base["v_dim"] = columns.get("v_dim", base["head_dim"])
    base["kv_heads"] = columns.get("kv_heads", base["heads"])
    base["qk_heads"] = columns.get("qk_heads", base["heads"])
    if base["time_median_s"]:
        base["time_ci_low_s"] = columns.get("time_ci_low_s", base["time_median_s"] * 0.97)
        base["time_ci_high_s"] = columns.get("time_ci_high_s", base["time_median_s"] * 1.04)
        base["examples_per_s"] = base["batch"] / base["time_median_s"]
        base["tokens_per_s"] = base["examples_per_s"] * base["seq_len"]
    return base


def failed(status: str, reason: str, label: str, **columns: Any) -> dict[str, Any]:
    return row(label, status=status, reason=reason, **columns)


def table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """A frame with the dtypes that read_results gives."""
    rows = list(rows)
    columns = {name: [row.get(name) for row in rows] for name in COLUMNS}
    frame = pd.DataFrame({name: column_of(cells) for name, cells in columns.items()})
    return frame.copy()  # with the columns of one dtype together


def column_of(cells: list[Any]) -> pd.Series[Any] | np.ndarray:
    if any(isinstance(cell, str) for cell in cells):
        return pd.Series(cells, dtype=object)
    return np.array(cells, dtype=float if None in cells else None)


def lra_rows(lengths: Iterable[int] = (1024, 2048, 3072, 4096), limit: float = math.inf, **columns: Any) -> Rows:
    """Speed rows of a four-layer model in training, then error rows of the operator."""
    rows: Rows = []
    for n in lengths:
        for label, (*_, seconds, power, size, growth, _error, _a, _b) in LRA.items():
            at = {"level": "model", "pass": "training", "seq_len": n, **columns}
            peak = 4 * (size * (n / 1024) ** growth + 22e6 * n / 1024)
            if peak > limit:
                rows.append(failed("oom", "needs more than the limit of 2.00 GiB", label, **at))
                continue
            time = 4 * (3 * seconds * (n / 1024) ** power + 0.05 * n / 1024)
            rows.append(row(label, **at, time_median_s=time, peak_bytes=peak))
    for inputs in ("gaussian:logit_std=2", "listops"):
        for label, (_, target, *_, error, _a, _b) in LRA.items():
            exact = LRA[label][0] == "exact"
            kind = "exact" if exact else {"softmax": "approximation", "other": "distance"}.get(target, "learned")
            rows.append(
                row(label, sweep="error", inputs=inputs, seq_len=1024, error_kind=kind, rel_error=error,
                    rel_error_std=error * 0.05, cosine=max(0.0, 1 - error**2 / 2), trivial_error=0.62, error_draws=5,
                    **columns)
            )  # fmt: skip
    return rows


def performer_rows(
    features: Iterable[int] = (16, 64, 256, 1024), stds: Iterable[float] = (0.25, 0.5, 1, 2, 4, 8)
) -> Rows:
    """Errors over features and logit std, three feature maps by two projections, and the reference lines."""
    rows: Rows = []
    for std in stds:
        at = {"suite": "performer", "sweep": "map", "inputs": f"gaussian:logit_std={std}", "seq_len": 2048}
        trivial = math.sqrt(1 - math.exp(-(std**2)))
        at |= {"error_kind": "approximation", "trivial_error": trivial, "error_draws": 15}
        for kernel, growth in (("positive", 0.9), ("trig", 2.1), ("hyperbolic", 0.75)):
            for projection, factor in (("orthogonal", 0.8), ("iid", 1.0)):
                for r in features:
                    label = f"performer:features={r},kernel={kernel},projection={projection}"
                    error = trivial * factor * 1.6 * math.exp(growth * (std - 0.5)) / math.sqrt(r / 16)
                    if kernel == "trig" and std == 8:
                        rows.append(failed("nonfinite", "output holds NaN or infinity", label, **at))
                    else:
                        rows.append(row(label, **at, rel_error=error, rel_error_std=0.1 * error))
        rows.append(row("mean-value", **at, rel_error=trivial))
        for rank in (64, 256):
            error = trivial * (0.6 if rank == 64 else 0.35) * min(1.0, 0.8 + std / 20)
            rows.append(row(f"oracle-lowrank:rank={rank}", **at, rel_error=error))
        rows.append(row("oracle-topk", **at, rel_error=3.8 / (1 + std**2.5)))
        rows.append(row("softmax", **at, rel_error=1e-7) | {"error_kind": "exact"})
        rows.append(row("linear", **at, rel_error=0.8) | {"error_kind": "distance"})
    return rows


def linformer_rows(
    ranks: Iterable[int] = (128, 256, 512, 1024, 2048),
    lengths: Iterable[int] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
) -> Rows:
    """Time and memory of softmax and of the Linformer at several ranks; softmax ends at 32768."""
    rows: Rows = []
    for n in lengths:
        at = {"suite": "linformer", "sweep": "table", "seq_len": n}
        if n > 16384:
            rows.append(failed("oom", "needs more than the limit of 12.0 GiB", "softmax", **at))
        else:
            rows.append(row("softmax", **at, time_median_s=4e-9 * n * n + 2e-6 * n, peak_bytes=16.0 * n * n))
        for r in ranks:
            label = f"linformer:rank={r}"
            if r > n:
                rows.append(failed("unsupported", "rank exceeds the number of keys", label, **at))
            else:
                rows.append(
                    row(label, **at, time_median_s=5e-9 * n * r + 3e-6 * n, peak_bytes=16.0 * n * r + 1500.0 * n)
                )
    return rows


class Run:
    """What the tests build tables from."""

    labels = tuple(LRA)
    row = staticmethod(row)
    failed = staticmethod(failed)
    table = staticmethod(table)
    lra_rows = staticmethod(lra_rows)
    performer_rows = staticmethod(performer_rows)
    linformer_rows = staticmethod(linformer_rows)


@pytest.fixture(autouse=True)
def _seldom_collected() -> Iterator[None]:
    """A figure is tens of thousands of objects, which are no garbage yet: to look takes a tenth of the time."""
    given = gc.get_threshold()
    gc.set_threshold(200_000, *given[1:])
    yield
    gc.set_threshold(*given)


@pytest.fixture(scope="session")
def run() -> type[Run]:
    return Run


@pytest.fixture(scope="session")
def lra() -> pd.DataFrame:
    return table(lra_rows())


@pytest.fixture(scope="session")
def performer() -> pd.DataFrame:
    return table(performer_rows())


@pytest.fixture(scope="session")
def linformer() -> pd.DataFrame:
    return table(linformer_rows())


def text_of(figure: Figure) -> str:
    """Everything written in a figure or in the file beside it, line breaks as spaces."""
    said = [text.get_text() for text in texts(figure)]
    drawn = "\n".join(said)
    said += [note for note in notes_of(figure) if note[:25] not in drawn]
    return "\n".join(text.replace("\n", " ") for text in said if text)


@pytest.fixture(scope="session")
def words() -> Callable[[Figure], str]:
    return text_of


def written(figure: Figure) -> Iterator[tuple[str, float, Bbox]]:
    """Everything that can be read: what it says, its size in points, its box in inches."""
    figure.draw_without_rendering()
    for text in texts(figure):
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
            yield text.get_text(), float(text.get_fontsize()), box


def faults_of(figure: Figure) -> list[str]:
    """What is too small to read, beyond the page, or on something else that is written."""
    found = list(written(figure))
    wide, tall = figure.get_size_inches()
    said = [f"{text!r} has {size} points" for text, size, _ in found if size < 6]
    for text, _, box in found:
        if box.x0 < 0 or box.x1 > wide or box.y0 < 0 or box.y1 > tall:
            said.append(f"{text!r} goes beyond the page")
    boxes = [(text, *map(float, box.extents)) for text, _, box in found]
    for (a, left, below, right, above), (b, west, south, east, north) in combinations(boxes, 2):
        if min(right, east) - max(left, west) > 0.02 and min(above, north) - max(below, south) > 0.02:
            said.append(f"{a!r} lies on {b!r}")
    return said


@pytest.fixture(scope="session")
def faults() -> Callable[[Figure], list[str]]:
    return faults_of
