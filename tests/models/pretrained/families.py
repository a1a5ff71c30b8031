"""Tiny random models of the transformers library, a family each, without any network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attnbench.models.pretrained.bridge import Session, session

TEXT = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {**TEXT, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
LLAMA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128}
BERT = {**SMALL, "max_position_embeddings": 128}

FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, head_dim=16)),
    "Mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=8)),
    "Granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**LLAMA, attention_multiplier=0.1)
    ),
    "Gemma 3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **LLAMA, head_dim=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        )
    ),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_embd=64, n_layer=3, n_head=4, n_positions=128)
    ),
    "GPT-NeoX": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**BERT)),
    "OPT": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            **TEXT, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=96, word_embed_proj_dim=64,
            max_position_embeddings=128,
        )
    ),
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "DistilBERT": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=61, dim=64, n_layers=3, n_heads=4, hidden_dim=96)
    ),
    "ESM": lambda: transformers.EsmForMaskedLM(
        transformers.EsmConfig(**BERT, mask_token_id=3, position_embedding_type="rotary")
    ),
    "ALBERT": lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**BERT, embedding_size=32)),
    "ModernBERT": lambda: transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **BERT, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
        )
    ),
    "BART": lambda: transformers.BartModel(
        transformers.BartConfig(
            **TEXT, d_model=64, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128,
        )
    ).get_encoder(),
}  # fmt: skip
"""Family -> how to make one that reads tokens."""

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Gemma 2": (
        lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**LLAMA, head_dim=16)),
        "caps its logits",
    ),
    "GPT-OSS": (
        lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**LLAMA, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
        ),
        "attention sinks",
    ),
    "T5": (
        lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=61, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
        ),
        "bias of positions",
    ),
    "DeepSeek-V3": (
        lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **SMALL, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=16,
                qk_nope_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
                moe_intermediate_size=32, first_k_dense_replace=3, max_position_embeddings=128,
            )
        ),
        "values are 16 wide and its queries 24",
    ),
    "Falcon": (
        lambda: transformers.FalconForCausalLM(
            transformers.FalconConfig(vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        ),
        "computes its attention by itself",
    ),
    "DeBERTa-v2": (
        lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**BERT)),
        "computes its attention by itself",
    ),
}  # fmt: skip
"""Family -> how to make one, and what the refusal says."""


def make(builder: Callable[[], Any]) -> Any:
    """The model with weights that are always the same, large enough that attention is not uniform."""
    torch.manual_seed(0)
    model = builder().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(4.0)
    return model


def calls_of_a_step(model: Any, tokens: torch.Tensor) -> list[object]:
    """The calls of attention in one forward and backward pass, after the bridge was put into the model."""
    model.train()
    with session(Session()) as seen:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return list(seen.calls)


def save(model: Any, folder: str) -> None:
    """Write a model, a tokenizer of its 61 words, and a text of 3000 words ``t.txt`` beside the folder."""
    tokenizers = pytest.importorskip("tokenizers")
    model.save_pretrained(folder)
    word_level = pytest.importorskip("tokenizers.models").WordLevel
    words = tokenizers.Tokenizer(word_level({"?": 0} | {f"w{i}": i for i in range(1, 61)}, unk_token="?"))
    words.pre_tokenizer = pytest.importorskip("tokenizers.pre_tokenizers").Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    Path("t.txt").write_text(" ".join(f"w{1 + (7 * i + i * i) % 59}" for i in range(3000)))
