"""The documentation builds as a site without a warning, and every link inside of it leads somewhere."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from attnbench.cli.usage import COMMANDS
from attnbench.contract.variant import VARIANTS
from tests.docs.conftest import Once, PagesOf
from tests.docs.making import GENERATED, HERE
from tests.forked import forks

pytestmark = pytest.mark.timeout(900)


class Page(HTMLParser):
    """Anchors of a page, and what it points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {one for one in (given.get("id"), given.get("name")) if one}
        target = given.get("src") or (given.get("href") if tag in ("a", "link") else None)
        if target:
            self.targets.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, once: Once, pages_of: PagesOf) -> Path:
    """Built once for all processes of the tests, from a copy, so that nothing is written into this checkout."""
    return Path(once("site", lambda: str(build(tmp_path_factory.mktemp("checkout"), pages_of))))


def build(root: Path, pages_of: PagesOf) -> Path:
    """The site, from a copy of the checkout in an empty folder, and from the pages that other tests read as well."""
    for one in HERE.iterdir():
        if one.name not in ("docs", "build"):
            (root / one.name).symlink_to(one)
    shutil.copytree(HERE / "docs", root / "docs", ignore=shutil.ignore_patterns(*GENERATED, "__pycache__"))
    arguments = ["-W", "--keep-going", "-q", "docs", "site"]
    with forks(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE / "docs"))
        generators = importlib.import_module("generators")
        made = [page for module in generators.makers() for page in pages_of(module.__name__.rpartition(".")[2]).items()]
        patch.setattr(generators, "pages", lambda: made)
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; from sphinx.cmd.build import main; sys.exit(main({arguments}))"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return root / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_inside_the_site_leads_to_a_file_and_an_anchor(pages: dict[Path, Page]) -> None:
    lost = []
    file_of = cache(lambda folder, to: (folder / to).resolve())  # beside each page stand links to all the others
    there = cache(Path.exists)
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = file_of(path.parent, unquote(parts.path)) if parts.path else path
            known = pages.get(file)
            if not there(file) or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                lost.append(f"{path.name}: {target}")
    assert lost == []


def test_a_source_with_a_page_of_its_own_is_linked_as_the_page(pages: dict[Path, Page], site: Path) -> None:
    downloads = {path.name for path in (site / "_downloads").rglob("*") if path.is_file()}
    assert [name for name in downloads if name.endswith(".py") or name in ("claims.yaml", "founding.yaml")] == []
    assert "reference/runs.html#lra-cpu" in pages[site / "lra.html"].targets
    assert "catalogue/snapkv.html" in pages[site / "not-here.html"].targets
    assert "../reference/laws.html" in pages[site / "internals/architecture.html"].targets


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    assert 'src="http' not in text
    assert 'rel="stylesheet" href="http' not in text
    assert not any("url(http" in path.read_text(encoding="utf-8") for path in site.rglob("*.css"))


def test_every_variant_and_every_command_has_a_page(pages: dict[Path, Page], site: Path) -> None:
    shipped = [entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.")]
    assert [name for name in shipped if site / f"catalogue/{name}.html" not in pages] == []
    assert [name for name in COMMANDS if site / f"commands/{name}.html" not in pages] == []


@pytest.mark.parametrize(
    ("page", "marked"),
    [
        ("index", []),
        ("start", [("1", "start.html", "#")]),
        ("catalogue/index", [("1", "index.html", "#")]),
        ("catalogue/performer", [("1", "index.html", "index.html"), ("2", "performer.html", "#")]),
    ],
)
def test_a_page_and_those_above_it_are_marked_in_the_tree_beside_it(
    site: Path, page: str, marked: list[tuple[str, str, str]]
) -> None:
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    found = re.findall(r'<li class="toctree-l(\d) current[^"]*"><a class="([^"]*)" href="([^"]*)">', text)
    assert [(level, to) for level, _, to in found] == [(level, to) for level, _, to in marked]
    assert [kind.startswith("current ") for _, kind, _ in found] == [to == "#" for _, _, to in marked]
    assert all(f'reference internal" href="{own}"' not in text for _, own, to in marked if to == "#")


def test_the_search_index_knows_a_variant(site: Path) -> None:
    assert "catalogue/performer" in (site / "searchindex.js").read_text(encoding="utf-8")
