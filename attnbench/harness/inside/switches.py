"""Process settings that a cell may change, by the words of its row.

Those for torch's precision and kernels can also be set back: :data:`SWITCHES`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as hooks

from attnbench.results import sources

_HOOKS = [value for name, value in vars(hooks).items() if name.startswith("_global_") and hasattr(value, "values")]
_CPU = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "Autograd", "AutogradCPU")


class Switch(NamedTuple):
    """A switch of torch for its numbers or kernels. Old versions of torch lack some."""

    words: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


PRODUCTS = "the precision of float32 products"
_CONVOLUTIONS = "the precision of float32 convolutions and recurrences"
_SUMS = "the precision of sums in half precision"
_KERNELS = "the kernels that may be used"
_PATHS = {
    PRODUCTS: "get_float32_matmul_precision>set_float32_matmul_precision backends.cuda.matmul.allow_tf32",
    _CONVOLUTIONS: "backends.cudnn.allow_tf32",
    _SUMS: """
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction backends.cuda.matmul.allow_fp16_accumulation
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        _C._get_cpu_allow_fp16_reduced_precision_reduction>_C._set_cpu_allow_fp16_reduced_precision_reduction
        backends.cuda.fp16_bf16_reduction_math_sdp_allowed>backends.cuda.allow_fp16_bf16_reduction_math_sdp""",
    _KERNELS: """
        backends.cudnn.enabled backends.cudnn.benchmark backends.cudnn.deterministic backends.mkldnn.enabled
        backends.mkldnn.deterministic backends.opt_einsum.enabled backends.opt_einsum.strategy backends.quantized.engine
        backends.mha.get_fastpath_enabled>backends.mha.set_fastpath_enabled
        backends.cuda.flash_sdp_enabled>backends.cuda.enable_flash_sdp
        backends.cuda.mem_efficient_sdp_enabled>backends.cuda.enable_mem_efficient_sdp
        backends.cuda.math_sdp_enabled>backends.cuda.enable_math_sdp
        backends.cuda.cudnn_sdp_enabled>backends.cuda.enable_cudnn_sdp
        _C._get_sdp_priority_order>_C._set_sdp_priority_order utils.deterministic.fill_uninitialized_memory""",
}
"""Attributes of torch, and pairs of functions that read and write."""
_INHERITED = (
    (PRODUCTS, "", "generic", "all"),
    (PRODUCTS, ".mkldnn", "mkldnn", "all"),
    (PRODUCTS, ".cudnn", "cuda", "all"),
    (PRODUCTS, ".mkldnn.matmul", "mkldnn", "matmul"),
    (PRODUCTS, ".cuda.matmul", "cuda", "matmul"),
    (_CONVOLUTIONS, ".mkldnn.conv", "mkldnn", "conv"),
    (_CONVOLUTIONS, ".mkldnn.rnn", "mkldnn", "rnn"),
    (_CONVOLUTIONS, ".cudnn.conv", "cuda", "conv"),
    (_CONVOLUTIONS, ".cudnn.rnn", "cuda", "rnn"),
)
"""Places of ``fp32_precision``, each after those that it inherits from, with their names inside torch."""


def _called(path: str, *more: Any) -> Callable[..., Any]:
    """The function of torch at ``path``, looked up at each call, with ``more`` before other arguments."""
    return lambda *given: attrgetter(path)(torch)(*more, *given)


def _at(words: str, path: str) -> Switch:
    read, _, write = path.partition(">")
    if write:
        return Switch(words, _called(read), _called(write))
    home, _, name = path.rpartition(".")
    return Switch(words, lambda: attrgetter(path)(torch), lambda value: setattr(attrgetter(home)(torch), name, value))


def _precision(words: str, backend: str, op: str) -> Switch:
    read, write = (_called(f"_C._{way}_fp32_precision_{way}ter", backend, op) for way in ("get", "set"))
    if op == "matmul":  # nothing, and nothing inherited, is what "highest" means as well
        return Switch(words, lambda: read().replace("none", "ieee"), write)
    return Switch(words, read, write)


SWITCHES: Mapping[str, Switch] = {
    **{
        f"torch.{path.rpartition('>')[2]}": _at(words, path)
        for words, paths in _PATHS.items()
        for path in paths.split()
    },
    **{f"torch.backends{place}.fp32_precision": _precision(words, *inside) for words, place, *inside in _INHERITED},
}


def read_switches() -> dict[str, object]:
    """The present value of each switch."""
    return {name: _told(switch.read) for name, switch in SWITCHES.items()}


def set_back(before: Mapping[str, object]) -> None:
    """Restore each switch that can be set."""
    for _ in range(2):  # one that is set may take others with it
        for name, switch in SWITCHES.items():
            if _told(switch.read) != before[name]:
                with suppress(Exception):
                    switch.write(before[name])


chosen = set[tuple[object, ...]]()
"""States of the product switches between which this process itself chooses
(:func:`attnbench.harness.wire.process.choose_products`)."""


def state_of(words: str) -> tuple[object, ...]:
    """The present state of the switches of one subject, such as :data:`PRODUCTS`."""
    return tuple(_told(switch.read) for switch in SWITCHES.values() if switch.words == words)


def _products() -> object:
    """None for any state that this process itself chooses, so that these do not differ."""
    now = state_of(PRODUCTS)
    return None if now in chosen else now


def read_settings() -> dict[str, object]:
    """Each setting now, by its words."""
    return {words: _told(read) for words, read in _SETTINGS.items()}


def _told(read: Callable[[], object]) -> object:
    """The result of ``read``, or its failure: a removed folder, a default device that computes nothing."""
    try:
        return read()
    except Exception as error:
        return repr(error)


def _autograd() -> object:
    inner: Any = torch._C
    return inner._is_multithreading_enabled(), id(inner._autograd._top_saved_tensors_default_hooks(True))


def _kernels_of_others() -> object:
    return {name for name in torch.library._impls if name.startswith("aten/") and name.rpartition("/")[2] in _CPU}


def _modes() -> object:
    inner: Any = torch._C
    return (
        [id(inner._get_function_stack_at(i)) for i in range(inner._len_torch_function_stack())],
        [id(inner._get_dispatch_stack_at(i)) for i in range(inner._len_torch_dispatch_stack())],
        inner._is_torch_function_enabled(),
    )


def _rounding() -> object:
    half = sys.float_info.epsilon / 2
    return sys.float_info.min / 2 > 0, 1 + half, 1 + 3 * half, -1 - half, 1 - half / 2


def _umask() -> int:
    os.umask(before := os.umask(0o77))  # there is no other way to read it
    return before


_SETTINGS: dict[str, Callable[[], object]] = {
    "the number of threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "the default dtype": torch.get_default_dtype,
    "the default device": lambda: str(torch.get_default_device()),
    "deterministic mode": lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    ),
    "checks of sparse tensors": torch._C._check_sparse_tensor_invariants,
    "gradient mode": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    "how gradients are computed": _autograd,
    "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
    PRODUCTS: _products,
    **{words: partial(state_of, words) for words in (_CONVOLUTIONS, _SUMS, _KERNELS)},
    "the kernels of torch's operations": _kernels_of_others,
    "what stands between a call and torch": _modes,
    "the hooks of all modules": lambda: [list(map(id, table.values())) for table in _HOOKS],
    "torch's profiler": torch._C._autograd._profiler_enabled,
    "how numbers are rounded": _rounding,
    "the working directory": os.getcwd,
    "the cores it may use": lambda: os.sched_getaffinity(0),
    "its rank among programs": lambda: (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
    "the timers that interrupt it": lambda: [signal.getitimer(kind) != (0.0, 0.0) for kind in range(3)],
    "how its threads take turns": sys.getswitchinterval,
    "the rights of new files": _umask,
    "warnings that are errors": lambda: [one for one in warnings.filters if one[0] == "error"],
    "the audit hooks": lambda: len(sources.hooks),
    "how garbage is collected": lambda: (gc.isenabled(), gc.get_threshold(), list(map(id, gc.callbacks))),
}
"""Settings that silently change the next cell's numbers. One that makes it fail is left out, since a fresh process
tries again, and so is one that shows in :mod:`attnbench.harness.inside.canary`."""

with warnings.catch_warnings():  # torch 2.9 warns, once, that there is a newer way to ask
    warnings.simplefilter("ignore")
    read_switches()
