"""Widely used packages as variants ``peer.NAME``; importing this module registers them.

An adapter imports its package when it is built, so that listing variants does not load ten packages.
"""

from importlib import import_module

for _name in (
    "layouts",
    "torch_sdpa",
    "exact_kernels",
    "performer",
    "linear_attention_transformer",
    "flash_linear_attention",
    "fla_layers",
    "fla_naive",
    "fla_selecting",
    "fast_transformers",
    "linformer",
    "nystrom",
    "local_attention",
    "reformer",
    "routing",
    "sinkhorn",
    "longformer",
    "bigbird",
    "nystromformer",
    "reformer_of_transformers",
    "fnet",
):
    import_module(f"{__name__}.{_name}")
