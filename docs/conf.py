"""The documentation site: ``make docs`` builds it, with every warning as an error."""

from __future__ import annotations

import gc
import re
import sys
from functools import cache
from pathlib import Path
from posixpath import normpath
from typing import Any

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from generators import pages_of_sources, write  # noqa: E402

from attnbench.version import __version__  # noqa: E402

gc.freeze()
gc.set_threshold(200_000, 50, 50)  # the trees of all pages are no garbage: to look for some takes a third of the time

project = "attnbench"
author = "the authors of attnbench"
version = release = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["generators", "printed", "_static"]
highlight_language = "text"
smartquotes = False  # what stands in quotes is often typed

html_theme = "furo"
html_title = f"attnbench {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False

_LINK = re.compile(r"\]\(([\w./-]+?)/?(#[\w-]+)?\)")


def _link_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Where the site has a page of a file of the repository, link to the page."""
    pages, up = pages_of_sources(), "../" * docname.count("/")

    def page(link: re.Match[str]) -> str:
        to = pages.get(normpath(f"docs/{docname}/../{link[1]}"))
        return f"]({up}{to}{link[2] or ''})" if to else link[0]

    source[0] = _LINK.sub(page, source[0])


def _write_pages(app: Sphinx) -> None:
    write(Path(app.srcdir))


def _share_tree(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Beside each page stands the tree of all pages: make it once for each folder, or it takes a third of the time."""
    folder, slash, file = pagename.rpartition("/")
    links = {f"{file}.html": 'current"><a class="current reference internal" href="#"'}
    page = pagename
    while page := next((one for one, below in app.env.toctree_includes.items() if page in below), ""):
        to = app.builder.get_relative_uri(pagename, page)
        links[to] = f'current"><a class="reference internal" href="{to}"'

    def tree(**how: Any) -> str:
        made = _tree(app, f"{folder}{slash}-", **how)
        for to, link in links.items():
            made = made.replace(f'"><a class="reference internal" href="{to}"', f" {link}")
        return made

    context["toctree"] = tree


@cache
def _tree(app: Sphinx, beside: str, **how: Any) -> str:
    return str(app.builder._get_local_toctree(beside, **how))  # type: ignore[attr-defined]  # of what builds HTML


class English(SearchEnglish):
    """The pages have most of their words in common: the stem of each word is looked for once."""

    @cache  # noqa: B019  # there is one object
    def stem(self, word: str) -> str:
        return super().stem(word)


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the generated pages before Sphinx looks for pages."""
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _link_pages)
    app.connect("html-page-context", _share_tree, priority=400)  # before the theme, which asks for the tree
    app.add_search_language(English)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
