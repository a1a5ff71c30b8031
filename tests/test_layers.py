"""Imports point down only; the page on the architecture draws the table here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import attnbench

ROOT = Path(attnbench.__file__).parent
LAYERS = {
    0: "units printable marks",
    1: "cgroup shape axes reference position_bias compiled status padding errors spec registry cost foreign "
    "capabilities mask visible sink",
    2: "traits reasons contract variant plugins hub sources module_source own_module qkv task cell record files "
    "journal verify table lock store runs machine manifest trained scores engines added_tokens crossing "
    "fewer_queries stack",
    3: "attention inputs tasks model decoder",
    4: "measure suite testing training probing pretrained",
    5: "plots run",
    6: "decision report pictures pretrained.asked pretrained.figure pretrained.swap",
    7: "cli api notebook",
    8: "__main__",
}
"""A file that stands higher than the rest of its folder is a home of its own."""
LAYER = {home: layer for layer, homes in LAYERS.items() for home in homes.split()}
HIGHEST = dict.fromkeys(f"{LAYERS[3]} {LAYERS[4]} plots".split(), 2) | {
    "engines": 1,
    "run": 4,
    "testing": 4,
    "training": 4,
    "probing": 4,
    "pretrained": 4,
    "decoder": 3,
}
"""The highest layer that a home may import; those not named here may import their own layer as well."""

FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def imported_homes(source: str) -> set[str]:
    homes = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which layer is meant"
            names = [f"{node.module}.{name.name}" for name in node.names]
        else:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        homes |= {_home(name) for name in names if name.startswith("attnbench.")}
    return homes - {"__version__"}


def _home(name: str) -> str:
    """The home of a module, or of what is imported from it: ``attnbench.pretrained.swap.Watcher``."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LAYER else parts[0]


def home_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LAYER else parts[0]


def allowed(home: str, other: str) -> bool:
    if other == home:
        return True
    limit = HIGHEST.get(home, LAYER[home])
    return other in LAYER and LAYER[other] <= limit


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_only(path: Path) -> None:
    home = home_of(path)
    assert home in LAYER, f"attnbench/{home} has no layer: add it to the table here"
    upward = {other for other in imported_homes(path.read_text(encoding="utf-8")) if not allowed(home, other)}
    assert not upward, f"{path.relative_to(ROOT)} (layer {LAYER[home]}) imports {', '.join(sorted(upward))}"


@pytest.mark.parametrize(
    ("home", "other", "verdict"),
    [
        ("run", "pretrained", True),
        ("run", "pretrained.swap", False),
        ("pretrained", "run", False),
        ("pretrained.swap", "run", True),
        ("units", "errors", False),
        ("spec", "errors", True),
        ("cell", "shape", True),
        ("shape", "cell", False),
        ("attention", "variant", True),
        ("attention", "inputs", False),
        ("attention", "engines", True),
        ("engines", "attention", False),
        ("engines", "variant", False),
        ("engines", "shape", True),
        ("measure", "attention", False),
        ("run", "measure", True),
        ("plots", "run", False),
        ("plots", "measure", False),
        ("testing", "attention", True),
        ("testing", "run", False),
        ("cli", "run", True),
        ("run", "cli", False),
        ("run", "testing", True),
        ("measure", "testing", False),
        ("decision", "run", True),
        ("run", "decision", False),
        ("cli", "no_such_module", False),
    ],
)
def test_the_rule_itself_tells_up_from_down(home: str, other: str, verdict: bool) -> None:
    assert allowed(home, other) is verdict


def test_imports_of_every_form_are_seen() -> None:
    source = "import attnbench.cli.app\nfrom attnbench import units\ndef f():\n    from attnbench.run.pairs import g\n"
    assert imported_homes(source) == {"cli", "units", "run"}


def test_an_algorithm_uses_engines_and_no_other_algorithm() -> None:
    arrows = set()
    for path in (ROOT / "attention").rglob("*.py"):
        own = path.relative_to(ROOT / "attention").parts[0].removesuffix(".py")
        for other in re.findall(r"attnbench\.attention\.(\w+)", "\n".join(import_lines(path))):
            arrows |= {(own, other)} - {(own, own)}
    assert {arrow for arrow in arrows if arrow[0] != "__init__"} == {
        ("sparse", "local")
    }  # its pattern of the same name


def import_lines(path: Path) -> list[str]:
    return [
        line for line in path.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith(("from", "import"))
    ]


def test_homes_within_a_layer_do_not_import_in_circles() -> None:
    edges: dict[str, set[str]] = {home: set() for home in LAYER}
    for path in FILES:
        edges[home_of(path)] |= imported_homes(path.read_text(encoding="utf-8")) & LAYER.keys() - {home_of(path)}
    while leaves := [home for home, others in edges.items() if not others & edges.keys()]:
        for home in leaves:
            del edges[home]
    assert not edges, f"circular: {', '.join(sorted(edges))}"
