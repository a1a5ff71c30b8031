"""The plain forms of flash-linear-attention give what our layers give, where the package can be imported."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("attnbench_peers", reason="make peers installs it")

import attnbench_peers  # noqa: F401  # fills the table of variants, whatever ATTNBENCH_PLUGINS says

from attnbench import Shape, build
from attnbench.errors import Unsupported

SHAPE = Shape(batch=2, heads=2, seq_len=37, head_dim=8, causal=True)
each = pytest.mark.parametrize("ours", ["gsa", "comba", "gated-delta-2", "log-linear", "fox"])


@each
@pytest.mark.filterwarnings("ignore")  # what the package says of itself and of this machine
def test_outputs_and_gradients_are_those_of_our_layer(ours: str) -> None:
    pytest.importorskip("fla.ops", reason="fla-core and triton are installed by hand")
    mine, peer = build(ours, SHAPE), build(f"peer.{ours}.fla", SHAPE)
    peer.load_state_dict(mine.state_dict())
    x = torch.randn(2, 37, SHAPE.C, requires_grad=True)
    outputs = mine(x), peer(x)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    wanted = [[x, *(p for p in module.parameters() if p.requires_grad)] for module in (mine, peer)]
    found = [torch.autograd.grad(y.square().sum(), to) for y, to in zip(outputs, wanted, strict=True)]
    for expected, grad in zip(*found, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-4)


@each
def test_without_the_package_the_reason_says_how_to_get_it(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    for name in [name for name in sys.modules if name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Unsupported, match=r"pip install --no-deps fla-core==\d"):
        build(f"peer.{ours}.fla", SHAPE)


@each
def test_the_other_direction_is_refused(ours: str) -> None:
    with pytest.raises(Unsupported, match="causal"):
        build(f"peer.{ours}.fla", Shape(batch=2, heads=2, seq_len=37, head_dim=8))
