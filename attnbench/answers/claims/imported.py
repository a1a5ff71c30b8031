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


def imported(path: str, text: str) -> tuple[dict[str, Any], dict[Place, int]]:
    """A table's plain data, whose note counts the rows left out, and the line of each row.

    Raises UsageError with file, line and remedy: a column that is missing, or a value that cannot be read.
    """
    rows, lines, line, left = list[dict[str, Any]](), dict[Place, int](), 1, 0
    read, form = (_of_cudnn, "cuDNN's benchmark") if path.endswith(".csv") else (_of_trace, "flashinfer-bench")
    try:
        for line, one in _each(path, text):
            if row := read(one):
                lines["rows", len(rows)] = line
                rows.append(row)
            else:
                left += 1
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, csv.Error) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        kinds = AttributeError | TypeError | RecursionError
        said = "a value is missing or of another kind" if isinstance(error, kinds) else said
        raise UsageError(f"{path}:{line}: {said}; give a file of {form}, or a table in YAML") from None
    note = f"{left} {_FORMS['left_out']}" if left else ""
    if not rows:
        raise UsageError(f"{path}:1: no number for attnbench ({note or 'it is empty'}); give another file")
    about = {"source": path, "note": note, "level": "operator", "unit": "ms", "baseline": rows[0]["row"]}
    return {**about, "rows": rows}, lines


def _each(path: str, text: str) -> Iterator[tuple[int, Any]]:
    if path.endswith(".csv"):
        reader = csv.DictReader(io.StringIO(text), strict=True)
        yield from ((reader.line_num, one) for one in reader)
    else:
        lines = map(json.dumps, json.loads(text)) if text.lstrip()[:1] == "[" else text.splitlines()
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _of_cudnn(one: Mapping[str, str]) -> dict[str, Any] | None:
    mask, window, keys = one["attn_mask"], one.get("sliding_window_size"), int(one["kv_seqlen"])
    left = any(str(one.get(name)).casefold() == "true" for name in ("skipped", "deterministic_bwd"))
    failed = str(one.get("success", True)).casefold() != "true"  # a spreadsheet writes TRUE
    if failed or left or one["data_type"] not in ("bfloat16", "float16"):
        return None
    if one["backend"] not in _FORMS["backends"] or mask not in ("no_mask", "top_left", "bottom_right"):
        raise ValueError(f"backend {one['backend']!r} or mask {mask!r} is unknown; write {any_of(_FORMS['backends'])}")
    at: dict[str, Any] = {axis: int(one[column]) for axis, column in _FORMS["axes"].items()}
    if keys != at["seq_len"]:
        at |= {"q_start": keys - at["seq_len"]} if mask == "bottom_right" else {"kv_len": keys}
    at |= {"dtype": one["data_type"], "causal": mask != "no_mask", "mask": f"sliding:{window}" if window else "none"}
    about = {"row": one["backend"], "variant": _FORMS["backends"][one["backend"]], "values": [float(one["time_ms"])]}
    about |= {"place": one.get("config_name") or "CSV", "device": one["gpu_name"].removeprefix("NVIDIA ")}
    return {**about, "at": at, "pass": _FORMS["passes"][one["profile_pass"]]}


def _of_trace(text: str) -> dict[str, Any] | None:
    one = json.loads(text)
    evaluation, axes = one.get("evaluation"), one["workload"]["axes"]
    found = re.match(_FORMS["definition"], one["definition"])
    alone = axes.get("batch_size", axes.get("len_indptr", 2) - 1) == 1  # of several the lengths are elsewhere
    if not evaluation or evaluation["status"] != "PASSED" or not found or not alone:
        return None
    kind, step, heads, values, width = found.groups()
    n = next((axes[name] for name in ("num_kv_indices", "total_q", "total_seq_len") if name in axes), None)
    at = {"batch": 1, "seq_len": n, "heads": int(heads), "head_dim": int(width), "dtype": "bfloat16", "causal": True}
    at |= {"kv_heads": int(values)} if kind == "gqa" else {}
    variant = "sdpa" if kind == "gqa" else f"gated-delta:expand=1,value_groups={int(values) // int(heads)}"
    about = {"row": one["solution"], "kernel": one["solution"], "variant": variant, "place": one["definition"]}
    about |= {"values": [evaluation["performance"]["latency_ms"]], "pass": _FORMS["passes"][step], "at": at}
    return {**about, "device": evaluation["environment"]["hardware"].removeprefix("NVIDIA").strip("_ ")}
