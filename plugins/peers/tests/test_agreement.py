"""A package gives what our variant gives, in float64, wherever the algorithm is the same; where it is not, how."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("attnbench_peers", reason="make peers installs it")

import attnbench_peers  # noqa: F401  # fills the table of variants, whatever ATTNBENCH_PLUGINS says

from attnbench import Shape, build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.spec import Spec
from attnbench.contract.variant import VARIANTS
from attnbench.laws import check_variant

SHAPE = Shape(batch=2, heads=2, seq_len=128, head_dim=8)
Inputs = list[Tensor]


@pytest.fixture(autouse=True)
def _as_imported() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # performer-pytorch compares versions with distutils
        yield


def made(variant: str, shape: Shape = SHAPE) -> nn.Module:
    return build(variant, shape).double()


def drawn(shape: Shape = SHAPE) -> Inputs:
    return [x.double().requires_grad_() for x in draw_qkv(Spec("heads-inside"), shape, seed=0)]


def with_gradients(module: nn.Module, inputs: Inputs, *, times: float = 1.0) -> list[Tensor | None]:
    out = times * module(*inputs)
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs, allow_unused=True)]


def agree(mine: nn.Module, peer: nn.Module, inputs: Inputs, *, times: float = 1.0, rtol: float = 1e-9) -> None:
    for a, b in zip(with_gradients(peer, inputs, times=times), with_gradients(mine, inputs), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("peer", "ours", "causal"),
    [
        ("peer.sdpa", "sdpa", False),
        ("peer.sdpa", "sdpa", True),
        ("peer.linear", "linear", False),
        ("peer.linformer:rank=8", "linformer:rank=8,sharing=headwise", False),
        ("peer.local:window=16", "local:window=16", False),
        ("peer.local:window=16", "local:window=16", True),
    ],
)
def test_a_correct_package_gives_what_ours_gives(peer: str, ours: str, causal: bool) -> None:
    shape = Shape(batch=2, heads=2, seq_len=128, head_dim=8, causal=causal)
    agree(made(ours, shape), made(peer, shape), drawn(shape))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_agrees_but_for_what_it_adds(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from performer_pytorch import performer_pytorch

    shape = Shape(batch=2, heads=2, seq_len=64, head_dim=8, causal=causal)
    ours, peer, inputs = made("performer:features=16", shape), made("peer.performer:features=16", shape), drawn(shape)
    assert not torch.allclose(peer(*inputs), ours(*inputs), rtol=1e-5)
    monkeypatch.setitem(performer_pytorch.softmax_kernel.__kwdefaults__, "eps", 0.0)
    monkeypatch.setattr(performer_pytorch.causal_linear_attention_noncuda, "__defaults__", (128, 0.0))
    agree(ours, peer, inputs, rtol=1e-8)


def test_causal_linear_attention_agrees_but_for_what_it_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    from performer_pytorch import performer_pytorch

    shape = Shape(batch=2, heads=2, seq_len=64, head_dim=8, causal=True)
    monkeypatch.setattr(performer_pytorch.causal_linear_attention_noncuda, "__defaults__", (128, 0.0))
    agree(made("linear", shape), made("peer.linear", shape), drawn(shape))


def test_the_authors_linear_attention_gives_what_ours_gives() -> None:
    pytest.importorskip("fast_transformers", reason="needs a C++ compiler to be installed")
    name, shape = "peer.linear.fast-transformers", Shape(batch=2, heads=2, seq_len=64, head_dim=8, causal=True)
    agree(made("linear"), made(name), drawn())
    mine, peer, inputs = build("linear", shape), build(name, shape), [x.detach().float() for x in drawn(shape)]
    for x in inputs:
        x.requires_grad_()
    agree(mine, peer, inputs, rtol=2e-5)  # its kernel knows float32 alone


def test_efficient_attention_agrees_but_for_a_factor() -> None:
    agree(made("efficient"), made("peer.efficient"), drawn(), times=SHAPE.D**0.5)


@pytest.mark.parametrize("name", ["peer.nystrom", "peer.nystrom.transformers"])
def test_nystrom_agrees_where_there_is_one_head_to_take_the_scale_from(name: str) -> None:
    shape = Shape(batch=1, heads=1, seq_len=128, head_dim=8)
    agree(made("nystrom:landmarks=8", shape), made(f"{name}:landmarks=8", shape), drawn(shape))
    two = [made(f"{variant}:landmarks=8") for variant in ("nystrom", name)]
    assert not torch.allclose(*(module(*drawn()) for module in two), rtol=1e-6)


def test_longformer_agrees_up_to_its_softmax_in_float32() -> None:
    agree(made("longformer:window=16,global_tokens=0"), made("peer.longformer:window=16"), drawn(), rtol=2e-6)


def test_longformer_leaves_q_as_it_was() -> None:
    inputs = [x.detach() for x in drawn()]
    before = inputs[0].clone()
    made("peer.longformer:window=16")(*inputs)
    assert torch.equal(inputs[0], before)


def test_bigbird_agrees_where_it_is_given_our_random_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnbench.catalogue.attention.pattern.bigbird import random_blocks

    ours: Any = made("bigbird:block=8,random_blocks=2")
    peer: Any = made("peer.bigbird:block=8,random_blocks=2")
    inputs = drawn()
    assert not torch.allclose(peer(*inputs), ours(*inputs), rtol=1e-3)
    plan = random_blocks(ours.draws).transpose(0, 1)[:, 1:-1].numpy()
    monkeypatch.setattr(peer.peer, "_bigbird_block_rand_mask_with_head", lambda **sizes: list(plan))
    agree(ours, peer, inputs)


def rotations(ours: Any, columns: int) -> Callable[..., Tensor]:
    return lambda size, **kind: ours.rotations[:, 0, :, :columns].to(**kind).reshape(size)


@pytest.mark.parametrize(
    ("name", "scale", "close"), [("peer.reformer", 8**0.5, 1e-9), ("peer.reformer.transformers", 1.0, 1e-4)]
)
def test_reformer_agrees_beyond_the_first_chunk_of_each_round(
    name: str, scale: float, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor √D undoes the one's division, which hashes do not see; the other adds 1e-6 to norms. 16 chunks."""
    shape = Shape(batch=1, heads=1, seq_len=128, head_dim=8)
    ours: Any = made("reformer:chunk=8,rounds=2,correction=false", shape)
    peer: Any = made(f"{name}:chunk=8,rounds=2", shape)
    q, k, v = (x.detach() for x in drawn(shape))
    monkeypatch.setattr(torch, "randn", rotations(ours, 8))
    given = k * scale
    expected, got = ours(q, k, v), peer(q, given, v)
    off = ((expected - got).abs() > close).any(-1).sum()
    assert off <= 2 * 8
    assert off > 0  # they do look back to the last chunk


