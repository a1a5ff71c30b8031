"""What a package needs, and the reason that a row gets where it is not there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnbench import Unsupported
from attnbench.errors import any_of


def a_gpu(package: str, *majors: int) -> None:
    """Refuse a machine without an NVIDIA GPU, or whose GPU has another major compute capability.

    Args:
        majors: those for which the package has kernels; none if it says no such thing.

    Raises:
        Unsupported
    """
    if not torch.cuda.is_available():
        raise Unsupported(f"the kernels of {package} run on an NVIDIA GPU, and there is none")
    major, minor = torch.cuda.get_device_capability()
    if majors and major not in majors:
        wanted = any_of(f"{one}.x" for one in majors)
        raise Unsupported(f"{package} has kernels for compute capability {wanted}; this GPU has {major}.{minor}")


def function(module: str, name: str, install: str) -> Callable[..., Any]:
    """Function ``name`` of ``module``.

    Raises:
        Unsupported: the package is not installed, or has no such function; ``install`` says how to get it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a package says of itself or of this machine when it is imported
            found: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{error}: {install}") from None
    return found


def half_precision(package: str, q: Tensor) -> None:
    """Refuse what is not float16 or bfloat16.

    Raises:
        Unsupported
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"{package} takes float16 and bfloat16, not {str(q.dtype).removeprefix('torch.')}")


def no_gradient(package: str, *inputs: Tensor) -> None:
    """Refuse a call of which a gradient is wanted: the output would come back without one.

    Raises:
        Unsupported
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise Unsupported(f"{package} has no backward pass")


def first(out: Any) -> Tensor:
    """The output alone, where a package gives the log-sum-exp or the last state beside it."""
    output: Tensor = out[0] if isinstance(out, tuple) else out
    return output
