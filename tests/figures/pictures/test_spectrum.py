"""The cumulative spectrum is that of the real softmax matrix of each head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from attnbench.errors import Unsupported, UsageError
from attnbench.figures.pictures import draw
from attnbench.figures.pictures.heads import Head, heads_of, softmax_matrix
from attnbench.figures.pictures.spectrum import Spectrum, draw_spectrum, spectrum

HEAD = Head(0, 0, torch.zeros(1, 1, 8, 4, dtype=torch.float64), torch.zeros(1, 1, 8, 4, dtype=torch.float64))


def test_uniform_rows_need_one_singular_value_and_equal_ones_need_all() -> None:
    uniform = spectrum(HEAD, causal=False)
    assert uniform.cumulative == pytest.approx(np.ones(8))
    assert uniform.needed(0.9) == 1
    even = Spectrum(HEAD, np.ones(8))
    assert even.cumulative == pytest.approx(np.arange(1, 9) / 8)
    assert even.needed(0.9) == 8


def test_the_numbers_are_the_singular_values_of_every_head() -> None:
    table = draw_spectrum(n=24).numbers
    assert len(table) == 4 * 2 * 24
    _, found = heads_of("listops", 24, causal=False, layer=1, head=1)
    expected = np.linalg.svd(softmax_matrix(found[0], causal=False).numpy(), compute_uv=False)
    one = table[(table["layer"] == 1) & (table["head"] == 1)]
    assert one["singular_value"].to_numpy() == pytest.approx(expected)
    assert one["cumulative"].iloc[-1] == pytest.approx(1.0)
    assert (one["cumulative"].diff().dropna() >= 0).all()


def test_the_picture_says_how_many_hold_nine_tenths(words: Callable[..., str]) -> None:
    picture = draw("spectrum", n=32, layer=0, head=0)
    cumulative = picture.numbers["cumulative"].to_numpy()
    needed = int((cumulative < 0.9).sum()) + 1
    assert f"90 % of the sum: the first {needed} of 32 singular values" in words(picture.figure)


def test_a_file_of_a_model_of_many_layers_is_drawn(tmp_path: Path, faults: Callable[..., list[str]]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 14, 12, 20, 8, generator=generator) for _ in "qkv")
    save_file({"q": q, "k": k, "v": v}, tmp_path / "qkv.safetensors")
    picture = draw("spectrum", inputs=f"file:path={tmp_path / 'qkv.safetensors'}", n=20)
    assert picture.numbers.groupby(["layer", "head"]).ngroups == 14 * 12
    assert faults(picture.figure) == []


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(Unsupported, match="listops has 2048 positions, fewer than 4000"):
        draw_spectrum(n=4000)
    with pytest.raises(UsageError, match="a spectrum has 2 to 4096 tokens, not 5000"):
        draw_spectrum(n=5000)


def test_values_of_another_width_are_no_hindrance(tmp_path: Path) -> None:
    q, k, v = (torch.randn(1, 2, 3, 20, width) for width in (8, 8, 5))
    save_file({"q": q, "k": k, "v": v}, tmp_path / "qkv.safetensors")
    assert len(draw_spectrum(inputs=f"file:path={tmp_path / 'qkv.safetensors'}", n=20).numbers) == 2 * 3 * 20
