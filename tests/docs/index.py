"""The index of the catalogue, from which ``list``, ``show``, completion and refusals answer without torch.

``python -m tests.docs.index`` writes it anew after a change of the catalogue or of the contract.
"""

from __future__ import annotations

import json
import os
from typing import Any

from attnbench.cli.show import registries, told
from attnbench.contract.index import FILE, code
from attnbench.files import replace_file


def facts() -> dict[str, dict[str, Any]]:
    """The index of the code as it is, as JSON has it."""
    found: dict[str, dict[str, Any]] = {"code": {"digest": {"sha256": code()}}}
    for registry in registries():
        shipped = [one for one in registry if one.make.__module__.startswith(str(registry.home))]
        hidden = {name: {**told(registry, one), "hidden": True} for name, one in registry.compounds.items()}
        found[registry.kind] = {**{one.name: told(registry, one) for one in shipped}, **hidden}
    as_json: dict[str, dict[str, Any]] = json.loads(json.dumps(found))
    return as_json


def text(found: dict[str, dict[str, Any]]) -> str:
    """A line for each entry."""
    kinds = (
        f"{json.dumps(kind)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in entries.items())
        + "\n}"
        for kind, entries in found.items()
    )
    return "{\n" + ",\n".join(kinds) + "\n}\n"


if __name__ == "__main__":
    os.environ["ATTNBENCH_PLUGINS"] = ""  # what is shipped, whatever is installed here
    replace_file(FILE, text(facts()))
