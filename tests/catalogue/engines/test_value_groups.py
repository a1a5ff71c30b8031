"""Heads of values that share a head of queries and keys: the numbers of copied heads, in every operator with gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.decoding.drafts import taken
from attnbench.contract.capabilities import Decoding, Dense
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.reads import draw_reads
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

CORES = [name for name in VARIANTS.names() if VARIANTS.get(name).at("operator").traits.reads]
SHAPE = Shape(batch=2, heads=6, qk_heads=3, seq_len=17, head_dim=4, causal=True)
OWN = [0, 0, 1, 1, 2, 2]


def made(name: str, shape: Shape = SHAPE) -> nn.Module:
    return build(name, shape, seed=0, level="operator").double()


def inputs_of(name: str, shape: Shape = SHAPE) -> list[Tensor]:
    reads = VARIANTS.get(name).at("operator").claims(Spec(name), causal=shape.causal).reads
    return [x.double() for x in (*draw_qkv(Spec("gaussian"), shape, 3), *draw_reads(reads, shape, 3))]


def copied(inputs: list[Tensor]) -> list[Tensor]:
    return [x[:, OWN] if place < 2 else x for place, x in enumerate(inputs)]


@pytest.mark.parametrize("name", CORES)
def test_a_head_reads_the_queries_and_keys_of_its_group(name: str) -> None:
    inputs = [x.requires_grad_() for x in inputs_of(name)]
    assert [x.shape[1] for x in inputs] == [3, 3] + [6] * (len(inputs) - 2)
    together, alone = made(name), made(name, replace(SHAPE, qk_heads=None))
    out, expected = together(*inputs), alone(*copied(inputs))
    assert out.shape == (2, 6, 17, 4)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(cast(Dense, together).dense(*inputs), expected, rtol=1e-7, atol=1e-8)
    direction = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((x * direction).sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", CORES)
def test_token_by_token_it_gives_what_the_whole_sequence_gives(name: str) -> None:
    inputs = inputs_of(name)
    module: Any = made(name)
    expected = made(name, replace(SHAPE, qk_heads=None))(*copied(inputs))[:, :, 8:]
    with torch.no_grad():
        state, outputs = cast(Decoding, module).begin(*(x[:, :, :8] for x in inputs)), []
        out, state = taken(module, state, *(x[:, :, 8:13] for x in inputs))
        outputs.append(out)
        for t in range(13, 17):
            out, state = module.step(state, *(x[:, :, t : t + 1] for x in inputs))
            outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=1e-9, atol=1e-10)


def test_documents_and_both_ways() -> None:
    for change in ({"mask": "document:8+9"}, {"causal": False}):
        shape = replace(SHAPE, **change)  # type: ignore[arg-type]  # the values are those of the fields
        inputs = inputs_of("ssd", shape)
        expected = made("ssd", replace(shape, qk_heads=None))(*copied(inputs))
        torch.testing.assert_close(made("ssd", shape)(*inputs), expected)


def test_the_distance_is_from_attention_of_copied_heads() -> None:
    q, k, v, *_ = inputs_of("gla")
    expected = exact_attention(q[:, OWN], k[:, OWN], v, causal=True)
    torch.testing.assert_close(exact_attention(q, k, v, causal=True), expected)


def test_what_has_no_such_heads_says_why() -> None:
    for name, level in (("sdpa", "operator"), ("gla", "layer"), ("gated-softmax", "layer")):
        with pytest.raises(Unsupported, match="qk_heads: an operator that reads gates has them, at level operator"):
            build(name, SHAPE, level=level)
    with pytest.raises(UsageError, match="and qk_heads those of queries; remove one"):
        Shape(heads=6, kv_heads=3, qk_heads=3)
    with pytest.raises(UsageError, match="6 heads of values cannot share 4 of keys; set qk_heads to 3, say"):
        Shape(heads=6, qk_heads=4)


@pytest.mark.parametrize("pass_", ["forward", "training", "decode", "generate"])
def test_a_row_tells_the_heads_and_counts_the_smaller_input(pass_: str) -> None:
    both = ("time", "memory", *(("error", "own_error") if pass_ == "forward" else ()))
    asked = Cell("s", "w", parse_spec("gated-delta:chunk=4"), SHAPE, pass_=pass_, measure=both)  # type: ignore[arg-type]
    cells = (asked, replace(asked, shape=replace(SHAPE, qk_heads=None)))
    few, all_ = (run_cell(VisitCell(cell, TimingRules(quick=True), 0))[0] for cell in cells)
    assert (few.status, all_.status) == (Status.OK, Status.OK), few.reason
    assert (few.qk_heads, few.heads, all_.qk_heads) == (3, 6, 6)
    assert few.output_bytes == all_.output_bytes or pass_ == "training"
    assert few.state_bytes == all_.state_bytes
    assert (few.input_bytes or 0) < (all_.input_bytes or 0)
    assert few.cell_id != all_.cell_id
    if pass_ == "forward":
        assert few.rel_error
        assert few.own_error is not None
        assert few.own_error < 1e-5
    older = {name: value for name, value in all_.to_json().items() if name != "qk_heads"}
    assert Record.from_json(older) == Record.from_json(all_.to_json())
