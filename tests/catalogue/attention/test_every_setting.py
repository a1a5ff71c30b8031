"""What is asked of every variant in each of its settings at more sizes than its laws take, and in more settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.catalogue.engines import tiling
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.laws import LAWS, variant_named
from attnbench.laws.laws import Case, cases, gap, gradients_along
from attnbench.measure.memory import peak_tensor_bytes
from tests.catalogue.attention.small import HOLES

MORE = (
    *(
        f"local:{one}"
        for one in ("window=1", "window=100", "block=1", "block=3,look_around=2", "block=50,look_around=1")
    ),
    *(f"sparse:length={one}" for one in ("1", "5", "400", "5,heads=split", "3,pattern=stride", "13,pattern=stride")),
    *(f"sparse:pattern=fixed,{one}" for one in ("length=3,summary=1", "length=13,summary=2", "length=5,summary=5")),
    *(f"sparse:pattern=summary,{one}" for one in ("length=3,summary=1", "length=5,summary=5", "length=13,summary=2")),
    *(
        f"longformer:{one}"
        for one in ("window=2,dilation=4,global_tokens=0", "window=2,global_tokens=3,projections=own")
    ),
    *("bigbird:block=3,random_blocks=0", "bigbird:block=3,random_blocks=20"),
    "linformer:rank=4,projection=conv,sharing=headwise",
    *("memory-compressed:compression=1", "memory-compressed:compression=40", "memory-compressed:compression=4"),
    *("skyformer:landmarks=7,iterations=2", "skyformer:landmarks=7,sampling=strided"),
    *(f"monarch:{one}" for one in ("block=1", "block=40", "block=4,steps=3", "steps=2")),
    *("hyperattention:block=7,samples=40", "hyperattention:block=3,samples=7,bits=1", "hyperattention:bits=3"),
    *(f"sinkhorn:block=4,{one}" for one in ("iterations=1,temperature=0.3", "sort_cut=1", "sort_cut=2,sort=learned")),
    "sinkhorn:block=4,sort_cut=99",
    *(f"reformer:{one}" for one in ("chunk=5,rounds=3,members=chunk", "chunk=5,buckets=300,members=bucket")),
    *(f"reformer:chunk={one}" for one in ("1,rounds=2", "3,buckets=300", "8,buckets=6", "64,rounds=1")),
    *("clustered:clusters=2,improved=99", "clustered:improved=2", "clustered:clusters=3,bits=4"),
    *("routing:clusters=4,kmeans=3", "routing:clusters=2,window=5", "routing:clusters=3,window=2,kmeans=1"),
    "thinformer:oversampling=0,failure=0.01",
    *(f"synthesizer:mode=mixture,mixture={one}" for one in ("random+dense", "random+dot", "dense+dot")),
    *("aft:mode=local,window=0,factors=0", "aft:mode=conv,kernel=1", "aft:mode=local,window=1,factors=0"),
    *("topk:keys=4", "topk:keys=2,chunk=1", "topk:keys=100,chunk=3"),
    *("oracle-topk:keys=1", "oracle-topk:keys=4", "oracle-topk:keys=100", "oracle-lowrank:rank=1"),
    *("chunked:query_chunk=1,key_chunk=1", "chunked:query_chunk=3,key_chunk=3", "chunked:query_chunk=4,key_chunk=1000"),
    *(f"csa:run={one},q_rank=5,index_heads=2,index_dim=5" for one in ("1,window=1,top_k=3", "40,window=3,top_k=2")),
    *("hca:run=1,window=1", "hca:run=7,window=30", "hca:run=40,window=3"),
    *(f"nsa:{one}" for one in ("block=8,length=4,stride=1,top_n=1", "block=3,length=40,stride=1,top_n=5")),
    *("nsa:block=2,length=6,stride=2,top_n=7", "nsa:block=4,length=4,stride=2,window=40,top_n=40"),
    *(
        "linear:chunk=1",
        "linear:chunk=7",
        "efficient:chunk=1",
        "efficient:chunk=64",
        "taylor:chunk=7",
        "hedgehog:chunk=7",
    ),
    *("retnet:chunk=1", "retnet:chunk=22,rotation=false", "performer:features=11,chunk=3", "cosformer:chunk=7"),
    *("performer:features=11,kernel=hyperbolic,chunk=64", "performer:features=11,kernel=relu,chunk=1"),
    *(
        "rfa:features=11,chunk=64,temperature=0.8",
        "rfa:features=11,kernel=arccos",
        "favor-plus-plus:features=11,spread=4.0",
    ),
    *("lara:landmarks=1", "lara:landmarks=40", "pooling:pool=3", "pooling:pool=41"),
    *("additive:hidden=3,chunk=1", "fox:chunk=1", "fox:chunk=23", "streaming:window=100,sinks=0"),
    *("per-head:parts=1*sparse[length=4]+local[block=5]", "per-head:parts=local[window=3]+softmax"),
    *(f"window-linear:window={one}" for one in ("0,chunk=4", "5,features=taylor,chunk=3", "40,features=elu+1,chunk=7")),
    *("mamba2:state=5,chunk=7,groups=2", "gated-delta:chunk=5,negative=true", "gated-delta-2:negative=true,width=2"),
)
"""Settings beside those of the registry, which are held to the laws."""

LABELS = [
    entry.name
    for entry in VARIANTS
    if entry.make.__module__.startswith("attnbench.catalogue.attention.") and not entry.traits.compiled
]
each = pytest.mark.parametrize("label", [*LABELS, *MORE])
LENGTHS = (1, 3, 12, 41)
SMALL = {
    "attnbench.catalogue.attention.synthetic.aft.modes._ROWS": 8,
    "attnbench.catalogue.attention.synthetic.aft.sums._RUN": 4,
    "attnbench.catalogue.attention.selection.compressed.csa.ROWS": 3,
    "attnbench.catalogue.attention.selection.compressed.hca.ROWS": 3,
    "attnbench.catalogue.attention.pairwise.deltaformer._ROWS": 4,
    "attnbench.catalogue.attention.kernel.efficient._ROWS": 7,
    "attnbench.catalogue.attention.synthetic.gmlp._ROWS": 8,
    "attnbench.catalogue.attention.selection.hyperattention.causal_blocks._ROWS": 2,
    "attnbench.catalogue.attention.selection.nsa._ROWS": 3,
    "attnbench.catalogue.attention.kernel.window_linear.STRETCH": 4,
    "attnbench.catalogue.attention.low_rank.perceiver._SEGMENT": 8,
    "attnbench.catalogue.engines.gathered.key_index._LESSON_ROWS": 3,
    "attnbench.catalogue.engines.recurrent.stretches.STRETCH": 8,
    "attnbench.catalogue.engines.recurrent.stretches.KEPT": 2,
}
"""Sizes of pieces that the 23 tokens of a law fit into -> ones that they do not."""


def cases_of(label: str) -> Iterator[Case]:
    yield from cases(variant_named(label))


def differs(case: Case, shape: Shape, mask: torch.Tensor | None) -> str:
    """How far the real outputs are from the formula, if they are."""
    try:
        module = case.module(shape)
    except (Unsupported, UsageError):  # a setting may be for fewer tokens
        return ""
    inputs, oracle = case.draw(shape), case.oracle(module)
    if oracle is None:
        return ""
    found = [f(*inputs) if mask is None else f(*inputs, key_mask=mask) for f in (module, oracle)]
    if mask is not None and shape.M == shape.N:
        found = [x.masked_fill(~case.real(mask), 0.0) for x in found]
    far = gap(*found)
    return (
        "" if far <= 10 * case.close else f"{case}: {far:.2g} at n = {shape.N}, m = {shape.M}, mask {mask is not None}"
    )


@each
def test_every_length_with_any_padding_gives_the_formula(label: str) -> None:
    faults = []
    for case in cases_of(label):
        for n in LENGTHS:
            holes = torch.rand(2, n) < torch.tensor([[0.6], [-1.0]])  # no token of the second example is real
            for mask in (None, holes, holes.flip(1)) if case.traits.key_padding else (None,):
                faults.append(differs(case, replace(case.shape, seq_len=n), mask))
    assert list(filter(None, faults)) == []


@each
def test_keys_of_another_sequence_give_the_formula(label: str) -> None:
    faults = []
    for case in cases_of(label):
        if case.causal or not case.traits.cross or not case.operator:
            continue
        for n, m in ((9, 31), (31, 9), (4, 2), (2, 17)):
            holes = torch.rand(2, m) < torch.tensor([[0.6], [-1.0]])
            for mask in (None, holes) if case.traits.key_padding else (None,):
                faults.append(differs(case, replace(case.shape, seq_len=n, kv_len=m), mask))
    assert list(filter(None, faults)) == []


@pytest.mark.parametrize("label", [*LABELS, *(pytest.param(label, marks=pytest.mark.slow) for label in MORE)])
@pytest.mark.parametrize("numbers", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_small_pieces_give_the_formula_and_its_gradients(
    label: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in tiling.TUNED:
        monkeypatch.setitem(tiling.TUNED, name, tiling.Tuned(numbers, 1))
    for name, size in SMALL.items():
        monkeypatch.setattr(name, size)
    for case in cases_of(label):
        try:
            module = case.module()
        except Unsupported:
            continue
        oracle, inputs = case.oracle(module), case.draw(grad=True)
        if oracle is None:
            continue
        wanted = [*inputs, *(x for x in module.parameters() if x.requires_grad)]
        for mask in (None, HOLES) if case.traits.key_padding else (None,):
            real = 1.0 if mask is None else case.real(mask).to(case.dtype)
            found = []
            for function in (module, oracle):
                out = (function(*inputs) if mask is None else function(*inputs, key_mask=mask)) * real
                direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
                found.append([out.detach(), *gradients_along(out, wanted, direction)])
            for one, other in zip(*found, strict=True):
                assert gap(one, other.nan_to_num()) <= 100 * case.close, f"{case}, mask {mask is not None}"


@each
def test_a_bias_is_learned_as_in_the_formula_and_decoding_adds_it(label: str) -> None:
    for case, kind in product(cases_of(label), ("alibi", "relative")):
        shape = replace(case.shape, bias=kind)
        if not case.traits.bias or case.oracle(case.module(shape)) is None:
            continue
        module, inputs = case.module(shape), case.draw(shape, grad=True)
        wanted = [*inputs, *([] if case.traits.exact else module.parameters())]  # softmax's formula has its own table
        for mask in (None, HOLES) if case.traits.key_padding else (None,):
            real, found = 1.0 if mask is None else case.real(mask).to(case.dtype), []
            for out in (module(*inputs, key_mask=mask), case.expected(module, inputs, shape, mask)):
                direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
                found.append([(out * real).detach(), *gradients_along(out * real, wanted, direction)])
            for one, other in zip(*found, strict=True):
                assert gap(one, other.nan_to_num()) <= 100 * case.close, f"{case}, {kind}, mask {mask is not None}"
        if case.causal and case.traits.decode:
            with torch.no_grad():
                expected, state = module(*inputs), module.begin(*(x[..., :3, :] for x in inputs))
                for t in range(3, shape.N):
                    out, state = module.step(state, *(x[..., t : t + 1, :] for x in inputs))
                    assert gap(out, expected[..., t : t + 1, :]) <= 10 * case.close, f"{case}, {kind}: token {t}"


@pytest.mark.parametrize("room", [5, 30])
@each
@torch.no_grad()
def test_decoding_gives_what_forward_gives_however_many_tokens_were_expected(label: str, room: int) -> None:
    for case in cases_of(label):
        by_room = case.spec.name == "reformer" and "buckets" not in dict(case.spec.options) and room < 30
        if by_room or not (case.causal and case.traits.decode and case.traits.longer):
            continue  # a reformer has as many buckets as its room has chunks, unless they are counted
        try:
            module, inputs = case.module(replace(case.shape, seq_len=room)), case.draw(replace(case.shape, seq_len=30))
            module.begin(*(x[..., :1, :] for x in inputs))
        except (Unsupported, UsageError):  # a setting may be for more tokens, or for whole sequences
            continue
        expected = module(*inputs)
        for prompt in (0, 1, 13, 29):
            state = module.begin(*(x[..., :prompt, :] for x in inputs))
            for t in range(prompt, 30):
                token = [x[..., t : t + 1, :] for x in inputs]
                module.step(state, *token)  # takes nothing from the state
                out, state = module.step(state, *token)
                assert gap(out, expected[..., t : t + 1, :]) <= 10 * case.close, f"{case}: token {t} after {prompt}"


def padded_training_bytes(label: str, n: int, causal: bool) -> int:
    entry = VARIANTS.get(parse_spec(label).name)
    module, mask = build(label, Shape(1, 1, n, 8, causal=causal)), torch.arange(n)[None] < n - 5
    shapes = [(1, 1, n, 8)] * 3 if entry.kind == "operator" else [(1, n, 8)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return peak_tensor_bytes(lambda: module(*inputs, key_mask=mask).sum().backward()) or 0


GROWING = (
    *("chunked:query_chunk=32,key_chunk=128", "memory-compressed", "perceiver", "skyformer", "linformer:rank=16"),
    *(f"linformer:rank=16,projection={one}" for one in ("mean-pool", "conv")),
    *("streaming:rotary=true,window=64", "msa:block=16,blocks=2,index_dim=4,indexer=learned"),
    "msa:block=16,blocks=2,indexer=exact",
    *(f"msa:block=16,blocks=2,index_dim=4,index_heads=2,score=relu{more}" for more in ("", ",indexer=learned")),
    *("indexed:indexer=learned,top_k=32,index_dim=8", "window-linear:window=16,chunk=16"),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "label",
    [
        *("clustered:iterations=2,clusters=16,improved=8", "routing:kmeans=2"),
        *(pytest.param(label, marks=pytest.mark.slow) for label in GROWING),
    ],
)
def test_the_memory_of_training_with_padding_grows_with_the_length(label: str, causal: bool) -> None:
    if causal and not VARIANTS.get(parse_spec(label).name).traits.causal:
        return
    assert 0 < padded_training_bytes(label, 4096, causal) <= 4.3 * padded_training_bytes(label, 1024, causal)


LAWS_OF_ANY_SETTING = (
    *("average", "any length", "batch", "blind query", "causality", "decoding", "finite differences", "gradient modes"),
    *("formula's gradients", "hidden keys", "large inputs", "padding", "strides"),
)
"""Others ask that options matter, which those of few tokens need not."""
BUT = {
    "reformer:chunk=5,rounds=3,members=chunk": "causality",  # chunks of the paper read later tokens through borders
}


@pytest.mark.slow
@pytest.mark.parametrize("label", MORE)
def test_the_laws_hold_in_more_settings(label: str) -> None:
    laws = [LAWS[name] for name in LAWS_OF_ANY_SETTING if name != BUT.get(label)]
    found = [one for case in cases_of(label) for law in laws if law.concerns(case) for one in law.examine(case)]
    assert found
    assert [f"{one.law}: {one.case}: {one.fault}" for one in found if not one.held] == []
