"""All variants, in the order shown to users, with the module of each; it is imported when the name is looked up."""

from __future__ import annotations

from attnbench.contract.plugins.discovery import load_installed

_ORDER = (
    ("exact", "softmax chunked sdpa flex mla quantised quantised-cache"),
    ("reference", "identity mean-value dense oracle-lowrank oracle-topk oracle-blocks noise rwwn"),
    ("pattern", "local streaming sparse longformer etc bigbird sta radial graph per-head"),
    ("selection", "reformer routing clustered sinkhorn topk indexed nsa"),
    ("selection.kv_budget", "expected-attention h2o keydiff knorm quest snapkv tova"),
    ("selection", "moba msa xattention flexprefill minference sparge monotonic hyperattention"),
    ("low_rank", "linformer nystrom skyformer"),
    ("selection", "thinformer"),
    ("low_rank", "monarch"),
    ("kernel", "linear efficient performer favor-plus-plus rfa cosformer taylor hedgehog lara kernel"),
    ("pairwise", "additive bilinear differential gated-softmax fox path deltaformer parallax"),
    ("kernel", "window-linear"),
    ("recurrence", "retnet gla abc gsa ssd log-linear mamba2 mesa delta gated-delta gated-delta-2 comba kda rwkv7"),
    ("recurrence", "rfa-gated s4d lstm gru"),
    ("selection.compressed", "csa hca"),
    ("low_rank", "memory-compressed perceiver"),
    ("synthetic", "synthesizer location aft fnet gmlp mlp-mixer conv long-conv hyena xca pooling"),
)
SHIPPED = {
    **{name: f"{folder}.{name.replace('-', '_')}" for folder, names in _ORDER for name in names.split()},
    "stack": "stack",
}
"""Name of a variant -> its module here."""

load_installed()
