"""Shapes of published models and tables of kernels, by name, for suites and for ``compare --shape``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnbench.errors import UsageError
from attnbench.suite.messages import pick, shown

_CAUSAL: dict[str, Any] = {"causal": True}

NAMED: Mapping[str, Mapping[str, Any]] = {
    "llama3-8b": {"heads": 32, "kv_heads": 8, "head_dim": 128, **_CAUSAL},
    "llama3-70b": {"heads": 64, "kv_heads": 8, "head_dim": 128, **_CAUSAL},
    "qwen3.5": {"heads": 32, "kv_heads": 2, "head_dim": 256, **_CAUSAL},
    "deepseek-v3": {"heads": 128, "head_dim": 192, "v_dim": 128, **_CAUSAL},
    "gpt-oss": {"heads": 128, "head_dim": 64, "mask": "sliding:128", **_CAUSAL},
    "flash-64": {"heads": 32, "head_dim": 64, **_CAUSAL},
    "flash-128": {"heads": 16, "head_dim": 128, **_CAUSAL},
    "flash-256": {"heads": 8, "head_dim": 256, **_CAUSAL},
    "fla-8x8x64": {"batch": 8, "heads": 8, "head_dim": 64, **_CAUSAL},
    "fla-4x16x128": {"batch": 4, "heads": 16, "head_dim": 128, **_CAUSAL},
    "fla-4x64x128": {"batch": 4, "heads": 64, "head_dim": 128, **_CAUSAL},
    "fla-8x32x256": {"batch": 8, "heads": 32, "head_dim": 256, **_CAUSAL},
    "fla-1x96x128": {"batch": 1, "heads": 96, "head_dim": 128, **_CAUSAL},
    "fla-2x16x128": {"batch": 2, "heads": 16, "head_dim": 128, **_CAUSAL},
    "kda-64": {"heads": 64, "head_dim": 128, **_CAUSAL},
    "kda-96": {"heads": 96, "head_dim": 128, **_CAUSAL},
    "gdn-2": {"heads": 2, "head_dim": 128, **_CAUSAL},
    "gdn-4": {"heads": 4, "head_dim": 128, **_CAUSAL},
    "gdn-16": {"heads": 16, "head_dim": 128, **_CAUSAL},
    "ssd": {"batch": 8, "heads": 80, "head_dim": 64, **_CAUSAL},
    "nsa-32x128": {"heads": 32, "kv_heads": 1, "head_dim": 128, **_CAUSAL},
    "nsa-64x128": {"heads": 64, "kv_heads": 1, "head_dim": 128, **_CAUSAL},
    "nsa-64x256": {"heads": 64, "kv_heads": 1, "head_dim": 256, **_CAUSAL},
    "nsa-128x256": {"heads": 128, "kv_heads": 1, "head_dim": 256, **_CAUSAL},
    "moba": {"batch": 2, "heads": 16, "head_dim": 128, **_CAUSAL},
}
"""Name -> axis -> value. The length is not part of a shape; docs/suites.md names the tables."""


def known(name: str) -> str:
    """The name itself. Raises UsageError with the nearest names if there is no such shape."""
    if name not in NAMED:
        raise UsageError(f"unknown shape {shown(name)}{pick(name, NAMED)}")
    return name


def spelled_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by axis, with a named ``shape`` spelled out; explicit values win. Raises UsageError if it is unknown."""
    name = values.get("shape")
    named = {} if name is None else NAMED[known(name)]
    return {**named, **{axis: value for axis, value in values.items() if axis != "shape"}}
