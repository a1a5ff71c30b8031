"""Nothing of a model is random: weights that are missing, cut or meaningless are refused in one line."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.errors import UsageError
from attnbench.models.pretrained.loading import bare_model, open_language_model, refuse_left_out
from attnbench.models.pretrained.sizes import sizes_of

transformers = pytest.importorskip("transformers", reason="needs the extra models: make .venv/installed-models")
pytestmark = pytest.mark.filterwarnings("ignore")
Weights = dict[str, torch.Tensor]


def saved(model: Any, folder: Path, *, words: int = 61) -> Path:
    """A tiny model with a tokenizer of so many words, and a text."""
    tokenizers = pytest.importorskip("tokenizers")
    word_level = pytest.importorskip("tokenizers.models").WordLevel
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(word_level({"?": 0} | {f"w{i}": i for i in range(1, words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pytest.importorskip("tokenizers.pre_tokenizers").Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    (folder / "text").write_text(" ".join(f"w{1 + (7 * i + i * i) % (words - 2)}" for i in range(1000)))
    return folder


def llama(**more: Any) -> Any:
    from tests.models.pretrained.families import LLAMA

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **more))


def rewrite(folder: Path, change: Callable[[Weights], Weights], **config: Any) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = change(load_file(file))
    save_file(weights, file, {"format": "pt"})
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, **config}))


def opened(folder: Path) -> Any:
    return open_language_model(str(folder), 16, folder / "text")[0]


def same(weights: Weights) -> Weights:
    return weights


def without(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: one for name, one in weights.items() if part not in name}


def renamed(before: str) -> Callable[[Weights], Weights]:
    return lambda weights: {before + name: one for name, one in weights.items()}


def in_eight_bits(weights: Weights) -> Weights:
    return {name: one.to(torch.float8_e4m3fn) if "proj" in name else one for name, one in weights.items()}


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (renamed("_orig_mod."), {}, r"are named _orig_mod\.lm_head\.weight; save them without that beginning"),
        (renamed("module."), {}, r"are named module\.lm_head\.weight; save them without that beginning"),
        (without("layers.1.self_attn.k_proj"), {}, r"lack model\.layers\.1\.self_attn\.k_proj\.weight, which would be"),
        (without(""), {}, "lack .* more, which would be random numbers; take a complete copy"),
        (without("lm_head"), {}, r"lack lm_head\.weight, which would be random"),
        (same, {"num_hidden_layers": 4}, r"lack model\.layers\.3\..* more, which would be random"),
        (same, {"num_hidden_layers": 2}, r"hold model\.layers\.2\..* more, which config\.json leaves out"),
        (same, {"intermediate_size": 32}, r"lack model\.layers\.0\.mlp.* more, which would be random"),
        (in_eight_bits, {}, "is of type F8_E4M3, and config.json has no quantization_config"),
        (same, {"dtype": "banana"}, "cannot be loaded .AttributeError"),
        (same, {"num_attention_heads": 0}, "cannot be loaded .ZeroDivisionError"),
        (same, {"hidden_size": "64"}, "cannot be loaded .StrictDataclassFieldValidationError"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_what_its_files_hold_is_refused(
    change: Callable[[Weights], Weights], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    rewrite(saved(llama(), tmp_path), change, **config)
    with pytest.raises(UsageError, match=said) as refused:
        opened(tmp_path)
    assert "\n" not in str(refused.value)


def test_tied_weights_masks_of_old_files_and_a_pooler_that_nobody_reads_are_no_reason(tmp_path: Path) -> None:
    tied = saved(llama(tie_word_embeddings=True), tmp_path / "tied")
    rewrite(tied, lambda weights: {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert opened(tied).digest == opened(tied).digest
    from tests.models.pretrained.families import BERT

    bert = saved(transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False), tmp_path / "bert")
    assert opened(bert).digest == opened(bert).digest


def test_a_text_whose_tokens_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"its tokenizer gives token 9[0-9] and its embedding has 61"):
        opened(saved(llama(), tmp_path, words=100))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("held", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"{}", b"null"])
def test_a_file_that_is_not_what_it_should_be_is_one_line(file: str, held: bytes, tmp_path: Path) -> None:
    (saved(llama(), tmp_path) / file).write_bytes(held)
    with pytest.raises(UsageError, match="cannot be loaded") as refused:
        opened(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(file: str, tmp_path: Path) -> None:
    pipe = saved(llama(), tmp_path) / file
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=f"cannot be loaded .{file} is not a file; take a complete copy"):
        opened(tmp_path)


@pytest.mark.parametrize("config", [{"num_key_value_heads": 0}, {"rope_scaling": {"type": "banana"}}])
def test_a_model_that_cannot_be_made_without_its_weights_is_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    rewrite(saved(llama(), tmp_path), same, **config)
    with pytest.raises(UsageError, match="cannot be loaded"):
        bare_model(str(tmp_path))[1]()


@pytest.mark.parametrize("held", ['{"model_type": [1], "num_attention_heads": 2, "head_dim": 8}', "[" * 100_000])
def test_a_configuration_that_states_no_sizes_is_one_line(held: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(held)
    with pytest.raises(UsageError, match="does not state its heads and their width"):
        sizes_of(str(tmp_path))


def test_a_gguf_file_that_says_that_a_word_of_it_fills_all_memory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 2**62))
    with pytest.raises(UsageError, match="does not state its heads and their width"):
        sizes_of(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("more", "left_out"),
    [
        ({}, False),
        ({"rope_freqs.weight": 9}, False),
        ({"blk.1.attn_q.weight": 4}, True),
        ({"blk.0.attn_k.bias": 1}, True),
    ],
)
def test_numbers_of_a_gguf_file_that_no_layer_takes_are_told(
    more: dict[str, int], left_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"blk.0.attn_q.weight": 4, "blk.0.attn_q.bias": 2, "output.weight": 2, **more}
    tensors = [SimpleNamespace(name=name, n_elements=count) for name, count in held.items()]
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(GGUFReader=lambda file: SimpleNamespace(tensors=tensors)))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)]), "out": torch.nn.Linear(2, 1)})
    said = r"its blocks hold \d+ numbers, of which the model takes 6; take a complete copy"
    with pytest.raises(UsageError, match=said) if left_out else nullcontext():
        refuse_left_out(model, Path("m.gguf"))
