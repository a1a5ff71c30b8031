"""Rows of a trained model whose attention gave way to variants: what they lose, in speed and memory."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tests.figures.conftest import failed, row

LOSSES = {"none": 0.0, "sdpa": 2e-7, "local": 0.14, "performer": 0.7, "mean-value": 0.8, "linear": 1.9, "better": -0.2}
ABOUT: dict[str, Any] = {"level": "pretrained", "model": "some/folder", "inputs": "text", "windows": 16, "seq_len": 128}


def table(**more: Any) -> pd.DataFrame:
    """The rows of one run; ``more`` has columns that replace or add some."""
    rows = [
        row(
            label, time_median_s=0.1 * (9 - place), peak_bytes=1e6 * (1 + place), loss=2 + delta, loss_base=2.0,
            loss_delta=delta, loss_delta_low=delta - 0.1, loss_delta_high=delta + 0.1, hidden_error=abs(delta),
            **{**ABOUT, "family": "exact" if label in ("none", "sdpa") else "kernel", **more},
        )
        for place, (label, delta) in enumerate(LOSSES.items())
    ]  # fmt: skip
    rows += [failed("unsupported", "no causal form", "linformer", **ABOUT)]
    rows[4]["family"] = "reference"
    return pd.DataFrame(rows)
