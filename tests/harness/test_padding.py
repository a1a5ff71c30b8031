from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnbench.contract.problem.padding import checked, key_mask, real_tokens
from attnbench.contract.problem.reference import mean_of_visible
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.contract.variant import VARIANTS, No
from attnbench.errors import UsageError
from attnbench.harness.inside.call import prepare
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.wire.protocol import VisitCell
from attnbench.laws.exact_error import measure_error
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.results.record import Record
from attnbench.suite.cell import Cell

SHAPE = Shape(batch=1, heads=2, seq_len=64, head_dim=8)


def cell(variant: str = "softmax", **given: Any) -> Cell:
    given = {"shape": SHAPE, "padding": 0.5, "dtype": "float64", **given}
    return Cell("s", "w", parse_spec(variant), **given)


def measured(one: Cell) -> Record:
    return run_cell(VisitCell(one, TimingRules(quick=True)))[0]


@pytest.mark.parametrize("padding", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("batch", [1, 2, 5, 32])
def test_the_batch_has_the_share_of_padding_that_was_asked_for_and_its_examples_differ(
    batch: int, padding: float
) -> None:
    lengths = real_tokens(batch, 1000, padding)
    assert sum(lengths) / (batch * 1000) == pytest.approx(1 - padding, abs=2e-3)
    assert len(set(lengths)) == batch
    assert min(lengths) >= 1
    assert max(lengths) <= 1000


def test_no_example_is_all_padding() -> None:
    assert real_tokens(4, 3, 0.99) == [1, 1, 1, 1]


def test_without_padding_there_is_no_mask_and_every_token_is_real() -> None:
    assert key_mask(SHAPE, 0.0) is None
    assert real_tokens(3, 7, 0.0) == [7, 7, 7]


def test_padding_follows_the_real_tokens() -> None:
    mask = key_mask(replace(SHAPE, batch=4, seq_len=8), 0.5)
    assert mask is not None
    assert mask.tolist() == [[i < n for i in range(8)] for n in (1, 3, 5, 7)]


@pytest.mark.parametrize("variant", ["linear", "local:window=5", "performer:features=16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_error_with_padding_is_that_of_the_shorter_input(variant: str, causal: bool) -> None:
    long = replace(SHAPE, causal=causal)
    short = replace(long, seq_len=32)

    def first_half(*_: Any) -> Any:
        return [x[:, :, :32] for x in torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0))]

    from attnbench.laws import exact_error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_error, "draw_qkv", lambda inputs, shape, seed: first_half() if shape is short else _whole())
        patch.setattr(exact_error, "_KEPT_ELEMENTS", 0)  # nothing is kept: the draws are not those of the input's name
        padded = measure_error(cell(variant, shape=long, error_draws=1))
        alone = measure_error(cell(variant, shape=short, error_draws=1, padding=0.0))
    assert padded.rel_error == pytest.approx(alone.rel_error, rel=1e-9)
    assert padded.trivial_error == pytest.approx(alone.trivial_error, rel=1e-12)
    assert padded.rel_error is not None
    assert padded.rel_error > 1e-3


def _whole() -> list[torch.Tensor]:
    return list(torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0)))


def test_in_cross_attention_only_keys_are_padded_and_every_query_is_compared() -> None:
    result = measure_error(cell(shape=replace(SHAPE, seq_len=16, kv_len=64), error_draws=1))
    assert result.rel_error is not None
    assert result.rel_error < 1e-14


def test_the_trivial_answer_of_a_query_that_sees_nothing_is_zero() -> None:
    v = torch.ones(1, 1, 2, 3)
    mask = torch.tensor([[False, True]])
    assert mean_of_visible(v, 2, causal=True, key_mask=mask)[0, 0, :, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("pass_", ["forward", "backward", "training"])
@pytest.mark.parametrize("level", ["operator", "layer", "model"])
def test_padding_is_timed_at_every_level(level: Any, pass_: Any) -> None:
    record = measured(cell("linear", level=level, pass_=pass_, shape=replace(SHAPE, batch=4)))
    assert (record.status, record.reason) == (Status.OK, "")
    assert record.padding == 0.5
    assert record.tokens_per_s == pytest.approx(4 * 32 / record.time_median_s)  # type: ignore[operator]


def test_padded_tokens_get_no_gradient() -> None:
    one = cell("softmax", pass_="training", shape=SHAPE)
    gradients = prepare(one).run()
    for gradient in gradients[:3]:
        assert gradient[:, :, :32].abs().amin() > 0
        assert gradient[:, :, 32:].abs().amax() == 0


def test_what_takes_no_padding_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = VARIANTS.get("softmax")
    refusing = replace(entry, traits=replace(entry.traits, key_padding=No("it reads every key")))
    monkeypatch.setitem(VARIANTS._entries, "softmax", refusing)
    record = measured(cell())
    assert (record.status, record.reason) == (Status.UNSUPPORTED, "key padding: it reads every key")


def test_cells_without_padding_keep_the_ids_that_they_had() -> None:
    assert cell(padding=0.0).cell_id == Cell("s", "w", Spec("softmax"), shape=SHAPE, dtype="float64").cell_id
    assert cell(padding=0.5).cell_id != cell(padding=0.0).cell_id
    assert Cell.from_json(cell().to_json()) == cell()


@pytest.mark.parametrize("share", [1.0, -0.5, 2.0, float("nan"), float("inf")])
def test_a_share_that_leaves_no_token_or_is_none_is_refused(share: float) -> None:
    assert checked(0.5) == 0.5
    with pytest.raises(UsageError, match="padding must be at least 0 and below 1"):
        checked(share)
