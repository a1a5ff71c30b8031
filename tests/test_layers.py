"""Imports point down only; the page on the architecture draws the table here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import attnbench

ROOT = Path(attnbench.__file__).parent
LAYERS = {
    1: "errors units text version",
    2: "files contract",
    3: "suite catalogue",
    4: "measure",
    5: "results laws models",
    6: "harness figures",
    7: "answers",
    8: "cli",
    9: "api __main__",
}
"""Rooms by floor. A room imports from lower floors only."""
LAYER = {room: layer for layer, rooms in LAYERS.items() for room in rooms.split()}
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_homes(source: str) -> set[str]:
    homes = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer is meant"
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        homes |= {name.split(".")[1] for name in names if name.startswith("attnbench.")}
    return homes


def home_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def allowed(home: str, other: str) -> bool:
    return other == home or (other in LAYER and LAYER[other] < LAYER[home])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_only(path: Path) -> None:
    home = home_of(path)
    assert home in LAYER, f"attnbench/{home} has no layer: add it to the table here"
    upward = {other for other in imported_homes(path.read_text(encoding="utf-8")) if not allowed(home, other)}
    assert not upward, f"{path.relative_to(ROOT)} (layer {LAYER[home]}) imports {', '.join(sorted(upward))}"


@pytest.mark.parametrize(
    ("home", "other", "verdict"),
    [
        ("contract", "errors", True),
        ("contract", "catalogue", False),
        ("catalogue", "contract", True),
        ("catalogue", "suite", False),
        ("suite", "catalogue", False),
        ("measure", "catalogue", True),
        ("laws", "harness", False),
        ("results", "figures", False),
        ("harness", "figures", False),
        ("answers", "harness", True),
        ("cli", "api", False),
        ("api", "cli", True),
        ("cli", "no_such_module", False),
    ],
)
def test_the_rule_itself_tells_up_from_down(home: str, other: str, verdict: bool) -> None:
    assert allowed(home, other) is verdict


def test_imports_of_every_form_are_seen() -> None:
    source = (
        "import attnbench.cli.app\nfrom attnbench import units\ndef f():\n    from attnbench.harness.plan import g\n"
    )
    assert imported_homes(source) == {"cli", "units", "harness"}


def test_an_algorithm_uses_engines_and_no_other_algorithm() -> None:
    arrows = set()
    attention = ROOT / "catalogue" / "attention"
    for path in attention.rglob("*.py"):
        own = path.relative_to(attention).with_suffix("").parts[1:2]
        for other in re.findall(r"attnbench\.catalogue\.attention\.\w+\.(\w+)", "\n".join(import_lines(path))):
            arrows |= {(*own, other)} - {(other, other)}
    assert {arrow for arrow in arrows if len(arrow) == 2} == {("sparse", "local")}  # its pattern of the same name


def import_lines(path: Path) -> list[str]:
    return [
        line for line in path.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith(("from", "import"))
    ]
