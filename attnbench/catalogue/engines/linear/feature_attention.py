"""Linear attention with a feature map, as a module: all keys at once, causal, and one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.linear import fused
from attnbench.catalogue.engines.linear.all_keys import add_keys, attend_all
from attnbench.catalogue.engines.linear.causal import attend_causally
from attnbench.catalogue.engines.linear.feature_map import FeatureMap, LogKeys, Prepared, PreparedLogKeys, Tiles
from attnbench.catalogue.engines.linear.key_sums import KeySums
from attnbench.catalogue.engines.masks import emptied, visible_pairs
from attnbench.catalogue.engines.tiling import head_groups, row_blocks
from attnbench.contract.problem.shape import Shape

Chunk = Annotated[
    int | None, Field(ge=1, description="tokens taken at a time; none: what is fast. Moves time and memory only")
]
Form = Annotated[
    Literal["auto", "torch", "triton"],
    Field(description="PyTorch's operations, or sums by fused kernels on a CUDA device; auto: these if they are right"),
]
"""The option of variants with features for :func:`attnbench.catalogue.engines.linear.fused.of_map`."""

_MOST_BYTES = 1 << 32
"""Most bytes of all queries' features, or all keys', with which ``auto`` takes the kernels: they read ready ones."""
_ROWS = 64
"""Tokens of a step of several that see one another in one product; the others come through the sums."""


class FeatureAttention(nn.Module):
    """Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j); a subclass defines φ and the weights."""

    def __init__(
        self, shape: Shape, chunk: int | None, form: str = "torch", unmasked: Mapping[str, Callable[..., Tensor]] = {}
    ) -> None:
        """``unmasked`` are forms of q, k and v alone, to prefer to ``triton``."""
        super().__init__()
        self.causal, self.chunk, self.head_dim, self.unmasked = shape.causal, chunk, shape.D, unmasked
        self.summed_by = forms.require("these sums", form, (*unmasked, *(("triton",) if chunk is None else ())))

    def feature_map(self, dtype: torch.dtype) -> FeatureMap:
        raise NotImplementedError

    def pair_weights(self, q: Tensor, k: Tensor, allowed: Tensor) -> Tensor:
        """Weights ``(B, H, N, M)`` by the plain formula, for :meth:`dense`.

        ``allowed`` is ``(B, 1, N, M)`` bool; other pairs may have any finite weight.
        """
        raise NotImplementedError

    def prepare(self, x: Tensor, *parameters: Tensor) -> Tensor:
        """The input of φ, made of queries or keys ``(B, H, N, D)`` row by row; in x's dtype or a wider one.

        ``parameters`` are those of :meth:`attend_prepared`; none in decoding.
        """
        return x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        return self.attend(q, k, v, key_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return self._in_form(self.attend_as_it_is, q, k, v, key_mask)

    def attend_prepared(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, parameters: tuple[Tensor, ...]
    ) -> Tensor:
        """:meth:`forward` for queries and keys that :meth:`prepare` changes first.

        Gradients reach the parameters ``(B, H, ...)``.
        """
        return self._in_form(self._prepared, q, k, v, key_mask, *parameters)

    def _in_form(
        self, compute: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *others: Tensor
    ) -> Tensor:
        masks = () if key_mask is None else (key_mask,)

        def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, by_triton: bool = False) -> Tensor:
            mask = rest[0] if masks else None
            return compute(q, k, v, mask, *rest[len(masks) :], by_triton=by_triton)

        # A name is for a cache of verdicts, of which a compiled call has none.
        name, width = ("", 0) if torch.compiler.is_compiling() else self._computation
        fast = {} if masks else dict(self.unmasked)
        small = 4 * width * max(x.shape[:3].numel() for x in (q, k)) <= _MOST_BYTES
        if self.chunk is None and (small or self.summed_by == "triton"):
            fast["triton"] = partial(run, by_triton=True)
        return forms.attend(name, self.summed_by, run, q, k, v, *masks, *others, fast=fast)

    @cached_property
    def _computation(self) -> tuple[str, int]:
        """Its name and the number of its features."""
        features = self.feature_map(torch.float32)
        of = f"{features.width} of {type(features).__name__}"
        return f"{type(self).__name__.lower()}, {of}, causal={self.causal}", features.width

    def attend_as_it_is(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, by_triton: bool = False
    ) -> Tensor:
        features = self.feature_map(q.dtype)
        if by_triton:
            return fused.of_map(features, q, k, v, fused.CountedKeys(self.causal, key_mask))
        if self.causal:
            return attend_causally(q, k, v, features, key_mask=key_mask, chunk=self.chunk)
        return attend_all(q, k, v, features, key_mask=key_mask, rows=self.chunk)

    def _prepared(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *parameters: Tensor, by_triton: bool
    ) -> Tensor:
        if self.causal or by_triton or torch.is_grad_enabled():
            (k,) = emptied(key_mask, k)
            x, y = self.prepare(q, *parameters), self.prepare(k, *parameters)
            return self.attend_as_it_is(x, y, v, key_mask, by_triton=by_triton).to(q.dtype)
        # Tile by tile only without gradients, which would take longer through every tile than all at once.
        features = self.feature_map(q.dtype)
        prepared = PreparedLogKeys if isinstance(features, LogKeys) else Prepared
        features = prepared(features, self.prepare, parameters)
        return attend_all(q, k, v, features, key_mask=key_mask, rows=self.chunk)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        allowed = visible_pairs(q, k, self.causal, key_mask)
        weights = self.pair_weights(q, k, allowed).masked_fill(~allowed, 0.0)
        total = weights.sum(-1, keepdim=True).masked_fill(~allowed.any(-1, keepdim=True), 1.0)
        return (weights / total) @ v

    @torch.no_grad()
    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> KeySums:
        """The sums over a prompt ``(B, H, n, D)``, n >= 0: E + 1 numbers per feature, whatever the length."""
        k, features = self.prepare(k), self.feature_map(k.dtype)
        rows = min(256, max(1, k.shape[2]))
        state = KeySums.empty(k, v.shape[-1], features, *k.shape[:2])
        for group in head_groups(k, rows * features.width):
            add_keys(state.of(group), Tiles(features, group, rows, k), k, v, None, rows)
        return state

    @torch.no_grad()
    def step(self, state: KeySums, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, KeySums]:
        """A step for n queries q ``(B, H, n, D)`` at the place of one token; k, v ``(B, H, 1, D)``."""
        features, dtype = self.feature_map(q.dtype), state.top.dtype
        x_q, x_k, values = (x.flatten(0, 1).to(dtype) for x in (self.prepare(q), self.prepare(k), v))
        phi_k, phi = (x.new_empty(*x.shape[:2], features.width) for x in (x_k, x_q))
        log_weight = features.keys(x_k, phi_k)
        features.queries(x_q, phi)
        shape = v.shape[:2]
        phi, phi_k, values = (x.view(*shape, *x.shape[1:]) for x in (phi, phi_k, values))
        if isinstance(features, LogKeys):
            log_weight = phi_k
        elif log_weight is not None:
            log_weight = log_weight.view(*shape, 1, 1)
        return stepped(state, phi, phi_k, log_weight, values, q.dtype)


def stepped(
    state: KeySums, of_query: Tensor, of_key: Tensor, log_weight: Tensor | None, values: Tensor, out: torch.dtype
) -> tuple[Tensor, KeySums]:
    """A step in few calls: at the size of one token a call costs more than its arithmetic.

    Args:
        of_query: ``(B, H, n, F)``; of_key: ``(B, H, 1, F)``; values: ``(B, H, 1, E)``. Or n keys and values without
            log weights, of which each query reads its own and those before it.
        log_weight: that of the key, ``(B, H, 1, 1)``; ``of_key`` itself if its features are their own log weights;
            None: 1.
        out: the dtype of the output.
    """
    of_values, of_ones, top = state.of_values.mT, state.of_ones, state.top
    if of_key.shape[2] > 1:
        outputs = []
        for rows in row_blocks(of_key.shape[2], _ROWS):
            phi, key, value = (x[:, :, rows] for x in (of_query, of_key, values))
            near = torch.matmul(phi, key.mT).tril_()
            total = torch.matmul(phi, of_ones.mT) + near.sum(-1, keepdim=True)
            outputs.append((torch.matmul(phi, of_values) + torch.matmul(near, value)) / total)
            of_values = of_values + torch.matmul(key.mT, value)
            of_ones = of_ones + key.sum(2, keepdim=True)
        found = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return found.to(out), KeySums(of_values.mT, of_ones, top)
    if log_weight is not None:
        top = torch.maximum(top, log_weight)
        decay, weight = (state.top - top).exp2_(), (log_weight - top).exp2_()
        of_values, of_ones = of_values * decay.mT, of_ones * decay
        of_key = weight if log_weight is of_key else of_key * weight
    of_values, of_ones = torch.addcmul(of_values, of_key.mT, values), of_ones + of_key
    found = torch.matmul(of_query, of_values).div_(torch.matmul(of_query, of_ones.mT))
    return found if found.dtype == out else found.to(out), KeySums(of_values.mT, of_ones, top)
