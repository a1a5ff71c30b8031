"""What pyproject.toml cannot say: README.md for a package index, which shows no file that only the repository has.

With ``ATTNBENCH_REPOSITORY=https://github.com/OWNER/attnbench``, images and links point into the tag of this version
there. Without it, an image is left out and a link is left as its text.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
_IMAGE = re.compile(r"^!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n\n?", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def description(readme: str, repository: str, version: str) -> str:
    """``readme`` with every relative image and link absolute, or without it where there is no ``repository``."""
    if not repository:
        return _LINK.sub(r"\1", _IMAGE.sub("", readme))
    tag = f"v{version}"
    images = _IMAGE.sub(lambda m: f"![{m[1]}]({repository}/raw/{tag}/{m[2]})\n\n", readme)
    return _LINK.sub(lambda m: f"[{m[1]}]({repository}/blob/{tag}/{m[2]})", images)


if __name__ == "__main__":
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1763769600")  # else a wheel holds the time at which it was built
    version = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=description(readme, os.environ.get("ATTNBENCH_REPOSITORY", "").rstrip("/"), version),
        long_description_content_type="text/markdown",
    )
