"""The pattern of a variant is what its formula lets each query see."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.cli.app import main
from attnbench.contract.capabilities import Dense
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import FAMILIES, VARIANTS
from attnbench.errors import Unsupported, UsageError
from attnbench.figures.kit.style import BESIDE
from attnbench.figures.pictures import draw, pattern
from attnbench.figures.pictures.pattern import _legend, density, draw_pattern, shipped
from attnbench.figures.pictures.picture import FAINTEST, by_share
from attnbench.laws.implied import formula_of, implied, mixes_channels, random_weights, reach, small_setting

Sees = Callable[[int, int], bool]


@pytest.mark.parametrize(
    ("setting", "causal", "sees"),
    [
        ("local:window=3", False, lambda i, j: abs(i - j) <= 3),
        ("local:block=4", True, lambda i, j: i // 4 == j // 4 and j <= i),
        ("softmax", True, lambda i, j: j <= i),
        ("longformer:window=2,global_tokens=1", False, lambda i, j: abs(i - j) <= 2 or i == 0 or j == 0),
    ],
)
def test_a_pattern_is_the_pairs_that_the_formula_allows(setting: str, causal: bool, sees: Sees) -> None:
    weights = random_weights(parse_spec(setting), 24, causal=causal)
    assert (weights > 0).tolist() == [[sees(i, j) for j in range(24)] for i in range(24)]


def test_the_numbers_of_the_picture_are_the_shares_of_each_rows_largest_weight() -> None:
    table = draw_pattern(["local:window=1"], n=6, causal=True).numbers
    weights = random_weights(parse_spec("local:window=1"), 6, causal=True).numpy()
    drawn = table[[f"key_{j}" for j in range(6)]].to_numpy()
    assert drawn == pytest.approx(weights / weights.max(1, keepdims=True))
    assert list(table["query"]) == list(range(6))
    assert set(table["variant"]) == {"local:window=1"}
    assert table["causal"].all()
    assert density(drawn) == 11 / 36  # two keys for each query but the first


def test_a_matrix_wider_than_a_head_comes_out_whole() -> None:
    q, k = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (7, 10))
    found = implied(exact_attention, q, k)
    expected = (q @ k.mT / 2).softmax(-1)[0]
    assert found.shape == (2, 7, 10)
    assert float((found - expected).abs().max()) < 1e-14


def test_a_matrix_lies_on_the_device_of_the_queries() -> None:
    q = torch.empty(1, 2, 5, 4, device="meta")
    assert implied(lambda q, k, v: v, q, q).device == q.device


def test_a_mixer_with_a_formula_is_drawn_from_the_formula() -> None:
    module = build("gmlp", Shape(heads=1, head_dim=8, seq_len=32))
    assert isinstance(module, Dense)
    assert formula_of(VARIANTS.get("gmlp"), module, False) == module.dense


def test_a_causal_mixer_is_moved_by_no_later_token() -> None:
    weights = random_weights(small_setting("gla"), 12, causal=True)
    assert float(weights.triu(1).abs().max()) == 0
    assert float(weights.diagonal().min()) > 0


class Doubled(torch.autograd.Function):
    """A function that knows its gradient in one direction at a time."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, along: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.from_numpy(2 * along.numpy())


