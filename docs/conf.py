"""The documentation site: ``make docs`` builds it, with every warning as an error."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from generators import write  # noqa: E402

from attnbench import __version__  # noqa: E402

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

_RUN = re.compile(r"\]\((?:\.\./)+results/reference/([\w-]+)/?\)")


def _link_runs(app: Sphinx, docname: str, source: list[str]) -> None:
    """A folder of results has no page of its own on the site: link to its section on the page of all runs."""
    up = "../" * docname.count("/")
    source[0] = _RUN.sub(rf"]({up}reference/runs.md#\1)", source[0])


def _write_pages(app: Sphinx) -> None:
    write(Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the generated pages before Sphinx looks for pages."""
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _link_runs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
