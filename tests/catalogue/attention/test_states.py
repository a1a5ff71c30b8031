"""The content of a decoding state, by the size of its tensors."""

from __future__ import annotations

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS
from attnbench.measure.memory import state_bytes
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, Level

STATES = [
    # numbers for each of two examples' three heads; where a token more takes room, those of 44 tokens
    ("additive:hidden=5", 44 * (5 + 4)),
    ("aft:mode=local,window=5,factors=2", (5 + 1) * 2 * 4),
    ("aft:mode=simple", 2 * 4),
    ("comba:width=1", 4 * 8),
    ("cosformer", 8 * 5),
    ("delta", 4 * 4),
    ("efficient", 4 * 4 + 4),
    ("gated-delta:expand=3", 4 * 12 + 3 * 20),
    ("gated-delta:value_groups=3", 3 * 4 * 8 + 3 * 32),
    ("gated-delta-2:width=2", 4 * 4 + 12),
    ("gla", 4 * 4),
    ("kda", 4 * 4 + 3 * 12),
    ("kernel:sim=poly", 21 * 5),
    ("kernel:sim=poly,order=dense", 44 * 8),
    ("local:window=5", 6 * 8),
    ("local:window=5,dilation=3", 18 * 8),
    ("local:block=7", 7 * 8),
    ("local:block=7,look_around=1", 14 * 8),
    ("local:window=100", 44 * 8),
    ("mamba2:state=5", 2 * 5 * 4 + 3 * (24 + 10) / 3),
    ("perceiver:latents=4", 4 * (1 + 1 + 4 + 4)),
    ("performer:features=16", 16 * 5 + 1),
    ("pooling:pool=6", 5 * 4),
    ("retnet", 4 * 4),
    ("rfa-gated:features=16", 32 * 5),
    ("rwkv7", 4 * 4 + 4),
    ("sparse:pattern=fixed,length=10,summary=2", (4 * 2 + 10) * 8),
    ("sparse:pattern=summary,length=10,summary=2", 4 * 2 * 8),
    ("sparse:pattern=strided,length=4", 44 * 8),
    ("sparse:pattern=stride,length=4", 44 * 8),
    ("ssd:state=5", 5 * 4),
    ("streaming:window=7,sinks=3", (3 + 7) * 8),
    ("streaming:window=7,sinks=3,rotary=true", (3 + 7) * 8),
    ("synthesizer:mode=dense", 44 * 4),
    ("synthesizer:mode=mixture,mixture=random+dot", 44 * 8),
    ("taylor", 21 * 5 + 1),
    ("window-linear:window=3", 8 * 5 + 3 * 8),
]


@pytest.mark.parametrize(("text", "numbers"), STATES)
@torch.no_grad()
def test_a_state_holds_no_more_than_is_read_later(text: str, numbers: float) -> None:
    """After a prompt of 40 tokens, and of 44."""
    module = build(text, Shape(2, 3, 44, 4, causal=True)).double()
    operator = VARIANTS.get(text.partition(":")[0]).kind == "operator"
    inputs = torch.randn((3, 2, 3, 44, 4) if operator else (1, 2, 44, 12), dtype=torch.float64)
    state = module.begin(*inputs[..., :40, :])
    assert state_bytes(state) == 8 * 6 * numbers
    for t in range(40, 44):
        _, state = module.step(state, *inputs[..., t : t + 1, :])
    assert state_bytes(state) == 8 * 6 * numbers


@pytest.mark.parametrize(
    ("text", "level", "stated"),
    [
        ("csa:run=4,window=8,index_dim=4", "layer", (8 + 4) * 4 // 4),
        ("hca:run=16,window=8", "layer", 8 * 4 // 16),
        ("msa:index_dim=6", "operator", 4 * (2 * (8 + 3) + 2 * 6)),
        ("msa:index_dim=6,indexer=learned", "operator", 4 * (2 * (8 + 3) + 6)),
        ("msa:indexer=exact", "operator", 4 * 2 * (8 + 3)),
    ],
)
def test_a_row_says_what_a_token_costs(text: str, level: Level, stated: int) -> None:
    """A part of an entry and of an index key, or a key, a value and what the index keeps. A law holds states to it."""
    shared = {"kv_heads": 2, "v_dim": 3} if level == "operator" else {}
    shape = Shape(batch=1, heads=4, head_dim=8, seq_len=64, causal=True, **shared)
    row = Record.of(Cell("x", "s", parse_spec(text), shape, level=level), Status.OK)
    assert row.kv_bytes_per_token == stated
    assert level == "operator" or row.density is None
