"""A kernel of the Hugging Face hub as a variant, with a stand-in for the package that fetches it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.plugins import discovery as plugins
from attnbench.contract.plugins.discovery import load, provenance
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.measure.flops import count

COMMIT = "0123456789abcdef"


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, None]:
    """``(B, N, H, D)``; heads of queries may share keys."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2).bfloat16(), None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The package kernels, which notes what it is asked for, and tables of variants and versions that are put back."""
    calls: list[Any] = []
    kernel, package = ModuleType("flash"), ModuleType("kernels")
    kernel.__file__ = f"/cache/kernels--a/snapshots/{COMMIT}/build/torch/__init__.py"
    vars(kernel)["flash_attn_func"] = flash_attn_func

    def given(*names: str, **named: Any) -> ModuleType:
        calls.append((*names, named))
        return kernel

    vars(package).update(get_kernel=given, get_locked_kernel=given, get_loaded_kernels=list)
    monkeypatch.setitem(sys.modules, "kernels", package)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plugins, "_packages", {})
    monkeypatch.setattr(VARIANTS, "_entries", dict(VARIANTS._entries))
    monkeypatch.chdir(tmp_path)
    return calls


def test_it_is_a_peer_of_sdpa(asked: list[Any]) -> None:
    for _ in range(2):  # the second does nothing
        load("hub:kernels-community/flash-attn3@1")
    assert asked[0] == ("kernels-community/flash-attn3", {"version": 1})
    assert provenance(["hub:kernels-community/flash-attn3@1"])["kernels-community/flash-attn3"] == COMMIT
    entry = VARIANTS.get("peer.sdpa.flash-attn3")
    assert entry.traits.exact
    assert "key_padding" not in entry.options
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 33, width, generator=draws) for heads, width in ((4, 24), (2, 24), (2, 8)))
    for causal in (False, True):
        module: Any = build(entry.name, Shape(2, 4, 33, 24, kv_heads=2, v_dim=8, causal=causal))
        counted = count(lambda: module(*(x.bfloat16() for x in (q, k, v))))  # noqa: B023  # counted at once
        found, exact = counted.output.float(), exact_attention(q, k, v, causal=causal)
        assert (found - exact).norm() < 0.02 * found.norm()
        assert counted.kernel == "kernels-community/flash-attn3"
        pairs = 33 * 34 // 2 if causal else 33 * 33
        assert counted.matmul_flops == 2 * (24 + 8) * 8 * pairs
    with pytest.raises(Unsupported, match="takes bfloat16 and float16, not float32"):
        module(q, k, v)


def test_a_revision_or_a_lock_says_which(asked: list[Any]) -> None:
    load("hub:a/one@main")
    Path("kernels.lock").write_text("{}")
    load("hub:a/two")
    assert asked == [("a/one", {"revision": "main"}), ("a/two", {"lockfile": Path("kernels.lock")})]


def test_without_a_device_it_is_unsupported(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    load("hub:a/three@1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="a/three has kernels for a CUDA device, and there is none"):
        build("peer.sdpa.three", Shape(1, 2, 8, 16))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hub:flash-attn3", "write hub:OWNER/NAME@VERSION, such as hub:kernels-community/flash-attn3@1"),
        ("hub:a/b", "no version; write hub:a/b@1, or name it in kernels.lock by 'kernels lock'"),
        ("hub:a/activation@1", "it has no flash_attn_func, and this is all that is called here; it has gelu"),
        ("hub:a/missing@1", "FileNotFoundError: no build for this system: torch29"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    def given(repository: str, **named: Any) -> Any:
        if repository == "a/missing":
            raise FileNotFoundError("no build for this system:\n torch29")
        return SimpleNamespace(gelu=None, __file__="x.py")

    monkeypatch.setattr(sys.modules["kernels"], "get_kernel", given)
    with pytest.raises(UsageError) as raised:
        load(source)
    assert str(raised.value).startswith(f"plug-in {source}")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_package_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(UsageError) as raised:
        load("hub:kernels-community/flash-attn3@1")
    wanted = (
        "plug-in hub:kernels-community/flash-attn3@1: it needs the package kernels; pip install 'attnbench[kernels]'"
    )
    assert str(raised.value) == wanted
