"""Attention functions of the Hugging Face hub: ``--plugin hub:OWNER/NAME@VERSION`` registers ``peer.sdpa.NAME``.

The package ``kernels`` brings the build for this torch and this GPU, and checks its hash. The default version is that
of ``kernels.lock`` in the current folder, as ``kernels lock`` writes it. The kernel needs a function
``flash_attn_func(q, k, v, causal=...)`` of ``(B, N, H, D)``: FlashAttention-2, -3 and -4 have it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract.compiled import out_of_sight
from attnbench.contract.problem.shape import Shape
from attnbench.contract.variant import VARIANTS, No, Traits, register
from attnbench.errors import Unsupported, UsageError

LOCK = "kernels.lock"
_FUNCTION = "flash_attn_func"


def register_kernel(text: str) -> tuple[str, str]:
    """Register the kernel of ``OWNER/NAME@VERSION``, once; return the repository, and the commit or the build loaded.

    Raises UsageError: the package is missing, the text is no repository, or it has no such function.
    """
    repository, _, version = text.partition("@")
    name = f"peer.sdpa.{repository.rpartition('/')[2]}"
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UsageError("write hub:OWNER/NAME@VERSION, such as hub:kernels-community/flash-attn3@1")
    try:
        kernels: Any = import_module("kernels")
    except ImportError:
        raise UsageError("it needs the package kernels; pip install 'attnbench[kernels]'") from None
    if version:
        which: dict[str, Any] = {"version": int(version)} if version.isdecimal() else {"revision": version}
        module = kernels.get_kernel(repository, **which)
    elif Path(LOCK).is_file():
        module = kernels.get_locked_kernel(repository, lockfile=Path(LOCK))
    else:
        raise UsageError(f"no version; write hub:{text}@1, or name it in {LOCK} by 'kernels lock'")
    attend = getattr(module, _FUNCTION, None)
    if attend is None:
        has = ", ".join(one for one in dir(module) if not one.startswith("_")) or "nothing"
        raise UsageError(f"it has no {_FUNCTION}, and this is all that is called here; it has {has}")
    if name not in VARIANTS:
        _register(name, repository, attend)
    return repository, _build(kernels, module)


def _build(kernels: Any, module: Any) -> str:
    parts = Path(module.__file__).parts
    if "snapshots" in parts[:-1]:
        return parts[parts.index("snapshots") + 1]
    return next((one.metadata.id for one in kernels.get_loaded_kernels() if one.module is module), "")


def _register(name: str, repository: str, attend: Callable[..., Any]) -> None:
    class FromTheHub(nn.Module):
        def __init__(self, shape: Shape) -> None:
            super().__init__()
            if not torch.cuda.is_available():
                raise Unsupported(f"{repository} has kernels for a CUDA device, and there is none")
            self.causal = shape.causal

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
            if q.dtype not in (torch.bfloat16, torch.float16):
                dtype = str(q.dtype).removeprefix("torch.")
                raise Unsupported(f"{repository} takes bfloat16 and float16, not {dtype}")

            def call() -> Tensor:
                got = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=self.causal)
                out: Tensor = got[0] if isinstance(got, tuple) else got
                return out.transpose(1, 2)

            (B, H, N, D), (M, E) = q.shape, v.shape[2:]
            pairs = B * H * (N * (N + 1) // 2 if self.causal else N * M)
            return out_of_sight(
                call,
                like=q[..., :1].expand(B, H, N, E),
                kernel=repository,
                matmul_flops=2 * (D + E) * pairs,
                backward_flops=2 * (3 * D + 2 * E) * pairs,
                exponentials=pairs,
            )

    facts = {"__doc__": f"{_FUNCTION} of {repository}, from the hub.", "__module__": __name__}
    register(
        name,
        family="exact",
        source=f"huggingface.co/{repository}, {_FUNCTION}",
        formula="softmax(Q·Kᵀ/√D)·V",
        cost="O(n²·d)",
        traits=Traits(
            exact=True, shares="by itself", permutable=True, dtypes=(), key_padding=No("it is called without a mask")
        ),
    )(type(name, (FromTheHub,), facts))
