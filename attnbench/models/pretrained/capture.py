"""Capture a trained model's q, k and v in a file that ``inputs: file:...`` reads."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from attnbench.contract.problem.reference import of_query_heads
from attnbench.errors import Unsupported, UsageError
from attnbench.files import write_output
from attnbench.models.pretrained.subject import Exact, Layer, Subject, Text
from attnbench.text import quantity

FORMAT = 2
MOST_BYTES = 2**31
_KEY = "attnbench"


@dataclass(frozen=True, slots=True)
class Wish:
    """The layers, heads and windows to capture."""

    layers: tuple[int, ...]
    """Empty: the first, the middle and the last."""
    windows: int
    heads: int | None
    """Number of heads of queries to keep, the first ones, with the keys and values that they share; None for all."""
    dtype: str
    every: bool = False
    """All layers, whatever ``layers`` says."""
    gates: bool = False
    """The layers that are recurrences, with their gates."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The file written."""

    shape: tuple[int, ...]
    """``(S, L, H, N, D)``."""
    v_shape: tuple[int, ...]
    """``(S, L, K, N, E)``."""
    bytes: int
    about: dict[str, Any]
    left_out: Sequence[str]
    """Layers that were not taken, with the reason."""


def capture(subject: Subject, text: Text, wish: Wish, out: Path, device: str) -> Captured:
    """Run the untouched model on held-out windows and write ``q (S, L, H, N, D)`` and ``k``, ``v (S, L, K, N, D)``.

    They are taken after rotary embeddings and norms; the model's scale is folded into q, so that softmax(q·k/√D) is the
    layer's attention. Keys and values that heads of queries share are written once. Of recurrences q, k and v are those
    of their kernel, which the operator of the layer's kind also takes, and their gates are written in float32. The
    metadata is JSON under one key, because several would be written in a random order; it holds the spread of the
    file's logits by layer and head, or the means of the gates.

    Raises:
        UsageError: a layer that does not exist, heads without all that share their keys, or a file of more than 2 GiB.
        Unsupported: none of the layers can be captured, or the model's attention was not reached.
        CannotCreate: the file cannot be written.
    """
    chosen, left_out = _chosen(subject.layers, wish)
    shape = subject.layers[chosen[0]].shape
    sharing = subject.layers[chosen[0]].sharing
    heads = min(shape.H, wish.heads or shape.H)
    if heads % sharing:
        raise UsageError(
            f"--heads {heads}: {sharing} heads of queries share one of keys in this model; take a multiple of {sharing}"
        )
    dtype: torch.dtype = getattr(torch, wish.dtype)
    widths = heads * shape.D + heads // sharing * (shape.D + shape.E)
    size = wish.windows * len(chosen) * widths * shape.N * dtype.itemsize
    if size > MOST_BYTES:
        raise UsageError(f"the file would have {size} bytes; take fewer --layers, --windows, --heads or tokens")
    found = _captured(subject, text, wish, chosen, heads, device)
    tensors = {name: (tensor.to(dtype) if name in "qkv" else tensor).contiguous() for name, tensor in found.items()}
    gates = {name: tensor.mean((0, 3, 4)).tolist() for name, tensor in tensors.items() if name not in "qkv"}
    spreads = [
        spread_of(tensors["q"][:, at].float(), tensors["k"][:, at].float(), causal=shape.causal)
        for at in range(len(chosen) * (not gates))
    ]
    about: dict[str, Any] = {
        "made_by": "attnbench capture",
        "format": FORMAT,
        "model": subject.name,
        "model_digest": subject.digest,
        "layers": list(chosen),
        "kinds": [subject.layers[place].kind for place in chosen],
        "causal": shape.causal,
        "heads_of_the_model": shape.H,
        "kv_heads_of_the_model": shape.H // sharing,
        "length": text.length,
        "text": text.name,
        "text_digest": text.digest,
        "scale": "folded",
        "logit_std": [[round(std, 4) for std in deviations] for deviations, _ in spreads],
        "attention_perplexity": [[round(keys, 2) for keys in attended] for _, attended in spreads],
        "gates": gates,
        "versions": {"torch": torch.__version__, **subject.facts},
    }
    content = save(tensors, {_KEY: json.dumps(about, sort_keys=True)})
    write_output(out, content)
    return Captured(tuple(tensors["q"].shape), tuple(tensors["v"].shape), len(content), about, left_out)


def _chosen(layers: Sequence[Layer], wish: Wish) -> tuple[tuple[int, ...], tuple[str, ...]]:
    for place in wish.layers:
        if place >= len(layers):
            raise UsageError(f"--layers {place}: the model has {quantity(len(layers), 'layer')}, counted from 0")
    some = wish.layers or tuple(dict.fromkeys([0, len(layers) // 2, len(layers) - 1]))
    asked = range(len(layers)) if wish.every else some
    left_out = [f"layer {place}: {layers[place].kept}" for place in asked if layers[place].kept]
    free = [place for place in asked if not layers[place].kept]
    if not free:
        raise Unsupported("; ".join(left_out))
    first = layers[free[0]]
    alike = [place for place in free if layers[place] == first]
    left_out += [f"layer {place}: its heads are not those of layer {free[0]}" for place in free if place not in alike]
    return tuple(alike), tuple(left_out)


@torch.inference_mode()
def _captured(
    subject: Subject, text: Text, wish: Wish, chosen: Sequence[int], heads: int, device: str
) -> dict[str, Tensor]:
    windows = text.held_out(wish.windows)
    subject.module.to(device)
    taken: list[dict[str, dict[int, Tensor]]] = []

    def look(place: int, q: Tensor, k: Tensor, v: Tensor, exact: Exact, **gates: Tensor) -> Tensor:
        if place in chosen:
            for name, tensor in {"q": q, "k": k, "v": v, **gates}.items():
                of_file = tensor[0, :heads] if name == "q" else tensor[0, : heads : subject.layers[place].sharing]
                taken[-1].setdefault(name, {})[place] = of_file.float().cpu()
        return exact()

    for window in windows.each():
        taken.append({})
        subject.read(window.tokens.to(device), look)
    in_order = {name: [torch.stack([of[name][place] for place in chosen]) for of in taken] for name in taken[0]}
    return {name: torch.stack(of_windows) for name, of_windows in in_order.items()}


def spread_of(q: Tensor, k: Tensor, *, causal: bool) -> tuple[list[float], list[float]]:
    """The sharpness of one layer's attention over visible pairs, in numbers for each head of queries.

    The first are the standard deviations of a window's logits, mean over windows; the second how many keys a query
    attends to, exp of the mean entropy. q is ``(S, H, N, D)``, k ``(S, K, N, D)``.
    """
    k = of_query_heads(k, q.shape[1])
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril() if causal else visible
    deviations, entropies = torch.empty(2, *q.shape[:2])
    for window, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        logits = q[window, head] @ k[window, head].T * q.shape[-1] ** -0.5
        deviations[window, head] = logits[visible].std()
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        entropies[window, head] = torch.special.entr(weights).sum(-1).mean()
    return deviations.mean(0).tolist(), entropies.mean(0).exp().tolist()
