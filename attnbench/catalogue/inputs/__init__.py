"""Sources of q, k and v, in the order shown to users, with the module of each."""

SHIPPED = {
    "gaussian": "synthetic",
    **dict.fromkeys(("peaked", "clustered", "sink", "low-rank", "banded"), "synthetic"),
    **dict.fromkeys(("listops", "smollm2", "minilm", "file"), "captured_qkv"),
}
"""Name of an input -> its module here."""
