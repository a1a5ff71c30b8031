"""Exact attention as other projects ship it: FlashAttention-3 and -4, FlashInfer; and SageAttention in 8 bits.

They need an NVIDIA GPU and take float16 and bfloat16. Their layout is ``(B, N, H, D)``, which is a view of
``heads-inside`` inputs: give them these.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from attnbench import No, Shape, Traits, Unsupported, build, register
from attnbench_peers.needs import a_gpu, first, function, half_precision, no_gradient

_NO_MASK = No("the kernel takes no mask")
_CLAIMS: dict[str, Any] = {
    "family": "exact",
    "formula": "softmax(Q·Kᵀ/√D)·V",
    "cost": "O(n²·d)",
}


_LATENT = ((192,), (128,))
"""Widths of keys and of values with which DeepSeek's models attend."""
Apart = tuple[Collection[int], Collection[int]]
"""Widths of keys, and those of values that may stand beside any of them where the two differ."""


def _traits(**more: Any) -> Traits:
    claims = {"exact": True, "shares": "by itself", "permutable": True, "dtypes": (), **more}
    return Traits(key_padding=_NO_MASK, **claims)


class _Exact(nn.Module):
    """What the adapters have in common: ``attend`` of the package, its name and the widths that it takes."""

    def __init__(self, shape: Shape, package: str, widths: tuple[int, ...], *apart: Apart) -> None:
        super().__init__()
        if shape.E != shape.D and not any(shape.D in keys and shape.E in values for keys, values in apart):
            raise Unsupported(f"{package} has no kernel for head_dim {shape.D} and v_dim {shape.E}")
        if shape.E == shape.D and shape.D not in widths:
            raise Unsupported(f"{package} takes head_dim {_listed(widths)}, not {shape.D}")
        self.shape, self.causal, self.package = shape, shape.causal, package

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        out: Tensor = build("softmax", self.shape)(q, k, v)
        return out


_TO_128 = tuple(range(8, 129, 8))
_OF_FLASH3: tuple[Apart, ...] = ((range(8, 65, 8), range(8, 513, 8)), (range(136, 193, 8), range(104, 129, 8)))


def _listed(widths: tuple[int, ...]) -> str:
    step = widths[1] - widths[0]
    return f"{widths[0]} to {widths[-1]} in steps of {step}" if len(widths) > 3 else ", ".join(map(str, widths))


@register(
    "peer.sdpa.flash3",
    source="flash-attention (Dao-AILab), hopper, flash_attn_interface.flash_attn_func",
    traits=_traits(),
    **_CLAIMS,
)
class PeerFlash3(_Exact):
    """FlashAttention-3: flash_attn_func of the package flash_attn_3.

    Written for 3.0.0, which is built from the folder hopper of the repository. Compute capability 9.0 (H100, H200);
    widths to 256, a multiple of 8. Values may be of another width: up to 512 beside keys up to 64, and from 104 to 128
    beside keys from 136 to 192. Heads of queries may share a head of keys: query head h reads h // (H / K).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, "flash_attn_3", tuple(range(8, 257, 8)), *_OF_FLASH3)
        a_gpu(self.package, 9)
        how = "build it from the folder hopper of github.com/Dao-AILab/flash-attention"
        self.attend = function("flash_attn_interface", "flash_attn_func", how)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        half_precision(self.package, q)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return first(self.attend(q, k, v, causal=self.causal)).transpose(1, 2)


@register(
    "peer.sdpa.flash4",
    source="flash-attn-4 (Dao-AILab), flash_attn.cute.flash_attn_func",
    traits=_traits(compiled=True),
    **_CLAIMS,
)
class PeerFlash4(_Exact):
    """FlashAttention-4: flash_attn_func of flash_attn.cute, compiled on its first call.

    Written for flash-attn-4 4.0.0b36. Compute capability 9.0, 10.0 or 12.0; widths to 128, a multiple of 8, of keys
    and of values, and 192 with values of 128. Heads of queries may share a head of keys: query head h reads
    h // (H / K).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, "flash-attn-4", _TO_128, (_TO_128, _TO_128), _LATENT)
        a_gpu(self.package, 9, 10, 11, 12)
        self.attend = function("flash_attn.cute", "flash_attn_func", "pip install --no-deps flash-attn-4==4.0.0b36")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        half_precision(self.package, q)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return first(self.attend(q, k, v, causal=self.causal)).transpose(1, 2)


@register(
    "peer.sdpa.flashinfer",
    source="flashinfer-python, single_prefill_with_kv_cache",
    traits=_traits(compiled=True),
    **_CLAIMS,
)
class PeerFlashInfer(_Exact):
    """FlashInfer: single_prefill_with_kv_cache, for one sequence and without gradients.

    Written for flashinfer-python 0.7.2, whose kernels may be compiled on the first call. It takes one sequence, so
    batch is 1, and widths 64, 128 and 256, or 192 with values of 128. Heads of queries may share a head of keys: query
    head h reads h // (H / K).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, "flashinfer", (64, 128, 256), _LATENT)
        if shape.B > 1:
            raise Unsupported(f"single_prefill_with_kv_cache takes one sequence: set batch to 1, not {shape.B}")
        a_gpu(self.package)
        install = "pip install --no-deps flashinfer-python==0.7.2.post1"
        self.attend = function("flashinfer", "single_prefill_with_kv_cache", install)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        half_precision(self.package, q)
        no_gradient(self.package, q, k, v)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return first(self.attend(q, k, v, causal=self.causal, kv_layout="NHD")).transpose(0, 1)[None]


@register(
    "peer.sdpa.sage",
    source="sageattention (thu-ml), sageattn; Zhang et al. 2024, arXiv:2410.02367",
    traits=_traits(exact=False, v_dim=No("its kernel gives values the width of keys")),
    **_CLAIMS,
)
class PeerSage(_Exact):
    """SageAttention: sageattn, in 8 bits with smoothed keys and without gradients.

    Written for sageattention 1.0.6, which pip brings, and 2.2.0, which is built from its repository; both take the same
    arguments. It rounds q and k to 8 bits, so it is not exact; ``quantised`` is the same with the rounding emulated.
    Compute capability 8.0 and later; widths 64 and 128, since others would be padded or refused. Heads of queries may
    share a head of keys: query head h reads h // (H / K).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, "sageattention", (64, 128))
        a_gpu(self.package, 8, 9, 10, 12)
        self.attend = function("sageattention", "sageattn", "pip install --no-deps sageattention==1.0.6")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        half_precision(self.package, q)
        no_gradient(self.package, q, k, v)
        return first(self.attend(q, k, v, tensor_layout="HND", is_causal=self.causal))
