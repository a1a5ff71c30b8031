"""The queries and keys of one head after another: of a captured model, or drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnbench.catalogue.inputs.captured_qkv import extent
from attnbench.contract.inputs import INPUTS, draw_qkv
from attnbench.contract.problem.shape import Shape
from attnbench.contract.spec import Spec, parse_spec
from attnbench.errors import UsageError

DRAWN_DIM = 64
"""Width of a head of inputs that are drawn."""


@dataclass(frozen=True)
class Head:
    """Queries and keys of one head, in float64."""

    layer: int | None
    """None for an input without layers."""
    head: int
    q: Tensor
    """``(1, 1, N, D)``."""
    k: Tensor

    @property
    def name(self) -> str:
        return f"head {self.head}" if self.layer is None else f"layer {self.layer}, head {self.head}"


def heads_of(
    inputs: str, n: int, *, causal: bool, layer: int | None = None, head: int | None = None
) -> tuple[str, list[Head]]:
    """The label of the input, and its heads, all or only ``layer`` and ``head``, from 0, at its first ``n`` positions.

    Raises UsageError for an unknown input, layer or head, and Unsupported if the input has fewer positions.
    """
    spec = parse_spec(inputs)
    spec = INPUTS.get(spec.name).normalise(spec)
    size = extent(spec)
    if layer is not None:
        if "layer" in dict(spec.options):
            raise UsageError(f"--layer {layer} and {inputs} both name a layer; remove one")
        spec = Spec.of(spec.name, {**dict(spec.options), "layer": layer})
    held, count, width, value_width = size or (0, 1, DRAWN_DIM, DRAWN_DIM)
    if head is not None and not 0 <= head < count:
        raise UsageError(f"{spec.name}: no head {head}, it has {count}, counted from 0")
    shape = Shape(heads=count, seq_len=n, head_dim=width, v_dim=value_width, causal=causal)
    asked = dict(spec.options).get("layer")
    layers: list[int | None] = [None] if size is None else [*range(held)] if asked is None else [int(asked)]
    found = []
    for one in layers:
        named = spec if one is None else Spec.of(spec.name, {**dict(spec.options), "layer": one})
        q, k, _ = (x.double() for x in draw_qkv(named, shape, 0))
        found += [
            Head(one, place, q[:, place : place + 1], k[:, place : place + 1])
            for place in (range(count) if head is None else (head,))
        ]
    return spec.label, found


def softmax_matrix(head: Head, *, causal: bool) -> Tensor:
    """The exact weights ``(N, M)`` of a head, in float64."""
    logits = (head.q @ head.k.mT)[0, 0] * head.q.shape[-1] ** -0.5
    if causal:
        visible = torch.ones(logits.shape, dtype=torch.bool).tril()
        logits = logits.masked_fill(~visible, float("-inf"))
    weights: Tensor = logits.softmax(-1)
    return weights
