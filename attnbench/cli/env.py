"""``attnbench env``: the facts that a bug report needs."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from typing import Any

from attnbench.cli.options import AsJson
from attnbench.cli.screen import console
from attnbench.errors import UsageError, said
from attnbench.measure.machine import variables
from attnbench.text import without_secrets
from attnbench.units import format_bytes
from attnbench.version import __version__


def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs: versions, processor, memory, devices, plug-ins and settings."""
    more = {name: os.environ[name] for name in ("ATTNBENCH_PLUGINS", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    facts = {**_versions(), **_machine(), "plugins": _plugins(), "variables": variables(os.environ) | more}
    if as_json:
        console.data(facts)
    else:
        for name, value in _rows(facts):
            console.line(f"{name:<18}{value}")


def _versions() -> dict[str, Any]:
    try:
        required = metadata.requires("attnbench") or []
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        required = []
    names = [re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line]
    return {
        "attnbench": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "dependencies": {name: _version(name) for name in (*names, "numpy")},
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    from attnbench.measure import cgroup, machine

    facts: dict[str, Any] = {
        "processor": machine.processor(),
        "cores": machine.available_cores(),
        "default_threads": machine.default_threads(),
        "cpu_quota": cgroup.cores(),
        "memory_bytes": machine.total_memory_bytes(),
        "memory_limit_bytes": cgroup.memory_bytes(),
        "available_memory_bytes": machine.available_memory_bytes(),
    }
    try:
        import torch

        facts["instructions"] = machine.instructions()
        facts["torch_threads"] = torch.get_num_threads()
        facts["devices"] = {name: machine.describe(name).get("gpu", "") for name in machine.devices() if name != "cuda"}
        if cards := {name: _card(name) for name in facts["devices"] if name.startswith("cuda")}:
            facts["cards"] = cards
    except Exception as error:
        facts["torch_error"] = said(error)
    return facts


def _card(device: str) -> dict[str, Any]:
    from attnbench.measure import card
    from attnbench.measure.machine import describe

    known = {name: one for name, one in describe(device).items() if name in ("cuda", "cudnn", "triton")}
    told = card.facts(device)
    return known | (told or {"not_told": card.warning(device) or "NVML knows no such card"})


def _plugins() -> dict[str, str]:
    from attnbench.contract.plugins.discovery import installed
    from attnbench.contract.plugins.foreign import told

    found = {}
    for point in installed():
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        try:
            with told(point.name):
                point.load()
            found[point.name] = package
        except UsageError as error:
            found[point.name] = without_secrets(f"{package}, cannot be loaded: {error}")
    return found


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in facts.items():
        words = name.removesuffix("_bytes").replace("_", " ")
        if name.endswith("_bytes"):
            rows.append((words, format_bytes(value)))
        elif value is None:
            rows.append((words, "-"))
        elif name == "cards":
            from attnbench.measure.card import in_words

            rows += [said for device, card in value.items() for said in in_words(device, card)]
        elif isinstance(value, dict):
            lines = [_line(name, key, one) for key, one in value.items()] or ["none"]
            rows += [(words, lines[0]), *(("", line) for line in lines[1:])]
        else:
            rows.append((words, str(value)))
    return rows


def _line(group: str, name: str, value: str | None) -> str:
    if value is None:
        return f"{name} is not installed"
    return f"{name}={value}" if group == "variables" else f"{name} {value}".rstrip()
