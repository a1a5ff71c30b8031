"""Lists that somebody wrote in the pages leave nothing out: figures, pictures, suites and commands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from attnbench.cli.app import _command
from attnbench.cli.usage import COMMANDS
from attnbench.figures import figure_kinds
from attnbench.figures.pictures import PICTURES
from tests.docs.making import GENERATED, HERE, PAGES

SUITES = [path.stem for path in (HERE / "suites").glob("*.yaml")]
LISTS = [
    ("docs/start.md", figure_kinds()),
    ("docs/pictures.md", PICTURES),
    ("docs/suites.md", SUITES),
]


def left_out(text: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if f"`{name}`" not in text and f"attnbench plot {name}" not in text]


@pytest.mark.parametrize(("page", "names"), LISTS, ids=[page for page, _ in LISTS])
def test_a_page_names_every_one(page: str, names: Iterable[str]) -> None:
    assert left_out((HERE / page).read_text(encoding="utf-8"), names) == []


def test_what_is_left_out_is_found() -> None:
    assert left_out("`tradeoff`, `scaling` and attnbench plot pattern", ["tradeoff", "pattern", "map"]) == ["map"]


LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([\w-]+))?\)")


def lost(page: Path) -> list[str]:
    """The links of a page that lead nowhere on a code host, which has no page that ``make docs`` makes."""
    found = []
    for to, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / to).resolve() if to else page
        made = [HERE / "docs" / folder for folder in GENERATED]
        there = file.exists() and not any(file.is_relative_to(folder) for folder in made)
        if not there or (anchor and anchor not in anchors(file)):
            found.append(f"{to}#{anchor}" if anchor else to)
    return found


def anchors(page: Path) -> list[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize(
    "page", [*PAGES, HERE / "CHANGELOG.md", HERE / "docs/example.ipynb"], ids=lambda page: page.name
)
def test_every_link_of_a_page_leads_to_a_file_of_the_repository(page: Path) -> None:
    assert lost(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# A b\n[x](a.md#a-b) [y](b.md) [z](#c) [w](https://a.b/c)\n", encoding="utf-8")
    assert lost(tmp_path / "a.md") == ["b.md", "#c"]


NAMED = re.compile(r"`([\w.-]+/[\w./-]+\.\w+|make [\w./-]+|python -m [\w.]+)[^`]*`")


def missing(text: str) -> list[str]:
    """Files of the repository, targets of make and modules that a text names and that do not exist."""
    rules = (HERE / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    found = []
    for name in NAMED.findall(text):
        first, _, rest = name.partition(" ")
        if name.startswith(("results/", "build/")) and not name.startswith("results/reference/"):
            there = True  # of the reader
        elif first == "make":
            there = re.search(rf"^{re.escape(rest)}:", rules, re.MULTILINE) is not None
        elif first == "python":
            there = (HERE / f"{rest[3:].replace('.', '/')}.py").exists()
        else:
            ours = (HERE / name.partition("/")[0]).exists() or (HERE / "attnbench" / name.partition("/")[0]).exists()
            there = not ours or (HERE / name).exists() or (HERE / "attnbench" / name).exists() or "NAME" in name
        found += [] if there else [name]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8")) == []


def test_what_does_not_exist_is_found() -> None:
    text = "`tests/no.py`, `make tea`, `python -m tests.docs.tea`, `make test`, `harness/plan.py`, `mine/own.py`"
    assert missing(text) == ["tests/no.py", "make tea", "python -m tests.docs.tea"]


def test_every_command_stands_in_a_page_that_somebody_wrote() -> None:
    pages = [HERE / "README.md", *(HERE / "docs").rglob("*.md")]
    written = [page for page in pages if not {"commands", "reference", "catalogue"} & set(page.parts)]
    text = "".join(page.read_text(encoding="utf-8") for page in written)
    assert [name for name in COMMANDS if f"attnbench {name}" not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_stands_in_a_page_that_somebody_wrote(command: str) -> None:
    """An option that no page names has no user."""
    named = set(re.findall(r"--[a-z][\w-]*", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    options = [option for one in _command(command).params for option in (*one.opts, *one.secondary_opts)]
    assert [option for option in options if option.startswith("--") and option not in named] == []
