"""What is installed, declared and locked is what is used."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULE = {"pyyaml": "yaml", "pillow": "pil"}
COMES_WITH_ANOTHER = {"triton", "pydantic_core"}  # torch for CUDA brings the first, pydantic the second
description = runpy.run_path(str(HERE / "setup.py"))["description"]
oldest = runpy.run_path(str(HERE / "tests/oldest.py"))["oldest"]


def name_of(requirement: str) -> str:
    return re.split(r"[>=<;\[ ]", requirement)[0].lower().replace("_", "-")


ASKS_PACKAGES = HERE / "tests/benchmarks/packages.py"
"""What its functions import is what it asks about, and whoever runs it installs that: its page says how."""


def nodes(path: Path) -> Iterator[ast.AST]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return iter(tree.body) if path == ASKS_PACKAGES else ast.walk(tree)


def imported(folder: str = "attnbench") -> set[str]:
    found: set[str] = set()
    for path in (HERE / folder).rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.Import):
                found |= {one.name.partition(".")[0] for one in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"attnbench"}


def pins() -> dict[str, str]:
    lines = (HERE / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {name_of(line): line.partition("==")[2] for line in lines if "==" in line}


def locked() -> dict[str, str]:
    text = (HERE / "requirements.lock").read_text(encoding="utf-8")
    return {name_of(line): line.split("==")[1].split()[0] for line in re.findall(r"^[a-z].*==.*$", text, re.MULTILINE)}


def test_every_dependency_is_imported_and_every_import_is_declared() -> None:
    declared = {MODULE.get(name_of(one), name_of(one)) for one in PROJECT["dependencies"]}
    assert {name.lower() for name in imported()} - COMES_WITH_ANOTHER == declared


def test_the_tests_import_nothing_that_make_test_does_not_install() -> None:
    extra = PROJECT["optional-dependencies"]["dev"]
    declared = {MODULE.get(name_of(one), name_of(one)) for one in [*PROJECT["dependencies"], *extra]}
    assert {name.lower() for name in imported("tests") - {"tests"}} - COMES_WITH_ANOTHER <= declared
    assert {"nbclient", "nbformat", "ipykernel"} <= set(pins())


def test_the_lock_has_what_the_constraints_pin_and_nothing_else_but_for_torch() -> None:
    pinned = pins()
    assert {name: pinned.get(name) for name in locked() if name != "colorama"} == {  # colorama: on Windows only
        name: version for name, version in locked().items() if name != "colorama"
    }
    declared = {name_of(one) for one in PROJECT["dependencies"]}
    assert declared - set(locked()) == {"torch"}


def test_every_locked_version_has_a_hash() -> None:
    text = (HERE / "requirements.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[a-z])", text)[1:]
    assert len(entries) == len(locked())
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_bill_of_materials_lists_what_is_locked_and_torch() -> None:
    components = json.loads((HERE / "sbom.cdx.json").read_text(encoding="utf-8"))["components"]
    listed = {name_of(one["name"]): one["version"] for one in components}
    assert listed == {**locked(), "torch": pins()["torch"]}


def test_the_oldest_versions_are_those_that_the_project_declares() -> None:
    constraints = oldest()
    assert "torch==2.9" in constraints
    assert {name_of(one) for one in PROJECT["dependencies"]} <= {name_of(one) for one in constraints}
    assert not any(name_of(one) == "contourpy" for one in constraints)  # left to pip: it must fit an old matplotlib


@pytest.mark.parametrize("repository", ["", "https://example.org/attnbench"])
def test_the_description_for_an_index_has_no_relative_image_or_link(repository: str) -> None:
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    text = description(readme, repository, "1.2.3")
    outside_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]+)\)", outside_code)
    assert [one for one in targets if not one.startswith(("https://", "http://", "#"))] == []
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", outside_code)
    shown = len(re.findall(r"^!\[", readme, re.MULTILINE))
    assert shown > 0
    assert len(images) == (shown if repository else 0)
    assert all(one.startswith("https://example.org/attnbench/raw/v1.2.3/results/") for one in images)


def test_an_image_beside_text_is_a_link_to_it() -> None:
    assert description("see ([like this](a.png)) now", "", "1") == "see (like this) now"
    assert description("[a](https://b.c) and [d](#e)", "", "1") == "[a](https://b.c) and [d](#e)"


def test_a_checkout_and_a_wheel_are_small() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=HERE, capture_output=True, text=True, check=False).stdout
    sizes = {name: (HERE / name).stat().st_size for name in tracked.split("\0") if (HERE / name).is_file()}
    if not sizes:
        pytest.skip("no checkout of git")
    assert sum(sizes.values()) <= 25e6
    packed = (len(zlib.compress((HERE / name).read_bytes())) for name in sizes if name.startswith("attnbench/"))
    assert sum(packed) <= 9.95e6  # a wheel of 10 MB, with its own files
