"""Heads of queries that share a head of keys and values: the same numbers, and nothing repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.shared_heads import SharedHeads
from attnbench.contract.inputs import INPUTS, draw_qkv
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.inside.call import prepare
from attnbench.laws.exact_error import measure_error
from attnbench.measure.memory import peak_tensor_bytes, state_bytes
from attnbench.measure.status import Status
from attnbench.models.encoder import MultiHead, as_layer
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.catalogue.attention.small import built

SHARED = Shape(batch=2, heads=6, kv_heads=2, seq_len=17, head_dim=4)
TRAITS = {name: VARIANTS.get(name).traits for name in VARIANTS.names()}


def qkv(shape: Shape, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw_qkv(Spec("gaussian"), shape, 3)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def test_as_many_heads_of_keys_as_of_queries_change_nothing() -> None:
    """In any setting: parts of a variant may have fewer heads."""
    for name in (name for name, traits in TRAITS.items() if not traits.compiled):
        for setting in VARIANTS.get(name).settings:
            spec, shape = parse_spec(f"{name}:{setting}".rstrip(":")), Shape(heads=4, seq_len=16, head_dim=4)
            try:
                plain = build(spec, shape, seed=0)
            except Unsupported:
                continue
            said = build(spec, replace(shape, kv_heads=4), seed=0)
            assert repr(said) == repr(plain)
            assert {k: v.shape for k, v in said.state_dict().items()} == {
                k: v.shape for k, v in plain.state_dict().items()
            }


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_a_number_that_divides_the_heads_is_taken(heads: int) -> None:
    shape = Shape(heads=6, kv_heads=heads)
    assert (heads, 6 // heads) == (shape.K, shape.G)


@pytest.mark.parametrize(("heads", "near"), [(4, 3), (5, 3), (12, 6)])
def test_any_other_is_refused_with_one_that_is(heads: int, near: int) -> None:
    with pytest.raises(UsageError, match=f"6 heads of queries cannot share {heads} of keys; set kv_heads to {near}"):
        Shape(heads=6, kv_heads=heads)


def test_a_variant_with_turns_refuses_a_bias() -> None:
    with pytest.raises(Unsupported, match="kv_heads: not built here: with a bias or a sink"):
        build("local", replace(SHARED, bias="alibi"))


@pytest.mark.parametrize("name", ["fnet", "gmlp"])
def test_a_mixer_has_no_keys_to_share(name: str) -> None:
    with pytest.raises(Unsupported, match="kv_heads"):
        build(name, SHARED)


@pytest.mark.parametrize(
    ("name", "times"),
    [("softmax", 3), ("sdpa", 3), ("linear", 3), ("retnet", 1)],  # each head of queries of retnet has its own decay
)
def test_a_state_holds_the_shared_heads_alone_if_they_are_all_it_depends_on(name: str, times: int) -> None:
    shape = replace(SHARED, causal=True)
    shared, every = (
        state_bytes(build(name, one).begin(*qkv(one, torch.float32))) for one in (shape, replace(shape, kv_heads=None))
    )
    assert times * shared == every


LONG = Shape(batch=1, heads=8, kv_heads=1, seq_len=4, kv_len=16384, head_dim=32)
BY_QUERY = [name for name, traits in TRAITS.items() if traits.shares == "query by query" and name != "linformer"]


@pytest.mark.parametrize("name", ["softmax", "sdpa", "chunked", *BY_QUERY])
def test_shared_keys_are_not_repeated(name: str) -> None:
    q, k, v = qkv(LONG, torch.float32)
    module = build(name, LONG)
    with torch.inference_mode():
        peak = peak_tensor_bytes(lambda: module(q, k, v))
    assert peak < LONG.G * k.nbytes, f"{peak} bytes beside {k.nbytes} of k"


@pytest.mark.parametrize("name", ["local", "performer", "retnet", "reformer"])
def test_heads_that_take_turns_hold_no_more_than_heads_of_their_own(name: str) -> None:
    shape = Shape(heads=8, kv_heads=2, seq_len=512, head_dim=16, causal=True)
    peaks = []
    for one in (shape, replace(shape, kv_heads=None)):
        q, k, v = qkv(one, torch.float32)
        module = build(name, one)
        with torch.inference_mode():
            peaks.append(peak_tensor_bytes(lambda module=module, given=(q, k, v): module(*given)))
    assert peaks[0] <= peaks[1]


@pytest.mark.parametrize("name", ["performer", "linformer:rank=4,sharing=unshared", "hedgehog"])
def test_what_is_drawn_or_learned_belongs_to_a_shared_head(name: str) -> None:
    module = built(SharedHeads, name, SHARED)
    alone = build(name, replace(SHARED, heads=2, kv_heads=None, kv_len=None))
    assert [x.shape for x in module.parameters()] == [x.shape for x in alone.parameters()]


@pytest.mark.parametrize("name", [one.name for one in INPUTS if not one.make.__module__.endswith("captured_qkv")])
def test_every_input_draws_shared_keys(name: str) -> None:
    q, k, v = draw_qkv(Spec(name), replace(SHARED, head_dim=8), 0)
    assert (q.shape[1], k.shape[1], v.shape[1]) == (6, 2, 2)


@pytest.mark.parametrize("name", ["peaked", "clustered", "banded", "low-rank"])
def test_queries_have_the_structure_of_the_keys_that_they_share(name: str) -> None:
    shape = Shape(heads=4, kv_heads=2, seq_len=64, head_dim=16)
    q, k, _ = draw_qkv(parse_spec(name), shape, 0)
    logits = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT).square().mean((0, 2, 3, 4))
    crossed = (q.unflatten(1, (2, 2)).flip(1) @ k[:, :, None].mT).square().mean((0, 2, 3, 4))
    assert bool((logits > crossed).all())


def test_a_layer_has_narrower_projections_of_keys_and_values() -> None:
    shape = replace(SHARED, seq_len=8)
    layer = as_layer("softmax", shape)
    assert isinstance(layer, MultiHead)
    C, kv = shape.C, shape.K * shape.D
    assert layer.qkv.weight.shape == (C + 2 * kv, C)
    x = torch.randn(2, 8, C)
    q, k, v = (part.unflatten(-1, (-1, shape.D)).transpose(1, 2) for part in layer.qkv(x).split([C, kv, kv], -1))
    expected = layer.out(exact_attention(q, k, v).float().transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected)


def test_layers_of_a_model_tie_what_the_variant_ties() -> None:
    from attnbench.models.encoder import Encoder

    model = Encoder("linformer:rank=4,sharing=layerwise", replace(SHARED, batch=1))
    first, second, *_ = (block.layer.operator.operator for block in model.blocks)
    tied = first.tied
    assert tied
    assert all(getattr(first, name) is getattr(second, name) for name in tied)


def test_a_cell_runs_and_reads_less() -> None:
    shared, every = (
        prepare(Cell("x", "s", Spec("softmax"), shape)) for shape in (SHARED, replace(SHARED, kv_heads=None))
    )
    assert shared.run().shape == every.run().shape
    assert shared.input_bytes * 3 * 6 == every.input_bytes * (6 + 2 * 2)


@pytest.mark.parametrize("name", ["softmax", "linear:chunk=5"])
def test_an_error_is_against_exact_attention_of_the_shared_keys(name: str) -> None:
    result = measure_error(Cell("x", "s", parse_spec(name), SHARED, dtype="float64", error_draws=2))
    assert result.rel_error is not None
    assert (result.rel_error < 1e-12) == (name == "softmax")
    assert result.trivial_error is not None


def test_a_row_of_an_earlier_version_has_a_head_of_keys_for_each_of_queries() -> None:
    row = Record.of(Cell("x", "s", Spec("softmax"), Shape(heads=4, head_dim=8)), Status.OK).to_json()
    older = {name: value for name, value in row.items() if name not in ("kv_heads", "v_dim")}
    read = Record.from_json(older)
    assert (read.kv_heads, read.v_dim) == (4, 8)
    assert read == Record.from_json(row)
