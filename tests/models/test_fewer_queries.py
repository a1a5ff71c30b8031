"""One query for several tokens: the output of a layer is shorter, and is that of dense attention of these queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec
from attnbench.contract.task import Form
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.compare.compare_question import CompareQuestion
from attnbench.harness.inside.execute import run_cell
from attnbench.harness.score.score import Filling
from attnbench.harness.wire.protocol import VisitCell
from attnbench.measure.status import Status
from attnbench.measure.time import TimingRules
from attnbench.models.encoder import Encoder, as_layer
from attnbench.models.fewer_queries import FewerQueries, means, remaining
from attnbench.results.record import Record
from attnbench.suite.cell import Cell, ModelSize

SHAPE = Shape(2, 2, 11, 4, query_stride=3)
SIZE = ModelSize(layers=2, ffn=8, vocab=7)
RUNNABLE = [entry for entry in VARIANTS if not entry.traits.compiled]


def draw(n: int = 11) -> Tensor:
    return torch.randn(2, n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def layer_of(variant: str) -> FewerQueries:
    layer = as_layer(variant, SHAPE, seed=5).double()
    assert isinstance(layer, FewerQueries)
    return layer


def measure(**changes: object) -> Record:
    shape = Shape(heads=2, seq_len=63, head_dim=8, query_stride=4)
    asked = Cell("s", "w", Spec("softmax"), shape, **changes)  # type: ignore[arg-type]
    return run_cell(VisitCell(asked, TimingRules(quick=True)))[0]


def test_it_is_dense_attention_of_the_mean_queries_to_all_keys() -> None:
    layer, x = layer_of("softmax"), draw()
    groups = [x[:, start : start + 3] for start in range(0, 11, 3)]  # the last has two
    few = torch.stack([group.sum(1) / group.shape[1] for group in groups], 1)
    k, v = (x @ layer.crossing.kv.weight.T).split(8, -1)
    q = few @ layer.crossing.q.weight.T
    heads = []
    for h in range(2):
        mine = slice(4 * h, 4 * h + 4)
        heads.append((q[..., mine] @ k[..., mine].mT / 2).softmax(-1) @ v[..., mine])
    expected = torch.cat(heads, -1) @ layer.crossing.out.weight.T
    assert layer(x).shape == (2, 4, 8)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.name)
def test_a_variant_answers_fewer_queries_or_says_why_it_has_no_cross_attention(entry: Variant) -> None:
    spec = f"{entry.name}:{entry.settings[0]}".rstrip(":")
    if not entry.traits.cross:
        with pytest.raises(Unsupported) as refused:
            as_layer(spec, SHAPE)
        assert str(refused.value) == f"cross-attention: {entry.traits.cross}"
        return
    try:
        layer = as_layer(spec, SHAPE)
    except Unsupported:  # with these options
        return
    out = layer(draw().float())
    assert out.shape == (2, 4, 8)
    assert out.isfinite().all()


def test_a_shape_says_how_long_the_output_is() -> None:
    assert [replace(SHAPE, seq_len=n).outputs for n in (1, 2, 3, 4, 6, 7)] == [1, 1, 1, 2, 2, 3]
    assert Shape(seq_len=9).outputs == 9
    with pytest.raises(UsageError, match="query_stride must be a whole number of at least 1"):
        Shape(query_stride=0)


def test_padding_changes_nothing() -> None:
    layer, x = layer_of("softmax"), draw()
    mask = torch.arange(11) < torch.tensor([[7], [11]])
    loud = torch.where(mask[:, :, None], x, 1e30)  # softmax, a baseline, asks for finite padding
    padded = layer(loud, key_mask=mask)
    torch.testing.assert_close(padded[:1, :3], layer(x[:1, :7]))
    torch.testing.assert_close(padded[1:], layer(x[1:]))
    few = remaining(mask, 3)
    assert few is not None
    assert few.tolist() == [[True, True, True, False], [True] * 4]


def test_the_mean_of_no_real_token_is_0() -> None:
    x = draw(5)
    few = means(x, 2, torch.tensor([[True, False, False, False, True]] * 2))
    torch.testing.assert_close(few, torch.stack([x[:, 0], torch.zeros_like(x[:, 0]), x[:, 4]], 1))


def test_each_layer_of_a_model_shortens_what_the_one_before_it_left() -> None:
    model = Encoder("softmax", SHAPE, SIZE).double()
    tokens = torch.randint(7, (2, 11))
    norm = lambda x: nn.functional.layer_norm(x, (8,))  # noqa: E731
    x = model.tokens[0].weight[tokens] + model.position
    for block, length in zip(model.blocks, (4, 2), strict=True):
        x = means(x, 3) + block.layer(norm(x))
        up, _, down = block.ffn
        x = x + nn.functional.gelu(norm(x) @ up.weight.T + up.bias) @ down.weight.T + down.bias
        assert x.shape[1] == length
    torch.testing.assert_close(model(tokens), model.head(norm(x).mean(1)))


def test_padding_changes_no_logits_of_such_a_model() -> None:
    model = Encoder("softmax", SHAPE, SIZE).double()
    tokens = torch.randint(7, (2, 11))
    mask = torch.arange(11) < torch.tensor([[7], [11]])
    padded = model(tokens, key_mask=mask)
    torch.testing.assert_close(padded[:1], model(tokens[:1, :7]))
    torch.testing.assert_close(padded[1:], model(tokens[1:]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"causal": True}, "query_stride and causal"),
        ({"bias": "alibi"}, "query_stride and bias"),
        ({"added_tokens": 2}, "query_stride and added_tokens"),
    ],
)
def test_what_a_mean_query_cannot_do_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        as_layer("softmax", replace(SHAPE, **changes))


def test_it_is_refused_where_outputs_would_be_missing() -> None:
    with pytest.raises(Unsupported, match="each token has an answer"):
        Encoder("softmax", SHAPE, SIZE, form=Form((7,), 3, per_token=True))
    with pytest.raises(Unsupported, match="cannot be filled in"):
        Filling(Encoder("softmax", SHAPE, SIZE), seed=0)
    with pytest.raises(Unsupported, match="by kv_len and seq_len"):
        build("softmax", SHAPE)
    with pytest.raises(UsageError, match="--query-stride 2: that is a matter of layers"):
        CompareQuestion(["softmax", "linear"], 8, axes={"query_stride": 2}, device="cpu").prepare()


def test_a_layer_and_a_model_are_measured_with_their_shorter_outputs() -> None:
    layer = measure(level="layer")
    assert layer.status is Status.OK, layer.reason
    n, few, width = 63, 16, 16
    assert layer.matmul_flops == 4 * n * width**2 + 4 * few * width**2 + 4 * few * n * width
    assert layer.output_bytes == few * width * 4
    assert layer.query_stride == 4
    for changes in ({"level": "layer", "padding": 0.5}, {"level": "model"}):
        record = measure(pass_="training", **changes)
        assert record.status is Status.OK, record.reason
    assert "causal" in measure(level="layer", pass_="decode").reason
