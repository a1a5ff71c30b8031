"""Softmax over a pattern of pairs, as PyTorch's operations or as one kernel of FlexAttention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.catalogue.engines import forms
from attnbench.catalogue.engines.flex.block_mask import Seen, asking
from attnbench.catalogue.engines.flex.flex_attention import DTYPES, FlexKernel, Mod, added_by_distance
from attnbench.catalogue.engines.masks import emptied
from attnbench.catalogue.engines.tiling import learned
from attnbench.contract.compiled import apart, foreseen
from attnbench.contract.problem.position_bias import PositionBias
from attnbench.contract.problem.sink import Sink
from attnbench.contract.traits import TraitChanges

Form = Annotated[Literal["auto", "torch", "flex"], Field(description=forms.WHICH)]

COMPILED: tuple[str, TraitChanges] = ("form=flex", {"compiled": True, "dtypes": DTYPES})
"""The claims of a variant with this option."""

Added = PositionBias | Callable[[Tensor], tuple[Tensor, Mod]]
"""An addition to scores: a bias, or a map from q to a tensor that may be learned and the function that adds it."""

_Made = TypeVar("_Made")

_KEPT = 4
"""Block masks kept by a module: of two lengths, with padding and without."""


class FlexPattern:
    """A variant's form and, for FlexAttention, its kernel and cached block masks.

    The kernel is compiled at the first call for each shape and type. ``auto`` takes it on a CUDA device alone.
    """

    def __init__(self, name: str, form: str, *, fits: bool = True) -> None:
        """Choose a form.

        Args:
            name: of the variant with its options, for the cache of verdicts.
            fits: its options leave a softmax over pairs, as the kernel computes.

        Raises:
            Unsupported: the kernel was asked for by name, and it does not fit.
        """
        if not fits:
            forms.require(name, form, ())
        self.name, self.form, self.fits = name, form, fits
        self._kernel: FlexKernel | None = None
        self._kept: dict[Hashable, Any] = {}

    def attend(
        self,
        plain: Callable[..., Tensor],
        seen: Callable[[Tensor], Seen],
        *given: Tensor,
        key_mask: Tensor | None = None,
        bias: Added | None = None,
        sink: Sink | None = None,
        known: Hashable = (),
    ) -> Tensor:
        """``(B, H, N, E)`` over a pattern with cached block masks.

        Args:
            plain: PyTorch's operations on q, k, v and the key mask, if any; a bias or sink may have more heads.
            seen: the pairs of q ``(B, H, N, D)`` that count.
            given: q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)``.
            known: the key of a block mask in the cache, apart from the number of tokens.
        """
        masks = partial(self._mask, seen, known)
        return self.over(plain, masks, *given, key_mask=key_mask, bias=bias, sink=sink)

    def over(
        self,
        plain: Callable[..., Tensor],
        masks: Callable[[Tensor, Tensor | None], tuple[BlockMask, int | None]],
        *given: Tensor,
        key_mask: Tensor | None = None,
        bias: Added | None = None,
        sink: Sink | None = None,
        same_tokens: bool = False,
    ) -> Tensor:
        """:meth:`attend` over pairs that were chosen for these inputs.

        Args:
            masks: maps q and a key mask to a block mask and its pairs over all heads of an example, if known.
            same_tokens: a padded token is no query either, and its q is emptied.
        """
        if key_mask is not None:
            given = *given, key_mask

        def fused(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
            mask, pairs = masks(q, key_mask)
            if same_tokens:
                (q,) = emptied(key_mask, q)
            return self._run(q, *emptied(key_mask, k, v), mask=mask, pairs=pairs, bias=bias, sink=sink)

        if self.form == "flex" and self.may_run(given[0]) and not forms.on_device(given[0]):
            return fused(*given)  # compiled for a CPU, without gradients
        name = f"{self.name}, bias={bias is not None}, sink={sink is not None}"
        return forms.attend(name, self.form, plain, *given, fast={"flex": fused} if self.fits else {})

    def may_run(self, q: Tensor) -> bool:
        """Return True if the kernel may run on such a tensor, so that a block mask is wanted."""
        device = self.form == "flex" or (self.form == "auto" and forms.on_device(q) and q.dtype != torch.float64)
        return self.fits and device and not foreseen(q)

    def _mask(
        self, seen: Callable[[Tensor], Seen], known: Hashable, q: Tensor, key_mask: Tensor | None
    ) -> tuple[BlockMask, int]:
        def made() -> tuple[BlockMask, int, Mod]:
            found = seen(q)
            return (
                found.mask(None if key_mask is None else torch.ones_like(key_mask)),
                found.pairs(q.shape[1]),
                found.mod,
            )

        mask, pairs, mod = self.kept((q.shape[1], q.shape[2], q.device, key_mask is None, known), made)
        if key_mask is not None:
            mask = copy.copy(mask)
            mask.mask_mod = asking(key_mask, mod)
        return mask, pairs

    def kept(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """A cache of the last few results of ``make``."""
        if key not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            with apart(), torch.inference_mode(False), torch.no_grad():  # gradients may be wanted next time
                self._kept[key] = make()
        made: _Made = self._kept[key]
        return made

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: BlockMask,
        pairs: int | None,
        bias: Added | None,
        sink: Sink | None,
    ) -> Tensor:
        if self._kernel is None:
            self._kernel = FlexKernel()
        (H, n), score_mod, logit = q.shape[1:3], None, None
        inputs = [q, k, v]
        if bias is not None:
            if isinstance(bias, PositionBias):
                line = bias.along(torch.arange(1 - n, n, device=q.device), torch.float32)[:H]
                added = line, added_by_distance(line, n - 1)
            else:
                added = bias(q)
            score_mod = added[1]
            inputs.append(added[0])
        if sink is not None:
            logit = sink.logit.float()[:H]
            inputs.append(logit)
        return self._kernel(
            q, k, v, lambda: mask, pairs=pairs, learned=learned(*inputs), score_mod=score_mod, sink=logit
        )