@pytest.mark.parametrize("doubled", [lambda x: 2 * x, Doubled.apply])
def test_each_output_is_moved_by_the_tokens_that_it_is_made_of(doubled: Callable[..., torch.Tensor]) -> None:
    weights = torch.randn(40, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tril()
    found = reach(lambda x: doubled(weights @ x), torch.ones(1, 40, 3, dtype=torch.float64))
    assert found / found[0, 0] == pytest.approx((weights / weights[0, 0]).abs())


def test_a_name_alone_is_drawn_at_its_first_setting_and_one_with_options_at_these() -> None:
    assert small_setting("local").label == "local:window=3"
    assert small_setting("local:window=5").label == "local:window=5"


def test_the_sheet_has_every_variant_of_the_catalogue() -> None:
    names = [entry.name for entry in VARIANTS if entry.make.__module__.startswith("attnbench.catalogue.attention.")]
    assert sorted(spec.name for spec in shipped()) == sorted(names)


def test_the_causal_place_of_a_variant_without_a_causal_form_says_so(words: Callable[..., str]) -> None:
    picture = draw("pattern", ["nystrom", "local"])
    assert set(picture.numbers.query("variant.str.startswith('nystrom')")["causal"]) == {False}
    assert "no causal form" in words(picture.figure)  # a line break is a space there


@pytest.mark.parametrize("width", ["page", "column"])
@pytest.mark.parametrize("variants", [["performer"], ["local", "nystrom", "reformer"], ["softmax", "linear"] * 7])
def test_every_word_can_be_read(variants: list[str], width: str, faults: Callable[..., list[str]]) -> None:
    assert faults(draw("pattern", variants, width=width).figure) == []


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(Unsupported, match="nystrom:landmarks=5: causal: landmarks average"):
        draw_pattern(["nystrom"], causal=True)
    with pytest.raises(UsageError, match="a pattern has 2 to 512 tokens, not 1"):
        draw_pattern(["local"], n=1)
    with pytest.raises(UsageError, match="unknown variant 'performr'; did you mean 'performer'"):
        draw_pattern(["performr"])


def test_show_draws_the_picture_of_one_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "local", "--picture", str(tmp_path / "local.svg")]) == 0
    assert "Which keys each query may see" in (tmp_path / "local.svg").read_text(encoding="utf-8")
    assert capsys.readouterr().out.startswith("local: ")
    assert main(["show", "local", "--picture", str(tmp_path / "local.gif")]) == 2
    assert "must end in .svg, .png or .pdf" in capsys.readouterr().err
    assert main(["show", "listops", "--picture", str(tmp_path / "x.svg")]) == 2


def test_every_pair_that_is_seen_has_a_colour_and_no_other() -> None:
    assert np.array_equal(
        by_share(np.array([[0.0, 1.0, 0.3, 0.05, 0.001, 1e-300]])), [[0.0, 1.0, 0.6, 0.32, FAINTEST, FAINTEST]]
    )
    for name in ("fox", "gated-delta", "lstm", "mamba2"):  # what they forget is not hidden
        table = draw_pattern([name], causal=True).numbers
        shares = table[[f"key_{j}" for j in range(32)]].to_numpy()
        assert np.array_equal(by_share(shares) > 0, np.tri(32, dtype=bool)), name


def test_a_variant_that_mixes_the_channels_of_values_has_no_weights_and_sees_no_future() -> None:
    """Learned convolutions of values: outputs for the columns of I would be no matrix of tokens."""
    weights = random_weights(parse_spec("memory-compressed"), 9, causal=True)
    sees = [[j == i if i < 2 else j < (i + 1) // 3 * 3 for j in range(9)] for i in range(9)]
    assert (weights > 0).tolist() == sees
    q, k = (torch.randn(1, 1, 9, 9, dtype=torch.float64) for _ in "qk")
    mixed = {name: mixes_channels(build(name, Shape(1, 1, 9, 9)).double(), q, k) for name in ("xca", "linear", "local")}
    assert mixed == {"xca": True, "linear": False, "local": False}


def test_options_are_written_in_full_over_several_lines(words: Callable[..., str]) -> None:
    drawn = draw("pattern", ["csa", "snapkv", *["softmax"] * 12])  # as small as on the sheet
    assert "…" not in re.sub(f"… .*{BESIDE}", "", words(drawn.figure)), "but in the caption, for its further notes"
    for name in ("csa", "snapkv"):
        options = small_setting(name).label.partition(":")[2]
        assert options in words(drawn.figure).replace(",\n", ","), name


@pytest.mark.parametrize(("inside", "lines"), [(7.7, 2), (3.0, 4)])
def test_no_family_stands_alone_in_a_line_of_the_legend(inside: float, lines: int) -> None:
    legend = _legend(FAMILIES, inside)
    assert [family for line in legend for family in line] == list(FAMILIES)
    assert len(legend) == lines
    assert min(map(len, legend)) > 1


def test_a_variant_that_is_not_drawn_has_no_mark_of_an_own_form(
    monkeypatch: pytest.MonkeyPatch, words: Callable[..., str]
) -> None:
    monkeypatch.setattr(pattern, "shipped", lambda: [small_setting(name) for name in ("softmax", "fnet")])
    assert "Not drawn, since they refuse this: fnet." in words(draw_pattern(causal=True).figure)
