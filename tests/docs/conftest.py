from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from filelock import FileLock

from tests.docs.making import HERE

Once = Callable[[str, Callable[[], Any]], Any]
PagesOf = Callable[[str], dict[str, str]]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """What is made once for all processes of the tests, by a name: anything that JSON can hold."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent / f"once-{session}" if session else folder / "once"
    folder.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[], Any]) -> Any:
        file = folder / f"{name}.json"
        with FileLock(f"{file}.lock"):
            if not file.exists():
                file.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))

    return made


@pytest.fixture(scope="session")
def pages_of(once: Once) -> PagesOf:
    """The pages that a module of ``docs/generators`` makes: path below docs/ -> text."""

    @cache
    def pages(name: str) -> dict[str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(HERE / "docs"))
            module = importlib.import_module(f"generators.{name}")
            found: dict[str, str] = once(f"pages-{name}", lambda: dict(module.pages()))
        return found

    return pages
