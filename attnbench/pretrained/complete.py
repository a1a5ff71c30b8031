"""Whether all of a model was read from its files: what is missing there, the library fills with random numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from attnbench.errors import UsageError

_BUFFERS = re.compile(r"(attn|attention)\.bias$|masked_bias$|inv_freq$|position_ids$")
"""Masks and positions in the layers of old files, which a model makes by itself today."""
_HELD = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")
"""Types of numbers that need no scale, as safetensors calls them."""


def refuse_incomplete(model: nn.Module, told: Mapping[str, Any]) -> None:
    """Refuse a model of which a part is not what its files hold; take off a pooler without weights, which nobody reads.

    Args:
        told: what the library says about the reading: ``missing_keys``, ``unexpected_keys``, ``mismatched_keys``.

    Raises:
        UsageError: a tensor is in no file or has another shape there, or a layer of the files is not in the model.
    """
    missing = sorted({*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])})
    lists = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    unexpected = sorted(told["unexpected_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None  # type: ignore[assignment]  # its class takes none, which the stub leaves out
        missing = []
    if missing:
        before = {key.removesuffix(name) for key in unexpected for name in missing if key.endswith(f".{name}")}
        if before:
            raise UsageError(
                f"its tensors are named {min(before, key=len)}{missing[0]}; save them without that beginning"
            )
        raise UsageError(f"its files lack {_some(missing)}, which would be random numbers; take a complete copy")
    own = [key for key in unexpected if not _BUFFERS.search(key) and lists & set(re.findall(r"(\w+)\.\d+\.", key))]
    if own:
        raise UsageError(
            f"its files hold {_some(own)}, which config.json leaves out; take the config.json of these files"
        )


def refuse_scaled(folder: Path, config: Any) -> None:
    """Refuse numbers that mean nothing without a scale, where the configuration does not say how they were made.

    Raises:
        UsageError: there are such numbers.
    """
    if getattr(config, "quantization_config", None) is not None:
        return
    opened: Any = import_module("safetensors").safe_open
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it is no mapping
                if (kind := tensors.get_slice(name).get_dtype()) not in _HELD and not _BUFFERS.search(name):
                    said = f"{name} is of type {kind}, and config.json has no quantization_config, which says its scale"
                    raise UsageError(f"{said}; take a complete copy")


def _some(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
