from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from attnbench.catalogue.build import build
from attnbench.contract.problem.reference import exact_attention
from attnbench.contract.problem.shape import Shape
from attnbench.contract.task import Form
from attnbench.errors import Unsupported, UsageError
from attnbench.models.decoder import Decoder
from attnbench.models.encoder import Encoder, MultiHead, as_layer
from attnbench.suite.cell import ModelSize

SHAPE = Shape(2, 3, 10, 4)
SIZE = ModelSize(layers=3, ffn=16, vocab=20)


class Exact(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return exact_attention(q, k, v, key_mask=key_mask).to(q)


def test_multi_head_projects_splits_attends_and_merges() -> None:
    layer = MultiHead(Exact(), SHAPE).double()
    x = torch.randn(2, 10, 12, dtype=torch.float64)
    mask = torch.rand(2, 10) < 0.7
    wq, wk, wv = layer.qkv.weight.split(12)
    heads = []
    for h in range(3):
        mine = slice(4 * h, 4 * h + 4)
        logits = (x @ wq.T)[..., mine] @ (x @ wk.T)[..., mine].transpose(-1, -2) / 2
        weights = logits.masked_fill(~mask[:, None, :], -torch.inf).softmax(-1)
        heads.append(weights @ (x @ wv.T)[..., mine])
    expected = torch.cat(heads, -1) @ layer.out.weight.T
    torch.testing.assert_close(layer(x, key_mask=mask), expected, rtol=1e-12, atol=1e-12)


def test_queries_keys_and_values_are_views_of_one_product() -> None:
    seen: list[Tensor] = []

    class Spy(Exact):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            seen.extend((q, k, v))
            return super().forward(q, k, v)

    MultiHead(Spy(), SHAPE)(torch.randn(2, 10, 12))
    assert len({t.untyped_storage().data_ptr() for t in seen}) == 1


def test_projections_start_with_the_variance_of_xavier() -> None:
    layer = MultiHead(Exact(), Shape(1, 8, 4, 32))
    for square in (*layer.qkv.weight.split(256), layer.out.weight):
        assert square.var().item() == pytest.approx(1 / 256, rel=0.03)


def test_a_layer_holds_the_operator_that_build_makes() -> None:
    layer = as_layer("linformer:rank=4", SHAPE, seed=3)
    assert isinstance(layer, MultiHead)
    (built,) = build("linformer:rank=4", SHAPE, seed=3).parameters()
    (held,) = layer.operator.parameters()
    assert torch.equal(built, held)


def test_a_mixer_is_a_layer_as_it_is() -> None:
    x = torch.randn(2, 10, 12)
    layer = as_layer("synthesizer", SHAPE, seed=3)
    assert not isinstance(layer, MultiHead)
    assert torch.equal(layer(x), build("synthesizer", SHAPE, seed=3)(x))


def test_a_layer_repeats_under_its_seed_and_differs_under_another() -> None:
    x = torch.randn(2, 10, 12)
    first, again, other = (as_layer("linformer:rank=4", SHAPE, seed=s)(x) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_a_layer_refuses_cross_attention_and_unknown_names() -> None:
    with pytest.raises(Unsupported, match="its own input"):
        as_layer("linformer:rank=2", Shape(1, 1, 4, 4, kv_len=8))
    with pytest.raises(UsageError, match="did you mean 'linformer'"):
        as_layer("linfromer", SHAPE)


def test_building_leaves_the_global_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)
    before = torch.get_rng_state()
    as_layer("linformer:rank=4", SHAPE)
    Encoder("linformer:rank=4", SHAPE, SIZE)
    assert torch.equal(before, torch.get_rng_state())


def test_the_encoder_gives_logits_and_gradients_reach_every_weight() -> None:
    model = Encoder("linformer:rank=4", SHAPE, SIZE, form=Form((SIZE.vocab,), 5))
    logits = model(torch.randint(20, (2, 10)))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_every_layer_of_the_encoder_draws_its_own_numbers() -> None:
    model = Encoder("linformer:rank=4", SHAPE, SIZE)
    drawn = [block.layer.operator.E for block in model.blocks]
    assert len(drawn) == 3
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_the_encoder_repeats_under_its_seed_and_differs_under_another() -> None:
    tokens = torch.randint(20, (2, 10))
    first, again, other = (Encoder("synthesizer", SHAPE, SIZE, seed=s)(tokens) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_the_encoder_follows_its_formula() -> None:
    model = Encoder("linformer:rank=4", SHAPE, SIZE).double()
    tokens = torch.randint(20, (2, 10))
    norm = nn.functional.layer_norm
    x = model.tokens[0].weight[tokens] + model.position
    for block in model.blocks:
        x = x + block.layer(norm(x, (12,)))
        up, _, down = block.ffn
        x = x + nn.functional.gelu(norm(x, (12,)) @ up.weight.T + up.bias) @ down.weight.T + down.bias
    expected = model.head(norm(x, (12,)).mean(1))
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["linformer:rank=4", "synthesizer"])
def test_padding_changes_no_logits(variant: str) -> None:
    model = Encoder(variant, SHAPE, SIZE).double()
    tokens = torch.randint(20, (2, 10))
    mask = torch.arange(10) < torch.tensor([[7], [10]])
    padded = model(tokens, key_mask=mask)
    torch.testing.assert_close(padded[:1], model(tokens[:1, :7]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(padded[1:], model(tokens[1:]), rtol=1e-10, atol=1e-12)


def test_the_default_size_is_the_released_text_configuration() -> None:
    model = Encoder("linformer:rank=4,projection=mean-pool", Shape(1, 4, 8, 64))
    block = 4 * 256**2 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256
    head = 256 * 1024 + 1024 + 1024 * 2 + 2
    assert sum(p.numel() for p in model.parameters()) == 256 * 256 + 8 * 256 + 4 * block + 2 * 256 + head


def test_shapes_can_be_traced_without_computing() -> None:
    with FakeTensorMode():
        model = Encoder("linformer:rank=4", SHAPE, SIZE)
        assert model(torch.zeros(2, 10, dtype=torch.long)).shape == (2, 2)


# Layers of several variants


STACK = ["gla:rank=3", "gla:rank=3", "sdpa"]


def test_layers_take_several_variants_in_turn_each_as_in_a_model_of_its_own() -> None:
    size = ModelSize(layers=5, ffn=16, vocab=20)
    model = Encoder(STACK, SHAPE, size)
    alone = {name: Encoder(name, SHAPE, size) for name in STACK}
    for at, block in enumerate(model.blocks):
        own = alone[STACK[at % 3]].blocks[at]
        assert type(block.layer) is type(own.layer)
        for name, weight in own.layer.state_dict().items():
            assert torch.equal(weight, block.layer.state_dict()[name]), name


def test_a_stack_is_its_layers_one_after_another() -> None:
    model, tokens = Encoder(STACK, SHAPE, SIZE).double(), torch.randint(20, (2, 10))
    x = model.placed(model.embedded(tokens))
    for at, block in enumerate(model.blocks):
        y = as_layer(STACK[at % 3], SHAPE).double()
        y.load_state_dict(block.layer.state_dict())
        x = block.fed(x + y(block.before_layer(x)))
    torch.testing.assert_close(model(tokens), model.head(model.norm(x).mean(1)), rtol=1e-12, atol=1e-12)


def test_a_stack_writes_token_by_token_what_it_scores_in_one_call() -> None:
    model, tokens = Decoder(STACK, SHAPE, SIZE).double(), torch.randint(20, (2, 10))
    expected, (state, rows) = model(tokens), (model.begin(tokens[:, :4]), [])
    for t in range(4, 10):
        row, state = model.step(state, tokens[:, t : t + 1])
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), expected[:, 4:], rtol=1e-9, atol=1e-10)


def test_only_layers_of_one_variant_share_what_its_layers_share() -> None:
    shared = "linformer:rank=4,sharing=layerwise"
    model = Encoder([shared, "sdpa", shared, "linformer:rank=5,sharing=layerwise"], SHAPE, ModelSize(4, 16, 20))
    operators = [block.layer.operator for block in model.blocks]
    assert operators[0].E is operators[2].E
    assert operators[0].E is not operators[3].E


def test_layers_without_a_variant_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one variant to take in turn"):
        Encoder([], SHAPE, SIZE)
