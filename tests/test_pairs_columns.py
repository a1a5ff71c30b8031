"""Columns that follow from the shape: what a token's key and value take, and the share of pairs that are seen."""

from __future__ import annotations

import pytest

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.measure.memory import state_bytes
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell


def row(shape: Shape, variant: str = "softmax", dtype: str = "float32") -> Record:
    return Record.of(Cell("x", "s", Spec(variant), shape, dtype=dtype), Status.OK)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize(("v_dim", "numbers"), [(None, 32), (48, 64)])
@pytest.mark.parametrize(("dtype", "width"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_token_has_a_key_and_a_value_in_each_shared_head(
    kv_heads: int, v_dim: int | None, numbers: int, dtype: str, width: int
) -> None:
    shape = Shape(heads=8, kv_heads=kv_heads, head_dim=16, v_dim=v_dim, seq_len=4)
    assert row(shape, dtype=dtype).kv_bytes_per_token == kv_heads * numbers * width


def test_a_cache_holds_that_of_each_token() -> None:
    shape = Shape(batch=1, heads=4, kv_heads=2, v_dim=8, head_dim=4, seq_len=10, causal=True)
    q, k, v = draw_qkv(Spec("gaussian"), shape, 0)
    assert state_bytes(build("softmax", shape).begin(q, k, v)) == 10 * (row(shape).kv_bytes_per_token or 0)


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        (Shape(seq_len=8), 1.0),
        (Shape(seq_len=8, causal=True), 36 / 64),
        (Shape(seq_len=8, mask="sliding:1"), 8 / 64),
        (Shape(seq_len=2, q_start=6, causal=True), 15 / 16),
    ],
)
def test_density_is_the_share_of_pairs_that_are_seen(shape: Shape, share: float) -> None:
    assert row(shape).density == share


def test_a_mixer_has_neither() -> None:
    of_mixer = row(Shape(seq_len=8), "fnet")
    assert (of_mixer.kv_bytes_per_token, of_mixer.density) == (None, None)


def test_rows_of_earlier_versions_lack_them_and_are_read() -> None:
    new = ("kv_bytes_per_token", "density", "mask", "q_start", "sink", "kv_heads", "v_dim")
    data = {name: value for name, value in row(Shape(heads=4, head_dim=8)).to_json().items() if name not in new}
    read = Record.from_json(data)
    assert [getattr(read, name) for name in new] == [None, None, "none", 0, "none", 4, 8]
