"""Store the high and low bytes of captured float16 tensors apart: ``python -m tests.catalogue.inputs.halves FILE OUT``.

So are ``smollm2.safetensors`` and ``minilm.safetensors`` of the package made from those of ``make swap``.
"""

from __future__ import annotations

import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def main(file: str, out: str) -> None:
    with safe_open(file, framework="pt") as stored:
        tensors, metadata = {name: stored.get_tensor(name) for name in "qkv"}, stored.metadata()
    halves = {}
    for name, tensor in tensors.items():
        bits = tensor.view(torch.int16)
        halves |= {f"{name}.high": (bits >> 8).to(torch.uint8), f"{name}.low": bits.to(torch.uint8)}
    save_file(halves, out, metadata)


if __name__ == "__main__":
    main(*sys.argv[1:])