def test_routing_agrees_on_normalised_inputs_but_for_what_it_adds() -> None:
    """1e-5 to the number of clusters that a token is in."""
    shape = Shape(batch=2, heads=2, seq_len=64, head_dim=8)
    q, k, v = drawn(shape)
    q, k = (torch.nn.functional.layer_norm(x, (8,)).detach() for x in (q, k))
    ours, peer = (made(f"{name}:clusters=4", shape) for name in ("routing", "peer.routing"))
    torch.testing.assert_close(peer(q, k, v), ours(q, k, v), rtol=2e-5, atol=2e-5)


def test_fnet_agrees() -> None:
    x = torch.randn(2, 32, SHAPE.C, dtype=torch.float64, requires_grad=True)
    agree(made("fnet"), made("peer.fnet"), [x])


def test_sinkhorn_answers_with_keys() -> None:
    q, k, v = drawn()
    out = made("peer.sinkhorn:block=8")(q, k, torch.zeros_like(v))
    assert float(out.detach().abs().max()) > 0.01


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("peer.performer:features=16", "formula"),
        ("peer.performer:features=16,draw=own", "unbiased"),
        ("peer.efficient", "average"),
        ("peer.nystrom:landmarks=4", "batch"),
        ("peer.nystrom:landmarks=4", "formula"),
        ("peer.local:window=4", "formula"),
        ("peer.bigbird:block=1,random_blocks=1", "formula"),
        ("peer.sinkhorn:block=1", "average"),
    ],
)
def test_check_finds_what_is_wrong(name: str, law: str) -> None:
    assert check_variant(name, laws=[law]).faults


@pytest.mark.parametrize("name", ["peer.sdpa", "peer.linear", "peer.linformer:rank=4", "peer.fnet"])
def test_check_finds_a_correct_package_correct(name: str) -> None:
    report = check_variant(name, laws=["formula", "implied matrix", "formula's gradients"])
    whole = [finding for finding in report.findings if "causal" not in finding.case]
    assert whole
    assert all(finding.held for finding in whole)


def test_what_needs_a_gpu_says_so() -> None:
    from attnbench import Unsupported

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(Unsupported, match="GPU"):
        build("peer.linear.fla", Shape(causal=True))


def test_each_peer_stands_for_a_variant() -> None:
    names = [name for name in VARIANTS.names() if name.startswith("peer.")]
    assert len(names) == 32
    for name in names:
        entry, ours = VARIANTS.get(name), VARIANTS.get(name.split(".")[1])
        assert (entry.kind, entry.family) == (ours.kind, ours.family)
