"""Sources of q, k and v, in the order shown to users, with the module of each."""

SHIPPED = {
    "gaussian": "gaussian",
    **dict.fromkeys(("peaked", "clustered", "sink", "low-rank", "banded"), "structured"),
    **dict.fromkeys(("listops", "smollm2", "minilm", "file"), "captured_qkv"),
}
"""Name of an input -> its module here."""
