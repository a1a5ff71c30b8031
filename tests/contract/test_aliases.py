"""Module paths of before still work, with a warning."""

from __future__ import annotations

import importlib

import pytest

import attnbench
from attnbench.catalogue.attention.kernel.performer import Performer
from attnbench.catalogue.attention.selection.kv_budget import H2O
from attnbench.catalogue.engines import masks
from attnbench.contract.variant import VARIANTS


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("attnbench.variant", "VARIANTS", VARIANTS),
        ("attnbench.variant", "build", attnbench.build),
        ("attnbench.shape", "Shape", attnbench.Shape),
        ("attnbench.traits", "No", attnbench.No),
        ("attnbench.attention", "Performer", Performer),
        ("attnbench.attention.performer", "Performer", Performer),
        ("attnbench.attention.kv_budget", "H2O", H2O),
        ("attnbench.engines.masks", "emptied", masks.emptied),
        ("attnbench.testing", "check_variant", importlib.import_module("attnbench.laws").check_variant),
    ],
)
@pytest.mark.filterwarnings("ignore:attnbench:DeprecationWarning")
def test_a_path_of_before_is_the_module_of_today(path: str, name: str, value: object) -> None:
    assert getattr(importlib.import_module(path), name) is value


def test_an_unknown_path_is_none() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("attnbench.nothing")
