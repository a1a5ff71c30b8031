"""The matrix of a variant on real inputs is the one that makes its output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnbench.catalogue.build import build
from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.errors import Unsupported, UsageError
from attnbench.figures.kit.style import texts
from attnbench.figures.pictures import draw
from attnbench.figures.pictures.heads import heads_of, softmax_matrix
from attnbench.figures.pictures.picture import by_size
from attnbench.figures.pictures.weights import draw_weights, variant_matrix


@pytest.mark.parametrize("variant", ["performer:features=16", "nystrom:landmarks=4", "local:window=3", "linear"])
def test_a_matrix_times_the_values_is_the_output(variant: str) -> None:
    _, found = heads_of("listops", 20, causal=False, layer=2, head=1)
    shape = Shape(heads=1, seq_len=20, head_dim=64)
    v = torch.randn(1, 1, 20, 64, dtype=torch.float64)
    matrix = variant_matrix(parse_spec(variant), found[0], causal=False)
    output = build(variant, shape).double()(found[0].q, found[0].k, v)
    assert torch.allclose(matrix @ v[0, 0], output[0, 0].detach(), atol=1e-9)


def test_heads_are_those_of_the_captured_layers() -> None:
    label, found = heads_of("listops", 9, causal=False)
    assert label == "listops"
    assert [one.name for one in found] == [f"layer {layer}, head {head}" for layer in range(4) for head in range(2)]
    q, k, _ = draw_qkv(parse_spec("listops:layer=3"), Shape(heads=2, seq_len=9, head_dim=64), 0)
    assert torch.equal(found[-1].q[0, 0], q[0, 1].double())
    assert torch.equal(found[-1].k[0, 0], k[0, 1].double())
    assert [one.name for one in heads_of("gaussian", 9, causal=False)[1]] == ["head 0"]
    assert [one.layer for one in heads_of("listops:1", 9, causal=False, head=0)[1]] == [1]


def test_softmax_is_exact_and_an_exact_variant_has_distance_0() -> None:
    table = draw_weights(["sdpa", "linear"], n=16, causal=True).numbers
    _, found = heads_of("listops", 16, causal=True, layer=0, head=0)
    expected = softmax_matrix(found[0], causal=True)
    columns = [f"key_{j}" for j in range(16)]
    drawn = table[table["variant"] == "softmax"][columns].to_numpy()
    assert drawn == pytest.approx(expected.numpy())
    assert float(expected.triu(1).max()) == 0
    errors = table.groupby("variant")["rel_error"].first()
    assert errors["softmax"] == 0
    assert errors["sdpa"] < 1e-12
    assert errors["linear"] > 0.05


def test_negative_weights_are_drawn_and_told(words: Callable[..., str]) -> None:
    picture = draw("weights", ["performer:kernel=trig,features=4"], inputs="gaussian:logit_std=4", n=24)
    assert (picture.numbers.filter(like="key_") < 0).any(axis=None)
    assert "Orange: negative weights." in words(picture.figure)
    assert "Orange" not in words(draw("weights", ["performer"], n=24).figure)


def test_the_colour_runs_from_a_hundredth_of_uniform_weights_to_the_largest() -> None:
    import numpy as np

    full = by_size(np.array([[0.0, 0.01 / 4, 0.5, 0.9]]), 0.5)
    assert full[0, 0] == full[0, 1] == 0
    assert full[0, 2] == full[0, 3] == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"variants": ["gla"]}, Unsupported, "gla has no weights of q and k; attnbench plot pattern gla shows it"),
        ({"variants": ["xca"]}, Unsupported, "xca mixes the channels of a value; attnbench plot pattern xca shows it"),
        ({"head": 2}, UsageError, "listops: no head 2, it has 2, counted from 0"),
        ({"layer": 4}, UsageError, "listops: no layer 4, it has 4, counted from 0"),
        ({"inputs": "listops:layer=1", "layer": 1}, UsageError, "both name a layer; remove one"),
        ({"inputs": "gaussian", "layer": 1}, UsageError, "gaussian: unknown option 'layer'"),
        ({"inputs": "file"}, UsageError, "file: which one?"),
        ({"n": 1}, UsageError, "matrices of weights have 2 to 1024 tokens, not 1"),
    ],
)
def test_what_cannot_be_drawn_is_said(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?")):
        draw_weights(**{"n": 16, **options})  # type: ignore[arg-type]


def test_a_window_that_reaches_all_tokens_is_narrowed_and_named() -> None:
    picture = draw_weights(["local", "sdpa"], inputs="gaussian", n=64)
    said = " ".join(text.get_text() for text in texts(picture.figure))
    assert "local:window=8" in said
    errors = picture.numbers.groupby("variant")["rel_error"].first()
    assert errors["local:window=8"] > 0.1
    assert errors["sdpa"] < 1e-9


def test_a_default_that_reaches_all_tokens_gives_way_to_one_that_does_not_if_there_is_one() -> None:
    numbers = draw_weights(["moba", "bigbird", "sta", "h2o"], inputs="gaussian", n=64).numbers
    errors = numbers.groupby("variant", sort=False)["rel_error"].first()
    assert [name.partition(":")[0] for name in errors.index] == ["softmax", "moba", "bigbird", "sta", "h2o"]
    assert (errors.iloc[1:4] > 0.1).all()
    assert errors["h2o"] < 1e-9  # whose form for whole sequences is softmax, whatever its options
