"""The plain forms of flash-linear-attention give what our layers give, where the package can be imported."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("attnbench_peers", reason="make peers installs it")

import attnbench_peers  # noqa: F401  # fills the table of variants, whatever ATTNBENCH_PLUGINS says

from attnbench import Shape, Unsupported, build
from attnbench.catalogue.attention.selection.indexed import IndexedAttention

SHAPE = Shape(batch=2, heads=2, seq_len=37, head_dim=8, causal=True)
each = pytest.mark.parametrize("ours", ["gsa", "comba", "gated-delta-2", "log-linear", "fox", "rwkv7"])


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


CHOSEN = [
    ("indexed:top_k=9", "peer.indexed.fla:top_k=9"),
    ("indexed:top_k=40", "peer.indexed.fla:top_k=40"),
    ("nsa:branch=selected,block=4,length=4,stride=4,top_n=4", "peer.nsa.fla:block=4,top_n=4"),
    ("nsa:branch=compressed,length=4,stride=4", "peer.nsa.fla:block=4,branch=compressed"),
]
GROUPED = Shape(batch=2, heads=4, seq_len=37, head_dim=8, causal=True, kv_heads=2)


def untied(module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``(B, 1, N, 1)``: the queries whose choice no tie decides. An index is 0 where no product is above 0."""
    if not isinstance(module, IndexedAttention):
        return torch.ones(1, 1, 1, 1)
    assert module.index is not None
    with torch.no_grad():
        index = module.index(q, k)
    above = (torch.einsum("bnhd,bmd->bnmh", index.a, index.b) > 0).any(-1).tril().sum(-1)
    kept = (above >= module.top_k) | (torch.arange(q.shape[2]) < module.top_k)
    assert kept.float().mean() > 0.8
    return kept[:, None, :, None]


@pytest.mark.parametrize(("ours", "theirs"), CHOSEN)
@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["own-keys", "shared-keys"])
@pytest.mark.filterwarnings("ignore")  # what the package says of itself and of this machine
def test_chosen_keys_and_gradients_are_those_of_our_operator(ours: str, theirs: str, shape: Shape) -> None:
    pytest.importorskip("fla.ops", reason="fla-core and triton are installed by hand")
    mine, peer = build(ours, shape, seed=3), build(theirs, shape, seed=3)
    sizes = [(2, heads, 37, 8) for heads in (shape.H, shape.K, shape.K)]
    inputs = [torch.randn(size, requires_grad=True) for size in sizes]
    kept = untied(mine, *inputs[:2])
    outputs = [module(*inputs) * kept for module in (mine, peer)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    expected, found = (torch.autograd.grad(y.square().sum(), inputs) for y in outputs)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("theirs", ["peer.indexed.fla", "peer.nsa.fla"])
def test_without_the_package_those_that_choose_say_how_to_get_it(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    for name in [name for name in sys.modules if name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(Unsupported, match=r"pip install --no-deps fla-core==\d"):
        build(theirs, SHAPE)


def test_blocks_without_a_gpu_are_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="run on an NVIDIA GPU, and there is none"):
            build("peer.moba.fla", SHAPE)
    with pytest.raises(Unsupported, match="causal"):
        build("peer.moba.fla", Shape(batch=2, heads=2, seq_len=37, head_dim=8))
