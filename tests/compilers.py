"""Marks of tests in which torch compiles, which takes it seconds for each shape."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., object])

needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="there is no C++ compiler on this machine"
)


def compiles(test: Test) -> Test:
    """Mark one of many: ``make test`` runs others of the kind, ``make test-all`` this one as well."""
    return pytest.mark.slow(needs_compiler(test))
