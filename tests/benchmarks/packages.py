"""Public packages as ``attnbench check FILE.py:Class`` meets them: each as its page shows it, with its own defaults.

    pip install --no-deps performer-pytorch linformer ...   # those of EXPECTED, and what they import
    python -m tests.benchmarks.packages                     # asks each and writes docs/data/packages.csv
    python -m tests.benchmarks.packages bigbird mra         # only these; the others' rows stay

A function makes the smallest module of a package that has its attention. Widths are small; what a package leaves to the
caller, such as the size of a block, is a size that its page shows.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

FILE = Path(__file__).resolve().parents[2] / "docs/data/packages.csv"


@dataclass(frozen=True)
class Row:
    """What ``check`` said of one module."""

    name: str
    """The function of this file that makes it."""
    package: str
    version: str
    is_: str
    """What it is, by its source."""
    attention: str
    """What ``check`` answers to the question of this name."""
    reads: str
    cost: str
    right: str
    """``yes``, or what is not as it should be."""
    date: str


@dataclass(frozen=True)
class Expected:
    """What is right to say of a module."""

    package: str
    is_: str
    answers: dict[str, str]
    """Question -> a pattern of a right answer."""
    options: tuple[str, ...] = ()
    """Further options of ``check``."""


class _Last(nn.Module):
    """The first of several outputs, such as that beside which a loss stands."""

    def __init__(self, inner: nn.Module, **given: Any) -> None:
        super().__init__()
        self.inner, self.given = inner, given

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.inner(x, **self.given)[0]
        return first


def performer_pytorch(dim: int = 64, heads: int = 4, causal: bool = False) -> nn.Module:
    from performer_pytorch import SelfAttention

    return SelfAttention(dim, heads=heads, dim_head=dim // heads, causal=causal)


def linformer_package(dim: int = 64, heads: int = 4, seq_len: int = 1024) -> nn.Module:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(dim, seq_len, heads=heads)


def linformer_pytorch(channels: int = 16, input_size: int = 512) -> nn.Module:
    from linformer_pytorch import Linformer

    return Linformer(input_size=input_size, channels=channels, dim_k=64)


def nystrom_attention(dim: int = 64, heads: int = 4) -> nn.Module:
    from nystrom_attention import NystromAttention

    return NystromAttention(dim, dim_head=dim // heads, heads=heads)


def local_attention(dim: int = 64, heads: int = 4, causal: bool = True) -> nn.Module:
    from local_attention import LocalMHA

    return LocalMHA(dim=dim, window_size=32, heads=heads, dim_head=dim // heads, causal=causal)


def reformer_pytorch(dim: int = 64, heads: int = 4, causal: bool = False) -> nn.Module:
    from reformer_pytorch import LSHSelfAttention

    return LSHSelfAttention(dim, heads=heads, causal=causal)


def linear_attention_transformer(dim: int = 64, heads: int = 4) -> nn.Module:
    from linear_attention_transformer import LinearAttentionTransformer

    return LinearAttentionTransformer(dim, depth=1, max_seq_len=2048, heads=heads)


def sinkhorn_transformer(dim: int = 64, heads: int = 4) -> nn.Module:
    from sinkhorn_transformer import SinkhornTransformer

    return SinkhornTransformer(dim, depth=1, heads=heads)


def routing_transformer(dim: int = 64, heads: int = 4) -> nn.Module:
    from routing_transformer import RoutingTransformer

    return _Last(RoutingTransformer(dim, depth=1, max_seq_len=2048, heads=heads, window_size=64))


def x_transformers(dim: int = 64, heads: int = 4) -> nn.Module:
    from x_transformers import Decoder

    return Decoder(dim=dim, depth=1, heads=heads)


def mambapy(d_model: int = 16) -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=d_model, n_layers=1))


def h_transformer_1d(dim: int = 64, heads: int = 4) -> nn.Module:
    from h_transformer_1d.h_transformer_1d import HAttention1D

    return HAttention1D(dim, heads=heads, dim_head=dim // heads)


def taylor_series_linear_attention(dim: int = 64, heads: int = 4, causal: bool = False) -> nn.Module:
    from taylor_series_linear_attention import TaylorSeriesLinearAttn

    return TaylorSeriesLinearAttn(dim, heads=heads, causal=causal)


def native_sparse_attention(dim: int = 64, heads: int = 4) -> nn.Module:
    from native_sparse_attention_pytorch import SparseAttention

    return SparseAttention(
        dim=dim,
        dim_head=dim // heads,
        heads=heads,
        sliding_window_size=2,
        compress_block_size=4,
        compress_block_sliding_stride=2,
        selection_block_size=4,
        num_selected_blocks=2,
        causal=True,
    )


def mega(dim: int = 64) -> nn.Module:
    from mega_pytorch import MegaLayer

    return MegaLayer(dim=dim)


def agent_attention(dim: int = 64, heads: int = 4) -> nn.Module:
    from agent_attention_pytorch import AgentSelfAttention

    return AgentSelfAttention(dim, num_agent_tokens=16, heads=heads, dim_head=dim // heads)


def memory_efficient_attention(dim: int = 64, heads: int = 4) -> nn.Module:
    from memory_efficient_attention_pytorch import Attention

    return Attention(
        dim=dim, heads=heads, dim_head=dim // heads, memory_efficient=True, q_bucket_size=32, k_bucket_size=32
    )


def min_gru(dim: int = 64) -> nn.Module:
    from minGRU_pytorch import minGRU

    return minGRU(dim)


_SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
}


def bigbird() -> nn.Module:
    from transformers import BigBirdConfig, BigBirdModel

    return BigBirdModel(BigBirdConfig(**_SMALL, block_size=8, num_random_blocks=2), add_pooling_layer=False)


def longformer() -> nn.Module:
    from transformers import LongformerConfig, LongformerModel

    return LongformerModel(LongformerConfig(**_SMALL, attention_window=[32], pad_token_id=0), add_pooling_layer=False)


def fnet() -> nn.Module:
    from transformers import FNetConfig, FNetModel

    few = {name: value for name, value in _SMALL.items() if name != "num_attention_heads"}
    return FNetModel(FNetConfig(**few), add_pooling_layer=False)


def reformer_of_transformers() -> nn.Module:
    from transformers import ReformerConfig, ReformerModel

    return ReformerModel(
        ReformerConfig(
            vocab_size=64,
            hidden_size=64,
            num_attention_heads=4,
            attention_head_size=16,
            feed_forward_size=64,
            attn_layers=["lsh"],
            axial_pos_embds=False,
            max_position_embeddings=1024,
            lsh_attn_chunk_length=16,
            num_buckets=8,
        )
    )


def mra() -> nn.Module:
    from transformers import MraConfig, MraModel

    return MraModel(MraConfig(**_SMALL))


def yoso() -> nn.Module:
    from transformers import YosoConfig, YosoModel

    return YosoModel(YosoConfig(**_SMALL))


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_SMALL), add_pooling_layer=False)


def nystromformer() -> nn.Module:
    from transformers import NystromformerConfig, NystromformerModel

    return NystromformerModel(NystromformerConfig(**_SMALL, segment_means_seq_len=128, num_landmarks=16))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=4))


def mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2Model

    return Mamba2Model(
        Mamba2Config(
            vocab_size=64, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=1
        )
    )


_NO_PAIRS = "^no pairs are formed"
_LINEAR = "as n$"
_SQUARE = "as n²"
_ALL = "every token"
_PAST = "its token and all earlier ones"
_SOFTMAX = "^plain softmax attention"

EXPECTED = {
    "performer_pytorch": Expected(
        "performer-pytorch", "random features, linear", {"attention": _NO_PAIRS, "reads": _ALL, "cost": _LINEAR}
    ),
    "linformer_package": Expected(
        "linformer",
        "projection to 256 keys, linear",
        {"attention": "fixed number of (keys or summaries|summaries.*): 256", "reads": _ALL, "cost": _LINEAR},
    ),
    "linformer_pytorch": Expected(
        "linformer-pytorch",
        "projection to 64 keys; takes one length only",
        {
            "attention": "fixed number of (keys or summaries|summaries.*): 64|could not be asked: it takes",
            "reads": _ALL,
        },
        ("--width", "16"),
    ),
    "nystrom_attention": Expected(
        "nystrom-attention", "256 landmarks, linear from there on", {"reads": _ALL, "cost": _LINEAR}
    ),
    "local_attention": Expected(
        "local-attention", "windows of 32 and the one before, linear", {"reads": "at most|last of", "cost": _LINEAR}
    ),
    "reformer_pytorch": Expected(
        "reformer-pytorch",
        "hashing; its rotations take memory n²",
        {"attention": "^no (pairs|operation)", "cost": _SQUARE},
    ),
    "linear_attention_transformer": Expected(
        "linear-attention-transformer",
        "softmax of queries and of keys apart, linear",
        {"reads": _ALL, "cost": _LINEAR},
    ),
    "sinkhorn_transformer": Expected(
        "sinkhorn-transformer",
        "blocks that are sorted; the sorting is (n / block)²",
        {"attention": "^(each token attends|no |none)"},
    ),
    "routing_transformer": Expected(
        "routing-transformer", "clusters by k-means and windows", {"attention": "^(each token attends|no |none)"}
    ),
    "x_transformers": Expected(
        "x-transformers", "softmax attention, causal", {"attention": _SOFTMAX, "reads": _PAST, "cost": _SQUARE}
    ),
    "mambapy": Expected(
        "mambapy",
        "a state of 32 × 16 numbers and a window of 4",
        {"attention": "^no", "reads": _PAST, "cost": _LINEAR},
    ),
    "h_transformer_1d": Expected(
        "h-transformer-1d", "near tokens in full, far ones averaged", {"attention": "^(?!plain)"}
    ),
    "taylor_series_linear_attention": Expected(
        "taylor-series-linear-attention",
        "the second Taylor polynomial, linear",
        {"attention": _NO_PAIRS, "reads": _ALL, "cost": _LINEAR},
    ),
    "native_sparse_attention": Expected(
        "native-sparse-attention-pytorch",
        "all compressed keys, chosen blocks and a window, causal: n²",
        {"attention": _SQUARE, "cost": _SQUARE, "future": "not seen"},
    ),
    "mega": Expected("mega-pytorch", "softmax attention over averages: n²", {"attention": _SOFTMAX, "cost": _SQUARE}),
    "agent_attention": Expected(
        "agent-attention-pytorch",
        "16 summaries that each token reads, linear",
        {"attention": "16", "reads": _ALL, "cost": _LINEAR},
    ),
    "memory_efficient_attention": Expected(
        "memory-efficient-attention-pytorch",
        "softmax attention in tiles of 32: exact, time n²",
        {"attention": "tiles|^plain", "reads": _ALL, "cost": _SQUARE},
    ),
    "min_gru": Expected(
        "minGRU-pytorch",
        "a recurrence of 64 numbers",
        {"attention": "^none", "between tokens": "about 64 numbers", "reads": _PAST, "cost": _LINEAR},
    ),
    "bigbird": Expected("transformers", "BigBird: blocks; its matrix of weights is n²", {"attention": "^(?!plain)"}),
    "longformer": Expected("transformers", "Longformer: windows of 32", {"attention": "^(?!plain)"}),
    "fnet": Expected("transformers", "FNet: a Fourier transform", {"attention": "^(?!plain)", "reads": _ALL}),
    "reformer_of_transformers": Expected("transformers", "Reformer: hashing", {"attention": "^(?!plain)"}),
    "mra": Expected("transformers", "MRA: on a CPU no token reads another", {"attention": "no token reads another"}),
    "yoso": Expected("transformers", "YOSO: in eval mode all n × n pairs", {"attention": "n × n", "cost": _SQUARE}),
    "bert": Expected(
        "transformers", "BERT: softmax attention", {"attention": _SOFTMAX, "reads": _ALL, "cost": _SQUARE}
    ),
    "nystromformer": Expected(
        "transformers", "Nyströmformer: 16 landmarks", {"attention": "^(?!plain|none)", "reads": _ALL}
    ),
    "gpt2": Expected(
        "transformers", "GPT-2: softmax attention, causal", {"attention": _SOFTMAX, "reads": _PAST, "cost": _SQUARE}
    ),
    "mamba2": Expected("transformers", "Mamba-2: a state", {"attention": "^no", "reads": _PAST}),
}


def asked(name: str) -> Row:
    """What ``check`` says of a module now."""
    expected = EXPECTED[name]
    command = [sys.executable, "-m", "attnbench", "check", f"{__file__}:{name}", "--json", "--timeout", "1800"]
    done = subprocess.run([*command, *expected.options], capture_output=True, text=True, check=False)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {"answers": {}, "broken": [], "refused": done.stderr.strip().rpartition("\n")[2]}
    answers = said["answers"]
    wrong = [said["refused"]] if "refused" in said else [f"it is accused: {one}" for one in said["broken"]]
    wrong += [
        f"{question}: {answers.get(question, 'no answer')}"
        for question, right in expected.answers.items()
        if not re.search(right, answers.get(question, ""))
    ]
    told = [answers.get(question, "") for question in ("attention", "reads", "cost")]
    today = datetime.now(UTC).date().isoformat()
    right = "; ".join(wrong) or "yes"
    return Row(name, expected.package, version(expected.package), expected.is_, *told, right=right, date=today)


def read() -> list[Row]:
    """The rows of :data:`FILE`."""
    if not FILE.is_file():
        return []
    with FILE.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def write(rows: list[Row]) -> None:
    """Put these rows in place of those of the same names."""
    every = {one.name: one for one in (*read(), *rows)}
    with FILE.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(every[name]) for name in EXPECTED if name in every)


if __name__ == "__main__":
    for name in sys.argv[1:] or EXPECTED:
        write([row := asked(name)])
        print(f"{name}: {row.right}", flush=True)
