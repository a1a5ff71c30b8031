"""Softmax over a pattern of pairs, as PyTorch's operations or as one kernel of FlexAttention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask

from attnbench.compiled import apart
from attnbench.engines import forms
from attnbench.engines.flex.blocks import Seen, asking
from attnbench.engines.flex.kernel import FlexKernel, Mod, added_by_distance
from attnbench.engines.masks import emptied
from attnbench.engines.tiling import learned
from attnbench.position_bias import PositionBias
from attnbench.sink import Sink

Form = Annotated[Literal["auto", "torch", "flex"], Field(description=forms.WHICH)]

Added = PositionBias | Callable[[Tensor], tuple[Tensor, Mod]]
"""What is added to scores: a bias, or from q a tensor that may be learned, and the function that adds what it reads."""

_Made = TypeVar("_Made")

_KEPT = 4
"""Block masks that a module keeps: of two lengths, with padding and without."""


class FlexPattern:
    """The form that a variant with a pattern runs in, and the kernel with the block masks that it keeps.

    The kernel is compiled at the first call for each shape and type. ``auto`` takes it on a CUDA device alone.
    """

    def __init__(self, name: str, form: str, *, fits: bool = True) -> None:
        """The arguments say what the module will run.

        Args:
            name: of the variant with its options, for the memory of what was tried.
            fits: whether its options leave a softmax over pairs, which the kernel is.

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
        """``(B, H, N, E)`` over a pattern, whose block masks are kept.

        Args:
            plain: PyTorch's operations on q, k, v and the key mask, if there is one. Of a bias and a sink it takes the
                first heads, if q has fewer.
            seen: the pairs of q ``(B, H, N, D)`` that count.
            given: q ``(B, H, N, D)``, k ``(B, K, N, D)`` and v ``(B, K, N, E)``.
            known: what the pairs depend on beside the number of tokens; a block mask is kept while that is the same.
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
        """The same for what was chosen anew.

        Args:
            masks: for q and a key mask, the block mask and how many pairs it holds over all heads of an example, if
                that is known.
            same_tokens: whether a padded token is no query either, and its q is emptied.
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
        """Whether the kernel may be what runs on such a tensor, so that a block mask is wanted."""
        device = self.form == "flex" or (self.form == "auto" and forms.on_device(q) and q.dtype != torch.float64)
        return self.fits and device and not isinstance(q, FakeTensor)

    def _mask(
        self, seen: Callable[[Tensor], Seen], known: Hashable, q: Tensor, key_mask: Tensor | None
    ) -> tuple[BlockMask, int]:
        """A block mask, and how many pairs it holds over all heads of an example."""

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
        """What was made for a key, while it is one of the last few."""
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
