"""Results of other benchmarks as the rows of a table: cuDNN's CSV of attention, and traces of flashinfer-bench."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from attnbench.errors import UsageError, any_of
from attnbench.suite.messages import Place

_FORMS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("imported.yaml").read_text("utf-8"))
"""Names in those files, and what they are here."""


def imported(path: str, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """A table's plain data, whose note tells what was left out, and the line of each row.

    Raises UsageError with file, line and remedy: a column that is missing, or a value that cannot be read.
    """
    rows, lines, line, left = list[dict[str, Any]](), dict[Place, int](), 1, 0
    form = "cuDNN's benchmark of attention" if path.endswith(".csv") else "flashinfer-bench"
    try:
        for line, one in _in_csv(text) if path.endswith(".csv") else _in_json(text):
            row = _of_cudnn(one) if path.endswith(".csv") else _of_trace(json.loads(one))
            left += row is None
            if row is not None:
                lines["rows", len(rows)] = line
                rows.append(row)
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}:{line}: {said}; give a file of {form}, or a table in YAML") from None
    note = f"{left} {_FORMS['left_out']}" if left else ""
    if not rows:
        raise UsageError(f"{path}:1: no number for attnbench ({note or 'it is empty'}); give another file")
    about = {"source": path, "note": note, "level": "operator", "unit": "ms", "baseline": rows[0]["row"]}
    return {**about, "rows": rows}, lines


def _in_csv(text: str) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    yield from ((reader.line_num, one) for one in reader)


def _in_json(text: str) -> Iterator[tuple[int, str]]:
    """A list of traces, or one a line."""
    lines = map(json.dumps, json.loads(text)) if text.lstrip()[:1] == "[" else text.splitlines()
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _of_cudnn(one: Mapping[str, str]) -> dict[str, Any] | None:
    mask, window, beyond = (
        one["attn_mask"],
        one.get("sliding_window_size"),
        int(one["kv_seqlen"]) - int(one["q_seqlen"]),
    )
    failed = one.get("success", "True") != "True" or one.get("skipped") == "True"
    if failed or one["data_type"] not in ("bfloat16", "float16") or one.get("deterministic_bwd") == "True":
        return None
    if one["backend"] not in _FORMS["backends"] or mask not in ("no_mask", "top_left", "bottom_right"):
        raise ValueError(
            f"unknown backend {one['backend']!r} or mask {mask!r}; backends are {any_of(_FORMS['backends'])}"
        )
    at: dict[str, Any] = {axis: int(one[column]) for axis, column in _FORMS["axes"].items()}
    at |= {} if not beyond else {"q_start": beyond} if mask == "bottom_right" else {"kv_len": int(one["kv_seqlen"])}
    at |= {"dtype": one["data_type"], "causal": mask != "no_mask", "mask": f"sliding:{window}" if window else "none"}
    about = {
        "row": one["backend"],
        "variant": _FORMS["backends"][one["backend"]],
        "place": one.get("config_name") or "CSV",
    }
    device, values = one["gpu_name"].removeprefix("NVIDIA "), [float(one["time_ms"])]
    return {**about, "at": at, "pass": _FORMS["passes"][one["profile_pass"]], "device": device, "values": values}


def _of_trace(one: Mapping[str, Any]) -> dict[str, Any] | None:
    evaluation, found, axes = (
        one.get("evaluation"),
        re.match(_FORMS["definition"], one["definition"]),
        one["workload"]["axes"],
    )
    alone = axes.get("batch_size", axes.get("len_indptr", 2) - 1) == 1  # of several the lengths are elsewhere
    if not evaluation or evaluation["status"] != "PASSED" or not found or not alone:
        return None
    kind, step, heads, values, width = found.groups()
    n = next((axes[name] for name in ("num_kv_indices", "total_q", "total_seq_len") if name in axes), None)
    at = {"batch": 1, "seq_len": n, "heads": int(heads), "head_dim": int(width), "dtype": "bfloat16", "causal": True}
    variant = f"gated-delta:expand=1,value_groups={int(values) // int(heads)}"
    if kind == "gqa":
        variant, at = "sdpa", at | {"kv_heads": int(values)}
    device = str(evaluation["environment"]["hardware"]).removeprefix("NVIDIA").strip("_ ")
    about = {"row": one["solution"], "kernel": one["solution"], "place": one["definition"], "device": device}
    latency = [evaluation["performance"]["latency_ms"]]
    return {**about, "variant": variant, "at": at, "pass": _FORMS["passes"][step], "values": latency}
