from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnbench.catalogue.attention.exact.quantised_cache import QuantisedCache
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import Unsupported
from attnbench.harness.inside.call import prepare
from attnbench.measure.status import Status
from attnbench.results.record import Record
from attnbench.suite.cell import Cell
from tests.catalogue.attention.small import built, close

F64 = torch.float64
HOLES = torch.arange(23) % 9 != torch.tensor([[1], [3]])
both = pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
each = pytest.mark.parametrize(("bits", "group", "recent"), [(2, 5, 0), (3, 3, 4), (8, 2, 7), (1, 1, 1), (2, 40, 0)])


def make(causal: bool, bits: int, group: int, recent: int) -> QuantisedCache:
    shape = Shape(2, 2, 23, 4, causal=causal)
    return built(QuantisedCache, "quantised-cache", shape, bits=bits, group=group, recent=recent).double()


def draw(n: int = 23, d: int = 4) -> list[Tensor]:
    return [torch.randn(2, 2, n, d, dtype=F64) for _ in "qkv"]


def coarse(numbers: list[float], bits: int) -> list[float]:
    least, step = min(numbers), (max(numbers) - min(numbers)) / (2**bits - 1)
    return [least + round((x - least) / step) * step if step else least for x in numbers]


def by_hand(m: QuantisedCache, bits: int, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
    """Query by query: number by number what a cache holds when it is read."""
    out = torch.zeros_like(v)
    for b, h, t in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(23)).tolist():
        seen = [j for j in range(t + 1 if m.causal else 23) if real[b, j]]
        keys, values = k[b, h].clone(), v[b, h].clone()
        for a in range(0, 23 - m.group + 1, m.group):
            members = range(a, a + m.group)
            newer = [j for j in seen if j >= a + m.group]
            if all(j in seen for j in members) and len(newer) >= m.recent:
                for c in range(4):
                    keys[a : a + m.group, c] = torch.tensor(
                        coarse(k[b, h, a : a + m.group, c].tolist(), bits), dtype=F64
                    )
                for j in members:
                    for c in range(0, 4, m.group):
                        values[j, c : c + m.group] = torch.tensor(
                            coarse(v[b, h, j, c : c + m.group].tolist(), bits), dtype=F64
                        )
        if seen:
            out[b, h, t] = (keys[seen] @ q[b, h, t] / 2).softmax(0) @ values[seen]
    return out


@both
@each
def test_a_full_group_that_is_old_enough_is_read_rounded(causal: bool, bits: int, group: int, recent: int) -> None:
    module, inputs = make(causal, bits, group, recent), draw()
    for mask in (None, HOLES):
        real = torch.ones(2, 23, dtype=torch.bool) if mask is None else mask
        expected = by_hand(module, bits, *inputs, real) * real[:, None, :, None]
        close(module(*inputs, key_mask=mask) * real[:, None, :, None], expected)
        close(module.dense(*inputs, key_mask=mask) * real[:, None, :, None], expected)


def test_a_channel_that_is_large_for_all_keys_costs_nothing() -> None:
    """What all keys have in common moves the least numbers alone; by token it would take the steps from all others."""
    q, k, v = (torch.randn(1, 2, 256, 32, dtype=F64) for _ in "qkv")
    shifted = k + torch.nn.functional.one_hot(torch.tensor(5), 32) * 100.0
    module = built(QuantisedCache, "quantised-cache", Shape(1, 2, 256, 32), bits=2, recent=0)
    exact = exact_attention(q, k, v)
    alike = relative_error(module(q, shifted, v), exact) / relative_error(module(q, k, v), exact)
    assert alike == pytest.approx(1, abs=1e-6)
    by_channel, by_token = (rounded(shifted) for rounded in (module._rounded_keys, module._rounded_values))
    assert relative_error(by_token, shifted) < 0.15  # it looks small
    off = [relative_error(exact_attention(q, keys, v), exact) for keys in (by_channel, by_token)]
    assert off[1] > 1.5 * off[0]


def test_the_bytes_of_a_token_are_those_of_its_bits_and_steps() -> None:
    shape = Shape(1, 4, 64, 64, causal=True)
    row = Record.of(Cell("x", "s", parse_spec("quantised-cache:bits=2,group=32"), shape), Status.OK)
    # 128 numbers of 2 bits; 2 numbers of 4 bytes for each of 64 channels of 32 tokens, and for 2 groups of a value.
    assert row.kv_bytes_per_token == 4 * (128 * 2 // 8 + 2 * 4 * 64 // 32 + 2 * 4 * 2)


def test_time_and_memory_of_an_emulation_are_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match=r"^time and memory: numbers are rounded to a few bits and kept as float32"):
        prepare(Cell("s", "t", parse_spec("quantised-cache"), Shape(1, 1, 32, 8)))
