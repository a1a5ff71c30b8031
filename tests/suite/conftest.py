"""A small table of variants and inputs, so that these tests do not depend on what the package ships."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from attnbench.contract.inputs import INPUTS
from attnbench.contract.registry import Entry
from attnbench.contract.variant import VARIANTS, Variant


class _Plain:
    def __init__(self, shape: Any) -> None: ...


class _Performer:
    def __init__(
        self,
        shape: Any,
        *,
        features: Annotated[int, Field(ge=1)] = 256,
        kernel: Literal["positive", "trig"] = "positive",
        beta: float = 1.0,
    ) -> None: ...


class _Linformer:
    def __init__(self, shape: Any, *, rank: Annotated[int, Field(ge=1)] = 256) -> None: ...


def _gaussian(shape: Any, generator: Any, *, logit_std: Annotated[float, Field(gt=0)] = 1.0) -> None: ...


def _file(shape: Any, generator: Any, *, path: str = "") -> None: ...


def _variant(name: str, make: Any) -> Variant:
    return Variant(name, make, "", family="exact", source="", formula="", cost="")


@pytest.fixture
def small_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (VARIANTS, INPUTS):  # else a shipped name would be looked up beside these
        monkeypatch.setattr(table, "home", None)
    makers = {"softmax": _Plain, "sdpa": _Plain, "performer": _Performer, "linformer": _Linformer}
    monkeypatch.setattr(VARIANTS, "_entries", {n: _variant(n, m) for n, m in makers.items()})
    draws = {"gaussian": _gaussian, "file": _file}
    monkeypatch.setattr(INPUTS, "_entries", {n: Entry(name=n, make=m, summary="") for n, m in draws.items()})
