"""Masks of places and later queries: what exact attention makes of them, and at which cost."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.inputs import INPUTS, draw_qkv
from attnbench.contract.problem.reference import mean_of_visible
from attnbench.contract.problem.shape import Shape
from attnbench.contract.problem.visible import Visible
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported
from attnbench.harness.inside.call import prepare
from attnbench.laws.exact_error import measure_error
from attnbench.measure.flops import count
from attnbench.measure.memory import peak_tensor_bytes
from attnbench.models.encoder import as_layer
from attnbench.suite.cell import Cell

MASKS = ["prefix:9", "document:4+9", "sliding:6"]
SHAPE = Shape(batch=2, heads=4, seq_len=23, head_dim=4)


def qkv(shape: Shape, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw_qkv(Spec("gaussian"), shape, 3)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def sees(shape: Shape, i: int, j: int) -> bool:
    kind, _, sizes = shape.mask.partition(":")
    if kind == "prefix":
        return j <= i or j < int(sizes)
    if shape.causal and j > i:
        return False
    if kind == "sliding":
        return abs(i - j) < int(sizes)
    if kind == "document":
        ends = [4, 13, 17, 26, 30, 39]
        assert sizes == "4+9"
        return sum(end <= i for end in ends) == sum(end <= j for end in ends)
    return True


LONG = Shape(batch=1, heads=1, seq_len=4096, head_dim=16)


@pytest.mark.parametrize("name", [one.name for one in VARIANTS if one.traits.decode and one.traits.mask])
def test_a_prompt_that_ends_within_a_prefix_is_refused(name: str) -> None:
    shape = replace(SHAPE, mask="prefix:9")
    if VARIANTS.get(name).kind == "mixer":
        prompt: list[Tensor] = [torch.randn(2, 23, shape.C)]
    else:
        prompt = list(qkv(shape, torch.float32))
    module = copy.deepcopy(build(f"{name}:order=dense" if name == "kernel" else name, shape))
    for n in (0, 8):
        with pytest.raises(Unsupported, match=f"a prompt of {n} tokens ends within; give a prompt of 9 tokens or more"):
            module.begin(*(x[..., :n, :] for x in prompt))
    module.begin(*(x[..., :9, :] for x in prompt))
    layer = as_layer(f"{name}:order=dense" if name == "kernel" else name, shape)
    with pytest.raises(Unsupported, match="ends within"):
        layer.begin(torch.randn(2, 8, shape.C))


@pytest.mark.parametrize("mask", ["sliding:64", "document:64"])
@pytest.mark.parametrize("text", ["chunked", "sdpa"])
def test_hidden_blocks_are_not_computed(text: str, mask: str) -> None:
    shape = replace(LONG, mask=mask)
    q, k, v = qkv(shape, torch.float32)
    module, whole = build(text, shape), build(text, LONG)
    with torch.inference_mode():
        some, every = (count(lambda one=one: one(q, k, v)).matmul_flops for one in (module, whole))
        assert some < every / 4
        peak = peak_tensor_bytes(lambda: module(q, k, v))
    assert peak is not None
    assert peak < shape.N**2  # bytes: a mask of all pairs alone would have as many


def test_memory_of_many_queries_of_a_short_window_grows_with_n_alone() -> None:
    peaks = []
    for n in (2048, 8192):
        shape = replace(LONG, seq_len=n, mask="sliding:64")
        q, k, v = qkv(shape, torch.float32)
        module = build("sdpa", shape)
        with torch.inference_mode():
            peaks.append(peak_tensor_bytes(lambda module=module, given=(q, k, v): module(*given)))
    assert peaks[1] < 5 * peaks[0]


def test_whoever_hides_no_pairs_says_why() -> None:
    for name in VARIANTS.names():
        traits = VARIANTS.get(name).traits
        assert traits.mask or len(traits.mask) > 20, name
        if not traits.mask and VARIANTS.get(name).kind == "operator":
            with pytest.raises(Unsupported, match="mask: "):
                build(name, replace(SHAPE, mask="sliding:4"))


@pytest.mark.parametrize("mask", ["none", *MASKS])
def test_the_mean_of_what_is_seen_is_a_mean_over_the_pairs(mask: str) -> None:
    shape = replace(SHAPE, causal=True, mask=mask, q_start=5)
    _, _, v = qkv(shape)
    seen = torch.tensor([[sees(shape, 5 + i, j) for j in range(shape.M)] for i in range(shape.N)]).double()
    expected = seen / seen.sum(1, keepdim=True) @ v
    torch.testing.assert_close(mean_of_visible(v, shape.N, causal=Visible.of(shape)), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_an_error_is_against_the_pairs_that_are_seen(mask: str) -> None:
    for text, exact in (("softmax", True), ("mean-value", False)):
        cell = Cell("x", "s", parse_spec(text), replace(SHAPE, mask=mask), dtype="float64", error_draws=1)
        if exact:
            error = measure_error(cell).rel_error
            assert error is not None
            assert error < 1e-12
        elif mask.startswith("document"):  # the mean of a document is the trivial answer itself
            found = measure_error(cell)
            assert found.rel_error == pytest.approx(found.trivial_error, abs=1e-12)
        else:
            with pytest.raises(Unsupported):
                measure_error(cell)


def test_peaked_queries_look_at_keys_that_they_see() -> None:
    shape = replace(SHAPE, head_dim=64, mask="sliding:4", causal=True, q_start=3)
    q, k, _ = draw_qkv(parse_spec("peaked:structure=1.0,logit_std=9.0"), shape, 0)
    chosen = (q @ k.mT).argmax(-1) - 3 - torch.arange(shape.N)
    assert int(chosen.max()) <= 0
    assert int(chosen.min()) > -4


@pytest.mark.parametrize("name", [one.name for one in INPUTS if not one.make.__module__.endswith("captured_qkv")])
def test_every_input_has_later_queries(name: str) -> None:
    q, k, v = draw_qkv(Spec(name), replace(SHAPE, head_dim=8, causal=True, q_start=9), 0)
    assert (q.shape[2], k.shape[2], v.shape[2]) == (23, 32, 32)


def test_a_cell_of_later_queries_reads_all_keys() -> None:
    call = prepare(Cell("x", "s", Spec("softmax"), replace(SHAPE, causal=True, q_start=9)))
    assert call.run().shape == (2, 4, 23, 4)
    assert call.input_bytes == 4 * 2 * 4 * 4 * (23 + 2 * 32)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Cell("x", "s", Spec("softmax"), replace(SHAPE, causal=True, q_start=9), padding=0.5), "padding: "),
        (Cell("x", "s", Spec("softmax"), replace(SHAPE, causal=True, q_start=9), pass_="decode"), "q_start: "),
        (
            Cell("x", "s", Spec("linear"), replace(SHAPE, causal=True, q_start=9)),
            "q_start: not built here: its first query",
        ),
        (Cell("x", "s", parse_spec("flex:window=4"), replace(SHAPE, mask="sliding:3")), "its window is a mask"),
    ],
    ids=["padding", "decode", "linear", "flex"],
)
def test_what_has_no_meaning_is_refused(cell: Cell, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        prepare(cell)
