"""What methods that drop keys keep of Gaussian inputs, and lose, is what other code computed, with other draws."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.attention.selection.indexed import IndexedAttention
from attnbench.catalogue.attention.selection.kv_budget.quest import Quest
from attnbench.catalogue.build import build
from attnbench.catalogue.engines.gathered.key_index import Index
from attnbench.contract.capabilities import Patterned, Selection, chooser
from attnbench.contract.problem.reference import exact_attention, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.measure.coverage import kept

F64 = torch.float64
N, D = 1024, 64

EXPECTED = {
    "local:window=127": {0.5: (0.800, 0.39, 0.23), 1: (0.893, 0.38, 0.23), 2: (1.053, 0.38, 0.23)},
    "streaming:window=124,sinks=4": {0.5: (0.803, 0.39, 0.23), 1: (0.893, 0.38, 0.23), 2: (1.053, 0.38, 0.23)},
    "quest:budget=256,page=16,prompt=1": {0.5: (0.484, 0.59, 0.43), 1: (0.487, 0.62, 0.43), 2: (0.589, 0.73, 0.43)},
    "indexed:top_k=256": {0.5: (0.436, 0.64, 0.44), 1: (0.264, 0.77, 0.44), 2: (0.073, 0.98, 0.44)},
    "topk:keys=256": {0.5: (0.404, 0.66, 0.44), 1: (0.159, 0.84, 0.44), 2: (0.001, 1.00, 0.44)},
    "oracle-topk:keys=256": {0.5: (0.404, 0.66, 0.44), 1: (0.159, 0.84, 0.44), 2: (0.001, 1.00, 0.44)},
}
"""Relative error, kept mass and share of the triangle of queries and keys that are so many times as large; those of
blocks are in test_chosen_blocks.py. One head was drawn there: the error of a window moves by some hundredths."""


@cache
def gaussian(scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 1, N, D, dtype=F64, generator=generator) for _ in "qkv")
    return [q * scale, k * scale, v]


@cache
def exact(scale: float) -> Tensor:
    return exact_attention(*gaussian(scale), causal=True)


class OfFourKeys(nn.Module):
    """The index of that code: four heads of width 16, each with a random projection of its own for queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(D, 64, dtype=F64, generator=torch.Generator().manual_seed(1))

    def forward(self, q: Tensor, k: Tensor) -> Index:
        own = torch.eye(4, dtype=F64).repeat_interleave(16, 1)  # a head's queries meet its own part of the keys alone
        return Index((q[:, 0] @ self.projection)[:, :, None] * own, k[:, 0] @ self.projection, None)


class Read:
    """Keys read, as a selection."""

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen

    def pairs(self, queries: slice) -> Tensor:
        return self.seen[:, :, queries]


def selection(module: nn.Module, q: Tensor, k: Tensor) -> Selection:
    if isinstance(module, Quest):
        return Read(module.keys_read(q, k, k, 0))  # values do not matter to its choice
    choosing = chooser(module)
    if choosing is not None:
        return choosing.select(q, k)  # type: ignore[no-any-return]  # a Selection, whose kind is the variant's own
    assert isinstance(module, Patterned)
    found = module.pairs_by_place(N, q.device)
    assert found is not None
    return found


@pytest.mark.independent
@pytest.mark.parametrize("text", EXPECTED)
@pytest.mark.parametrize("scale", [0.5, 1, 2])
def test_on_gaussian_inputs_error_and_kept_mass_are_those_that_were_computed_elsewhere(text: str, scale: float) -> None:
    q, k, v = gaussian(scale)
    module = build(text, Shape(4, 1, N, D, causal=True)).double()
    if isinstance(module, IndexedAttention):
        module.index = OfFourKeys()  # type: ignore[assignment]  # not one of its own
    share = kept(selection(module, q, k), q, k, causal=True)
    error, mass, pairs = EXPECTED[text][scale]
    assert (share.mass, share.pairs) == (pytest.approx(mass, abs=0.012), pytest.approx(pairs, abs=0.0051))
    found = relative_error(module(q, k, v), exact(scale))
    assert found == pytest.approx(error, abs=0.05 if mass < 0.5 else 0.03)


@pytest.mark.parametrize(("scale", "plain", "smoothed"), [(0.5, 0.006, 0.003), (1, 0.023, 0.010), (2, 0.055, 0.028)])
def test_rounding_to_8_bits_costs_what_was_computed_elsewhere_and_an_offset_of_keys_twice_that_unless_smoothed(
    scale: float, plain: float, smoothed: float
) -> None:
    q, k, v = gaussian(scale)
    offset = 3 * scale * torch.randn(D, dtype=F64, generator=torch.Generator().manual_seed(1))
    other = exact_attention(q, k + offset, v, causal=True)

    def off(keys: Tensor, smooth: str) -> float:
        module = build(f"quantised:smooth_k={smooth}", Shape(4, 1, N, D, causal=True)).double()
        return relative_error(module(q, keys, v), exact(scale) if keys is k else other)

    within = {0.5: 0.0011, 1: 0.0025, 2: 0.006}[scale]
    without = off(k, "true")
    assert without == pytest.approx(smoothed, abs=within)
    assert off(k + offset, "true") == pytest.approx(without, rel=1e-6)
    # The offset's largest entry decides, of 64 that were drawn once there: 2.4, give or take a sixth.
    unsmoothed = off(k + offset, "false")
    assert unsmoothed == pytest.approx(plain, rel=0.35)
    assert unsmoothed > 1.5 * smoothed
