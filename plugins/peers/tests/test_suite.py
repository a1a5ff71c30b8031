from __future__ import annotations

import warnings

import pytest

pytest.importorskip("attnbench_peers", reason="make peers installs it")

import attnbench_peers  # noqa: F401  # fills the table of variants, whatever ATTNBENCH_PLUGINS says

from attnbench import Unsupported, build
from attnbench.contract.variant import VARIANTS
from attnbench.suite.cell import Cell
from attnbench.suite.expand import expand
from attnbench.suite.load import load_suite


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return expand(load_suite("peers"))


def test_every_peer_is_measured_beside_its_variant_in_both_passes(cells: list[Cell]) -> None:
    peers = {name for name in VARIANTS.names() if name.startswith("peer.")}
    beside = {(cell.sweep, cell.variant.name) for cell in cells}
    for pass_ in ("forward", "training"):
        assert {cell.variant.name for cell in cells if cell.pass_ == pass_} >= peers
    for sweep, name in beside:
        if name.startswith("peer."):
            assert (sweep, name.split(".")[1]) in beside


def test_each_cell_can_be_built_but_for_what_needs_a_gpu(cells: list[Cell]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # performer-pytorch compares versions with distutils
        for cell in cells:
            form = dict(cell.variant.options).get("form")
            if form != "naive" and not VARIANTS.get(cell.variant.name).traits.dtypes:
                with pytest.raises(Unsupported):
                    build(cell.variant, cell.shape)
            elif cell.shape.N == 1024 and form is None:  # the naive forms need triton, which make peers leaves out
                build(cell.variant, cell.shape)
