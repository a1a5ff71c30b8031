"""All variants, in the order shown to users; imported when the table of variants is first asked."""

from __future__ import annotations

from importlib import import_module

from attnbench.plugins import load_installed

for _name in (
    "softmax",
    "chunked",
    "sdpa",
    "flex",
    "identity",
    "mean_value",
    "oracle_lowrank",
    "oracle_topk",
    "local",
    "sparse",
    "longformer",
    "etc",
    "bigbird",
    "per_head",
    "reformer",
    "routing",
    "clustered",
    "sinkhorn",
    "topk",
    "hyperattention",
    "linformer",
    "nystrom",
    "skyformer",
    "thinformer",
    "monarch",
    "linear",
    "efficient",
    "performer",
    "favor_plus_plus",
    "rfa",
    "cosformer",
    "taylor",
    "hedgehog",
    "lara",
    "retnet",
    "gla",
    "ssd",
    "delta",
    "rfa_gated",
    "memory_compressed",
    "perceiver",
    "synthesizer",
    "aft",
    "fnet",
    "gmlp",
    "mlp_mixer",
    "xca",
    "pooling",
):
    import_module(f"{__name__}.{_name}")

load_installed()
