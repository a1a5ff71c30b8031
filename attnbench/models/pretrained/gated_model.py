"""A model of the transformers library with layers that are recurrences, observed at the calls of their kernels.

Such a layer calls a function, which stands in the file of the model's code or is held by the layer. For one pass every
function with the arguments of a known recurrence is replaced by one that also shows them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from attnbench.catalogue.build import build
from attnbench.catalogue.engines.precision import LOG2E
from attnbench.contract.problem.reference import relative_error
from attnbench.contract.problem.shape import Shape
from attnbench.errors import Unsupported
from attnbench.models.pretrained.language_model import SAME, LanguageModel
from attnbench.models.pretrained.subject import Layer, ModelOutput

Tokens = dict[str, Tensor]
"""q, k, v, the gates in the order in which an operator reads them, and ``out``, all ``(B, N, heads, width)``."""
Look = Callable[[str, Tokens], object]
"""Called with the operator that the kernel is, and with its tokens as ``(B, heads, N, width)``."""


def _delta(out: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **more: Any) -> tuple[str, Tokens]:
    """The delta rule, with log α for a head or for each channel of its keys."""
    decay = g if g.ndim == 4 else g[..., None]
    tokens = {"q": q, "k": k, "v": v, "beta": beta[..., None], "log2_decay": decay * LOG2E, "out": out}
    return "gated-delta" if decay is not g else "kda", tokens


def _scan(
    out: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **more: Any
) -> tuple[str, Tokens]:
    """The state space of Mamba-2, less the term D x. Mamba-1, whose A is a matrix, takes no ``chunk_size``."""
    step = dt.float() if more.get("dt_bias") is None else dt.float() + more["dt_bias"]
    step = softplus(step) if more.get("dt_softplus") else step
    step = step.clamp(*more.get("dt_limit", (0.0, math.inf)))[..., None]
    out = out if more.get("D") is None else out - x * more["D"][:, None]
    return "ssd", {"q": C, "k": B, "v": x * step, "log2_decay": A[:, None] * step * LOG2E, "out": out}


_KERNELS = {read: [*signature(read).parameters][1:-1] for read in (_delta, _scan)}
_ALSO = {"query": "q", "key": "k", "value": "v", "hidden_states": "x"}
"""Name of an argument in the transformers library -> in the libraries of kernels."""


class GatedModel(LanguageModel):
    """A model whose layers are the calls of recurrences' kernels, in their order.

    Raises UsageError: windows of this length are longer than the model's positions. Raises Unsupported: no layer calls
    such a kernel.
    """

    def __init__(self, name: str, model: nn.Module, length: int) -> None:
        probe, layers = self._begin(name, model, length), list[Layer]()
        with torch.no_grad(), self._watched(lambda *call: layers.append(_layer(*call))):
            self._run(probe)
        if not layers:
            wanted = " or ".join(", ".join(names) for names in _KERNELS.values())
            raise Unsupported(f"{name}: no layer of it calls a function that takes {wanted}; remove --gates")
        self.layers = tuple(layers)

    def read(self, tokens: Tensor, intercept: Callable[..., Tensor] | None = None) -> ModelOutput:
        """Run the model; ``intercept`` also gets the gates by name, and its answer replaces nothing."""
        places = iter(range(len(self.layers)))

        def look(_: str, of: Tokens) -> None:
            out = of.pop("out")
            if intercept is not None:
                intercept(next(places), exact=lambda: out, **of)

        with self._watched(look):
            return self._run(tokens)

    @contextmanager
    def _watched(self, look: Look) -> Iterator[None]:
        modules = list(self.module.modules())
        files = (sys.modules[name] for name in {type(one).__module__ for one in modules})
        holders = [vars(one) for one in (*modules, *files)]
        functions = [(holder, *one) for holder in holders for one in holder.items() if isinstance(one[1], FunctionType)]
        try:
            for holder, name, function in functions:
                names = {_ALSO.get(name, name) for name in signature(function).parameters}
                for read in (read for read, wanted in _KERNELS.items() if names.issuperset(wanted)):
                    holder[name] = _shown(function, read, look)
            yield
        finally:
            for holder, name, function in functions:
                holder[name] = function


def _shown(kernel: Callable[..., Any], read: Callable[..., tuple[str, Tokens]], look: Look) -> Callable[..., Any]:
    @wraps(kernel)
    def shown(*args: Any, **named: Any) -> Any:
        answer = kernel(*args, **named)
        given = {_ALSO.get(name, name): x for name, x in signature(kernel).bind(*args, **named).arguments.items()}
        operator, of = read(answer[0] if isinstance(answer, tuple) else answer, **given)
        heads = of["v"].shape[2]  # several may share one of queries and keys
        repeated = {name: x.repeat_interleave(heads // x.shape[2], 2) for name, x in of.items()}
        look(operator, {name: x.transpose(1, 2).float() for name, x in repeated.items()})
        return answer

    return shown


def _layer(operator: str, of: Tokens) -> Layer:
    """The layer of a call; its reason to be kept if the operator gives another output."""
    out, (_, H, N, D) = of.pop("out"), of["q"].shape
    shape = Shape(1, H, N, D, causal=True, v_dim=of["v"].shape[3])
    moved = relative_error(build(operator, shape, level="operator").to(out.device)(*of.values()), out)
    kept = "" if moved <= SAME else f"its kernel's output differs by {moved:.2g} from that of {operator}"
    return Layer(shape, operator, kept)
