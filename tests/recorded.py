"""What every variant computes today, written down, so that a change of the code can be held to it.

    python -m tests.recorded write before.safetensors
    python -m tests.recorded compare before.safetensors

Outputs, gradients and what was drawn at fixed seeds: each variant, each of its settings, causal or not, with a key mask
or without, short and longer than a tile. ``compare`` prints each number that is not the same bit by bit, with its
largest difference relative to the largest recorded entry, and exits with 1 if one is above ``--rounding`` or a case is
missing. The file is for one machine and one torch; it is kept out of git.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnbench.catalogue.build import build
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import parse_spec
from attnbench.contract.variant import VARIANTS, Variant
from attnbench.errors import Unsupported, UsageError

LENGTHS = 50, 600


def recorded(entry: Variant) -> Iterator[tuple[str, Tensor]]:
    """Names and numbers of all cases of one variant."""
    for setting, causal, n in product(entry.settings, (False, True), LENGTHS):
        shape = Shape(2, 2, n, 16, causal=causal)
        spec = parse_spec(f"{entry.name}:{setting}".rstrip(":"))
        try:
            module = build(spec, shape, seed=1)
        except (Unsupported, UsageError):  # settings for few tokens, say
            continue
        name = f"{spec}|causal={causal}|n={n}"
        for key, tensor in module.state_dict().items():
            yield f"{name}|drawn {key}", tensor
        for masked in (False, True):
            if masked and entry.unsupported_reason(shape, key_mask=True):
                continue
            yield from computed(f"{name}|masked={masked}", module, entry, shape, masked)


def computed(
    name: str, module: torch.nn.Module, entry: Variant, shape: Shape, masked: bool
) -> Iterator[tuple[str, Tensor]]:
    """Output and gradients."""
    draws = torch.Generator().manual_seed(2)
    if entry.kind == "mixer":
        inputs = [torch.randn(shape.B, shape.N, shape.C, generator=draws)]
    else:
        inputs = [torch.randn(shape.B, shape.H, shape.N, shape.D, generator=draws) for _ in range(3)]
    mask = torch.rand(shape.B, shape.N, generator=draws) < 0.8 if masked else None
    for x in inputs:
        x.requires_grad_()
    module.zero_grad()
    out = module(*inputs, key_mask=mask)
    yield f"{name}|output", out.detach()
    with torch.inference_mode():
        yield f"{name}|output without gradients", module(*(x.detach() for x in inputs), key_mask=mask)
    if not out.requires_grad:
        return
    out.backward(torch.randn(out.shape, generator=draws))
    for place, x in enumerate(inputs):
        if x.grad is not None:
            yield f"{name}|gradient {place}", x.grad
    for key, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"{name}|gradient {key}", parameter.grad


def everything(names: list[str]) -> dict[str, Tensor]:
    """All cases of these variants; of all but compiled ones where none is named."""
    entries = [VARIANTS.get(name) for name in names] or [one for one in VARIANTS if not one.traits.compiled]
    return {name: tensor.contiguous().clone() for entry in entries for name, tensor in recorded(entry)}


def difference(found: Tensor, kept: Tensor) -> float:
    """Largest difference over the largest recorded entry; infinite where shapes, dtypes or NaN differ."""
    if found.shape != kept.shape or found.dtype != kept.dtype or bool((found.isfinite() != kept.isfinite()).any()):
        return float("inf")
    finite = kept.isfinite()
    gap = (found[finite].double() - kept[finite].double()).abs()
    return float(gap.max() / kept[finite].double().abs().max().clamp(min=1e-30)) if gap.numel() else 0.0


def compare(kept: dict[str, Tensor], found: dict[str, Tensor], rounding: float) -> int:
    """Prints what differs; the number of cases that differ by more than rounding or are not there."""
    bad = 0
    for name in sorted(kept.keys() | found.keys()):
        if name not in found or name not in kept:
            print(f"{name}: {'not computed' if name in kept else 'not recorded'}")
            bad += 1
        elif not torch.equal(found[name].nan_to_num(), kept[name].nan_to_num()):
            gap = difference(found[name], kept[name])
            print(f"{name}: {gap:.1e}{'  ABOVE ROUNDING' * (gap > rounding)}")
            bad += gap > rounding
    same = sum(name in found and torch.equal(found[name].nan_to_num(), kept[name].nan_to_num()) for name in kept)
    print(f"{same} of {len(kept)} the same bit by bit, {bad} beyond {rounding:g} or missing")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("variants", nargs="*")
    parser.add_argument("--rounding", type=float, default=2e-6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = everything(given.variants)
    if given.what == "write":
        save_file(found, given.file)
        print(f"{len(found)} tensors of {len({name.partition('|')[0] for name in found})} settings: {given.file}")
        return 0
    kept = load_file(given.file)
    if given.variants:
        kept = {
            name: tensor for name, tensor in kept.items() if name.partition("|")[0].partition(":")[0] in given.variants
        }
    return int(compare(kept, found, given.rounding) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
