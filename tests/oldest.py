"""Requirements that install the oldest version of every dependency that pyproject.toml allows.

The tools of the tests stay at their own pins, and what neither names is left to pip.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

OF_THEIR_TIME = ["pyparsing<3.3"]
"""Newer versions of these warn of how the oldest matplotlib calls them, and a warning is an error in the tests."""

NOT_OF_THEIR_TIME = {"transformers"}
"""Tools that need newer versions of the dependencies themselves. What is tested with them is skipped."""

HERE = Path(__file__).resolve().parents[1]


def oldest() -> list[str]:
    """``torch==2.9`` for ``torch>=2.9``, and the pins of what only the tests need."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = [one.replace(">=", "==") for one in project["dependencies"]]
    tools = {re.split(r"[>=]", one)[0].lower() for one in project["optional-dependencies"]["dev"]} - NOT_OF_THEIR_TIME
    pins = (HERE / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return floors + [pin for pin in pins if pin.partition("==")[0].lower() in tools] + OF_THEIR_TIME


if __name__ == "__main__":
    print("\n".join(oldest()))
