"""Small models for tests: no shipped weights, milliseconds a window."""

from __future__ import annotations

import torch

from attnbench.catalogue.inputs.listops_encoder import ListOpsEncoder
from attnbench.catalogue.tasks.listops import TOKENS
from attnbench.models.pretrained.own_encoder import OwnEncoder


def tiny(length: int = 24, *, layers: int = 3) -> OwnEncoder:
    """An untrained encoder of a few thousand parameters, always the same."""
    torch.manual_seed(1)
    encoder = ListOpsEncoder(vocab=len(TOKENS), classes=10, layers=layers, heads=2, head_dim=8).eval()
    with torch.no_grad():
        for block in encoder.blocks:
            block.to_qkv.weight.mul_(3.0)  # logits that are not all alike
    return OwnEncoder(length, encoder)
