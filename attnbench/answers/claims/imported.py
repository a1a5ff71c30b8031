"""Results of other benchmarks as the rows of a table: cuDNN's CSV of attention, and traces of flashinfer-bench."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from attnbench.errors import UsageError, any_of
from attnbench.suite.messages import Place

_BACKENDS = {
    **{f"cudnn{end}": f"cudnn{end.replace('_', '-')}" for end in ("", "_oss")},
    **{f"flash_attention{end}": f"fa-{end[1:] or 2}" for end in ("", "_3", "_4")},
    **{f"pyt_{name}_attention": f"sdpa:backend={name}" for name in ("flash", "efficient")},
    "pyt_cudnn": "sdpa:backend=cudnn",
}
_AXES = {"batch": "batch_size", "seq_len": "q_seqlen", "heads": "num_q_heads", "kv_heads": "num_kv_heads"}
_AXES |= {"head_dim": "head_dim_qk", "v_dim": "head_dim_vo"}
_STEPS = {"fwd": "forward", "bwd": "backward", "both": "training", "prefill": "forward", "decode": "decode"}
_DEFINITION = re.compile(r"(gqa|gdn)_(?:paged_|ragged_)?(decode|prefill)(?:_causal)?_(?:h|qk)(\d+)_k?v(\d+)_d(\d+)")


def imported(path: str, text: str) -> tuple[dict[str, Any], dict[Place, int], list[str]]:
    """A table's plain data, the line of each row, and what was left out and why.

    Raises UsageError with file, line and remedy: a column that is missing, or a value that cannot be read.
    """
    rows, lines, left, line = list[dict[str, Any]](), dict[Place, int](), Counter[str](), 1
    of_cudnn = path.endswith(".csv")
    try:
        for line, one in _in_csv(text) if of_cudnn else _in_json(text):
            row = _of_cudnn(one) if of_cudnn else _of_trace(json.loads(one) if isinstance(one, str) else one)
            if isinstance(row, str):
                left[row] += 1
            else:
                lines["rows", len(rows)] = line
                rows.append(row)
    except (AttributeError, KeyError, TypeError, ValueError, csv.Error) as error:
        form = "cuDNN's benchmark of attention" if of_cudnn else "flashinfer-bench"
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}:{line}: {said}; give a file of {form}, or a table in YAML") from None
    told = [f"{count} left out: {reason}" for reason, count in left.items()]
    if not rows:
        raise UsageError(f"{path}:1: no number for attnbench ({'; '.join(told) or 'it is empty'}); give another file")
    about = {"source": path, "level": "operator", "unit": "ms", "baseline": rows[0]["row"]}
    return {**about, "rows": rows}, lines, told


def _in_csv(text: str) -> Iterator[tuple[int, Any]]:
    reader = csv.DictReader(io.StringIO(text), strict=True)
    for one in reader:
        yield reader.line_num, one


def _in_json(text: str) -> Iterator[tuple[int, Any]]:
    """One trace a line, as text; or a trace or a list of them over several lines."""
    if text.lstrip()[:1] == "[" or text.split("\n", 1)[0].rstrip()[-1:] != "}":
        whole = json.loads(text)
        yield from enumerate(whole if isinstance(whole, list) else [whole], 1)
    else:
        yield from ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _of_cudnn(one: Mapping[str, str]) -> dict[str, Any] | str:
    mask, window, beyond = (
        one["attn_mask"],
        one.get("sliding_window_size"),
        int(one["kv_seqlen"]) - int(one["q_seqlen"]),
    )
    if one.get("success", "True") != "True" or one.get("skipped") == "True":
        return "failed or skipped"
    if one["data_type"] not in ("bfloat16", "float16", "float32") or one.get("deterministic_bwd") == "True":
        return f"{one['data_type']}, deterministic: {one.get('deterministic_bwd')}"
    if one["backend"] not in _BACKENDS or mask not in ("no_mask", "top_left", "bottom_right"):
        raise ValueError(f"unknown backend {one['backend']!r} or mask {mask!r}; backends are {any_of(_BACKENDS)}")
    at: dict[str, Any] = {axis: int(one[column]) for axis, column in _AXES.items()}
    at |= {} if not beyond else {"q_start": beyond} if mask == "bottom_right" else {"kv_len": int(one["kv_seqlen"])}
    at |= {"dtype": one["data_type"], "causal": mask != "no_mask", "mask": f"sliding:{window}" if window else "none"}
    about = {"row": one["backend"], "variant": _BACKENDS[one["backend"]], "place": one.get("config_name") or "CSV"}
    device, values = one["gpu_name"].removeprefix("NVIDIA "), [float(one["time_ms"])]
    return {**about, "at": at, "pass": _STEPS[one["profile_pass"]], "device": device, "values": values}


def _of_trace(one: Mapping[str, Any]) -> dict[str, Any] | str:
    evaluation, found, axes = one.get("evaluation"), _DEFINITION.match(one["definition"]), one["workload"]["axes"]
    if not evaluation or evaluation["status"] != "PASSED":
        return "failed, or not run"
    if not found:
        return "no such definition here"
    if axes.get("batch_size", axes.get("len_indptr", 2) - 1) != 1:
        return "several sequences, whose lengths are not in the trace"
    kind, step, heads, values, width = found.groups()
    n = next((axes[name] for name in ("num_kv_indices", "total_q", "total_seq_len") if name in axes), None)
    at = {"batch": 1, "seq_len": n, "heads": int(heads), "head_dim": int(width), "dtype": "bfloat16", "causal": True}
    at |= {"kv_heads": int(values)} if kind == "gqa" else {}
    variant = "sdpa" if kind == "gqa" else f"gated-delta:expand=1,value_groups={int(values) // int(heads)}"
    device = str(evaluation["environment"]["hardware"]).removeprefix("NVIDIA").strip("_ ")
    about = {"row": one["solution"], "kernel": one["solution"], "place": one["definition"], "device": device}
    latency = [evaluation["performance"]["latency_ms"]]
    return {**about, "variant": variant, "at": at, "pass": _STEPS[step], "values": latency}
