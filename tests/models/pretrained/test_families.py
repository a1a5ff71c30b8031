"""Every family through the bridge: exact where it is said to be, refused with the cause where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")

from attnbench.contract.inputs import draw_qkv
from attnbench.contract.problem.reference import of_query_heads, relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import Unsupported, UsageError
from attnbench.harness.swap import described
from attnbench.harness.swap.loss import Pupil
from attnbench.models.pretrained import pretrained_cell as cells
from attnbench.models.pretrained.bridge import Session, calls_of, put_into, session
from attnbench.models.pretrained.capture import Wish, capture
from attnbench.models.pretrained.evaluate import baseline_of, layer_errors
from attnbench.models.pretrained.language_model import LanguageModel
from attnbench.models.pretrained.loading import Around, TokenText
from attnbench.models.pretrained.operators import build_operators, replaced
from attnbench.models.pretrained.pretrained_cell import Opened
from attnbench.models.pretrained.subject import Exact
from tests.models.pretrained import families, properties
from tests.models.pretrained.test_swap import ask, by_key
from tests.models.pretrained.test_tune import tuning

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own making

N = 24
CAUSAL = {"Llama", "Qwen3", "Mistral", "Granite", "Gemma 3", "GPT-2", "GPT-NeoX", "OPT"}
WINDOWED = {"Mistral": {0, 1, 2}, "Gemma 3": {0}, "ModernBERT": {1}}


@pytest.fixture(scope="module")
def made() -> dict[str, LanguageModel]:
    return {}


def subject(name: str, made: dict[str, LanguageModel]) -> LanguageModel:
    if name not in made:
        made[name] = LanguageModel(name, families.make(families.FAMILIES[name]), N)
    return made[name]


def tokens(count: int = 2) -> Tensor:
    return torch.randint(4, 61, (count, N), generator=torch.Generator().manual_seed(3))


def swapped(one: LanguageModel, text: str, *layers: int) -> Tensor:
    chosen = layers or tuple(place for place, layer in enumerate(one.layers) if not layer.kept)
    operators = build_operators(parse_spec(text), one.layers, chosen, seed=0)
    with torch.no_grad():
        return one.read(tokens(), replaced(operators)).hidden


@pytest.mark.parametrize("name", families.FAMILIES)
def test_softmax_through_the_bridge_is_the_untouched_model(name: str, made: dict[str, LanguageModel]) -> None:
    untouched = families.make(families.FAMILIES[name])
    properties.the_bridge_computes_what_the_model_did(families.make(families.FAMILIES[name]), put_into, tokens())
    with torch.no_grad():
        expected = untouched(input_ids=tokens(), output_hidden_states=True).hidden_states[-1]
    one = subject(name, made)
    assert len(one.layers) == 3
    assert {layer.shape.causal for layer in one.layers} == {name in CAUSAL}
    kept = {place for place, layer in enumerate(one.layers) if layer.kept}
    assert kept == WINDOWED.get(name, set())
    with torch.no_grad():
        assert relative_error(one.read(tokens()).hidden, expected) <= 1e-5
    if len(kept) < 3:
        assert relative_error(swapped(one, "softmax"), expected) <= 1e-5
        assert not torch.allclose(swapped(one, "mean-value"), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", families.REFUSED)
def test_what_cannot_be_swapped_is_refused_with_the_cause(name: str) -> None:
    builder, said = families.REFUSED[name]
    properties.it_is_refused(lambda: LanguageModel(name, families.make(builder), N), said)


def test_a_family_with_one_module_for_all_layers_has_layers_all_the_same(made: dict[str, LanguageModel]) -> None:
    one = subject("ALBERT", made)
    assert len(set(one.attends)) == 1
    properties.each_layer_can_be_replaced_alone(one, tokens())


def test_a_model_that_only_seems_to_take_another_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.make(families.FAMILIES["Llama"])
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "set_attn_implementation", lambda self, name: None)
        with pytest.raises(Unsupported, match="no attention was reached through the library's interface"):
            LanguageModel("m", model, N)
    one = LanguageModel("m", model, N)
    model.set_attn_implementation("sdpa")
    properties.it_is_refused(lambda: swapped(one, "mean-value"), "0 of its 3 attention layers were reached")


@pytest.mark.parametrize("name", ["OPT", "ESM", "Granite", "Gemma 3", "Llama"])
def test_softmax_of_what_is_captured_is_what_the_layer_answers(
    name: str, made: dict[str, LanguageModel], tmp_path: Path
) -> None:
    one = subject(name, made)
    properties.softmax_of_what_is_seen_is_what_each_layer_answers(one, tokens())
    text = TokenText("t", list(range(4, 61)) * 40, N, Around("none"))
    found = capture(one, text, Wish((), 1, None, "float32"), tmp_path / "q.safetensors", "cpu")
    assert found.about["causal"] is (name in CAUSAL)
    theirs = answered_by_the_untouched(name, text.held_out(1).tokens)
    stored = load_file(tmp_path / "q.safetensors")
    for at, place in enumerate(found.about["layers"]):
        q, k, v = stored["q"][:, at], *(of_query_heads(stored[part][:, at], found.shape[2]) for part in "kv")
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if found.about["causal"]:
            logits = logits.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf)
        assert relative_error((logits.softmax(-1) @ v).transpose(1, 2).flatten(2), theirs[place]) <= 1e-5


def answered_by_the_untouched(name: str, read: Tensor) -> list[Tensor]:
    """What each layer of a model that no bridge has touched hands to its last projection, ``(B, N, H·D)``."""
    model, seen = families.make(families.FAMILIES[name]), list[Tensor]()
    last = ("o_proj", "out_proj", "attention.output.dense")
    for module in (module for of, module in model.named_modules() if of.endswith(last)):
        module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(input_ids=read)
    assert len(seen) == 3
    return seen


def test_keys_that_heads_share_are_written_once_and_drawn_for_each_of_them(
    made: dict[str, LanguageModel], tmp_path: Path
) -> None:
    one, file = subject("Llama", made), tmp_path / "q.safetensors"
    text = TokenText("t", list(range(4, 61)) * 40, N, Around("next"))
    found = capture(one, text, Wish((1,), 1, None, "float32"), file, "cpu")
    assert (found.shape, found.v_shape[2], found.about["kv_heads_of_the_model"]) == ((1, 1, 4, N, 16), 2, 2)
    seen: list[Tensor] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact) -> Tensor:
        seen.extend((q, k, v) if place == 1 else ())
        return exact()

    with torch.no_grad():
        one.read(text.held_out(1).tokens, look)
    inputs = Spec.of("file", {"path": str(file)})
    for kv_heads in (2, None):
        drawn = draw_qkv(inputs, Shape(1, 4, N, 16, causal=True, kv_heads=kv_heads), 0)
        assert all(torch.equal(of_query_heads(mine, 4), theirs) for mine, theirs in zip(drawn, seen, strict=True))
    with pytest.raises(UsageError, match="--heads 3: 2 heads of queries share one of keys in this model"):
        capture(one, text, Wish((1,), 1, 3, "float32"), file, "cpu")


def test_padding_left_and_right_moves_no_real_token() -> None:
    model = families.make(families.FAMILIES["Llama"])
    put_into(model)
    properties.padding_moves_no_real_token(model, tokens(1)[:, :10])


def test_a_window_that_is_longer_than_the_text_is_plain_causal_attention() -> None:
    """Mistral sees 64 tokens, and reads 24: every variant may take the place of its attention."""
    config = families.transformers.MistralConfig(**families.LLAMA, sliding_window=64)
    one = LanguageModel("m", families.make(lambda: families.transformers.MistralForCausalLM(config)), N)
    assert [(layer.kind, layer.kept) for layer in one.layers] == [("causal", "")] * 3
    properties.each_layer_can_be_replaced_alone(one, tokens())


def test_of_a_model_that_is_mostly_linear_attention_the_other_layers_are_reached() -> None:
    """Qwen3-Next has softmax attention in one of four layers."""
    config = families.transformers.Qwen3NextConfig(
        **{**families.LLAMA, "num_hidden_layers": 4}, head_dim=16, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip

    def make() -> object:
        return families.make(lambda: families.transformers.Qwen3NextForCausalLM(config))

    properties.the_bridge_computes_what_the_model_did(make(), put_into, tokens())
    one = LanguageModel("m", make(), N)
    assert [(layer.kind, layer.kept, layer.sharing) for layer in one.layers] == [("causal", "", 2)]
    with torch.no_grad():
        plain = one.read(tokens()).hidden
    assert relative_error(swapped(one, "softmax"), plain) <= 1e-5
    assert not torch.allclose(swapped(one, "mean-value"), plain, atol=1e-3)


def test_a_model_that_computes_its_activations_twice_does_so_no_longer() -> None:
    model = families.make(families.FAMILIES["Llama"])
    model.gradient_checkpointing_enable()
    put_into(model)
    properties.attention_is_called_once_a_layer_in_a_training_step(families.calls_of_a_step(model, tokens()), 3)


def test_packed_sequences_are_refused() -> None:
    model = families.make(families.FAMILIES["Llama"])
    put_into(model)
    packed = torch.cat([torch.arange(12), torch.arange(12)])[None]
    with pytest.raises(Unsupported, match="neither full, causal nor a window"):
        calls_of(model, lambda: model(input_ids=tokens(1), position_ids=packed, use_cache=False))


def test_cross_attention_is_left_alone() -> None:
    config = families.transformers.BartConfig(
        **families.TEXT, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128,
    )  # fmt: skip
    model = families.make(lambda: families.transformers.BartModel(config))
    put_into(model)
    _, layers = calls_of(model, lambda: model(input_ids=tokens(1), decoder_input_ids=tokens(1), use_cache=False))
    assert [layer.kind for layer in layers] == ["full", "causal", "cross", "causal", "cross"]


def test_whisper_reads_sounds_by_self_attention_that_is_reached_and_its_cross_attention_is_left_alone() -> None:
    config = families.transformers.WhisperConfig(
        **families.TEXT, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=8, max_source_positions=12,
        max_target_positions=32, decoder_start_token_id=1,
    )  # fmt: skip
    model = families.make(lambda: families.transformers.WhisperModel(config))
    sounds = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(0))

    def without(layer: int) -> Callable[..., Tensor]:
        return lambda place, module, q, k, v, exact: torch.zeros_like(q) if place == layer else exact()

    def run() -> Tensor:
        return model(input_features=sounds, decoder_input_ids=tokens(1), use_cache=False).last_hidden_state

    with torch.no_grad():
        expected = run()
        put_into(model)
        kinds = [layer.kind for layer in calls_of(model, run)[1]]
        assert kinds == ["full", "full", "causal", "cross", "causal", "cross"]
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
        for layer in (0, 1, 2, 4):
            with session(Session(without(layer))):
                assert not torch.allclose(run(), expected, atol=1e-4)


def test_images_pass_through_the_same_call() -> None:
    config = families.transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4
    )
    model = families.make(lambda: families.transformers.ViTModel(config))
    pixels = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
        put_into(model)
        assert [layer.kind for layer in calls_of(model, lambda: model(pixels))[1]] == ["full"] * 2
        torch.testing.assert_close(model(pixels).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
        with session(Session(lambda place, module, q, k, v, exact: torch.zeros_like(q))):
            assert not torch.allclose(model(pixels).last_hidden_state, expected, atol=1e-3)


def test_a_window_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(UsageError, match="has 128 positions"):
        LanguageModel("m", families.make(families.FAMILIES["Llama"]), 129)


@pytest.mark.usefixtures("forks")
def test_a_small_language_model_is_swapped_trained_and_resumed(
    made: dict[str, LanguageModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TokenText("t", [4 + (7 * i + i * i) % 57 for i in range(4000)], N, Around("next"))
    one = subject("Llama", made)
    monkeypatch.setattr(cells, "cached", lambda *_: Opened(one, text, one.module))
    monkeypatch.setattr(described, "cached", lambda *_: Opened(one, text, one.module))
    found = ask(tmp_path, "performer:features=8", "linformer", layers="all,each")
    rows = by_key(found)
    assert rows["exact", "all", 0].loss == pytest.approx(rows["exact", "all", 0].loss_base, abs=1e-4)
    assert rows["performer:features=8", "all", 2].status == "ok", rows["performer:features=8", "all", 2].reason
    assert rows["performer:features=8", "1", 0].causal
    assert rows["linformer", "all", 0].reason.startswith("causal: ")
    assert ask(tmp_path, "performer:features=8", "linformer", layers="all,each") == found


def test_a_variant_alone_is_fitted_in_a_language_model(made: dict[str, LanguageModel]) -> None:
    """Hedgehog's maps, to what each layer of the untouched model answers; the model itself stays."""
    one = subject("Llama", made)
    text = TokenText("t", list(range(4, 61)) * 40, N, Around("next"))
    pupil = Pupil(one, one, build_operators(parse_spec("hedgehog"), one.layers, (0, 1, 2), seed=0))
    training = tuning(pupil, 30, text=text, train="variant")
    base = baseline_of(one, text.held_out(2), "cpu")
    before = {key: tensor.clone() for key, tensor in one.module.state_dict().items()}
    errors = []
    for steps in (0, 30):
        training.advance(steps)
        errors.append(layer_errors(one, pupil.operators, base, "cpu")[0])
    assert errors[0] is not None
    assert errors[1] is not None
    assert errors[1] < 0.9 * errors[0]
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.module.state_dict().items())


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_attention_alone_is_trained_where_that_is_asked(name: str, made: dict[str, LanguageModel]) -> None:
    one = subject(name, made)
    text = TokenText("t", list(range(4, 61)) * 40, N, Around("next" if name == "Llama" else "masked", mask=3))
    pupil = Pupil(one, one.copy(), build_operators(parse_spec("performer:features=8"), one.layers, (0, 1, 2), seed=0))
    before = {key: tensor.clone() for key, tensor in one.module.state_dict().items()}
    tuning(pupil, text=text, train="attention").advance(2)
    moved = {key for key, tensor in pupil.model.module.state_dict().items() if not torch.equal(tensor, before[key])}
    assert moved
    assert all("attn" in key or "attention" in key for key in moved)
    assert any("o_proj" in key or "output.dense" in key for key in moved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.module.state_dict().items())
