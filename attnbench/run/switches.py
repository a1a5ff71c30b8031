"""Settings of the process that a cell may change, by the words that its row then has for them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as hooks

from attnbench.run.process import chosen_precisions

if sys.platform != "win32":
    import resource

_LIMITS = [] if sys.platform == "win32" else sorted(getattr(resource, n) for n in dir(resource) if n[:7] == "RLIMIT_")
FINDERS = "where modules are found"
_HOOKS = [value for name, value in vars(hooks).items() if name.startswith("_global_") and hasattr(value, "values")]
_CPU = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "Autograd", "AutogradCPU")


def read_settings() -> dict[str, object]:
    """What each setting is now, by the words for it."""
    return {words: _told(read) for words, read in _SETTINGS.items()}


def _told(read: Callable[[], object]) -> object:
    """What ``read`` gives, or how it fails: a folder that was removed, a default device that computes nothing."""
    try:
        return read()
    except Exception as error:
        return repr(error)


def _settings() -> dict[str, Callable[[], object]]:
    """What each setting is called, and how it is read."""
    settings: dict[str, Callable[[], object]] = {
        "the number of threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
        "the default dtype": torch.get_default_dtype,
        "the default device": lambda: str(torch.get_default_device()),
        "deterministic mode": lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "anomaly mode": torch.is_anomaly_enabled,
        "checks of sparse tensors": torch._C._check_sparse_tensor_invariants,
        "gradient mode": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "how gradients are computed": _autograd,
        "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "the precision of float32 products": _precision,
        "the kernels that may be used": _kernels,
        "the kernels of torch's operations": _kernels_of_others,
        "what stands between a call and torch": _modes,
        "the hooks of all modules": lambda: [list(map(id, table.values())) for table in _HOOKS],
        "torch's profiler": torch._C._autograd._profiler_enabled,
        "how numbers are rounded": _rounding,
        "the working directory": os.getcwd,
        "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), list(map(id, gc.callbacks))),
        "the recursion limit": sys.getrecursionlimit,
        "how threads take turns": sys.getswitchinterval,
        "tracing": lambda: (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        FINDERS: _finders,
        "stdout or stderr": lambda: [id(stream) for stream in (sys.stdout, sys.stderr)],
        "which warnings are errors": lambda: [rule for rule in warnings.filters if rule[0] == "error"],
        "a signal's handler": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
        "the umask": _umask,
    }
    if sys.platform != "win32":
        timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
        settings["a timer"] = lambda: [any(signal.getitimer(timer)) for timer in timers]
        settings["which signals wait"] = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())
        settings["a limit of the system"] = lambda: [resource.getrlimit(number) for number in _LIMITS]
    if sys.platform == "linux":
        settings["the cores it may use"] = lambda: os.sched_getaffinity(0)
        settings["its priority"] = lambda: (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    return settings


def _precision() -> object:
    """The precision; None for any that this process itself chooses for each cell, so that these do not differ."""
    now = torch.get_float32_matmul_precision()
    return None if now in chosen_precisions() else now


def _autograd() -> object:
    """Whether on one thread or several, and through which hooks saved tensors go."""
    inner: Any = torch._C
    return inner._is_multithreading_enabled(), id(inner._autograd._top_saved_tensors_default_hooks(True))


def _kernels() -> object:
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    einsum: Any = torch.backends.opt_einsum
    switches: list[Any] = [cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled]
    return (
        *(enabled() for enabled in [*switches, cuda.cudnn_sdp_enabled]),
        *(cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, mkldnn.enabled),
        *(einsum.enabled, einsum.strategy),
    )


def _kernels_of_others() -> object:
    """Names of kernels that Python has put in the place of torch's own on a CPU."""
    return {name for name in torch.library._impls if name.startswith("aten/") and name.rpartition("/")[2] in _CPU}


def _modes() -> object:
    """Which of torch's modes see each call, and whether tensors of other classes are seen at all."""
    inner: Any = torch._C
    return (
        [id(inner._get_function_stack_at(i)) for i in range(inner._len_torch_function_stack())],
        [id(inner._get_dispatch_stack_at(i)) for i in range(inner._len_torch_dispatch_stack())],
        inner._is_torch_function_enabled(),
    )


def _rounding() -> object:
    """Whether a number too small for the usual form is kept or becomes 0, and to which side halves are rounded."""
    half = sys.float_info.epsilon / 2
    return sys.float_info.min / 2 > 0, 1 + half, 1 + 3 * half, -1 - half, 1 - half / 2


def _finders() -> object:
    """Where modules are found, without what setuptools adds and removes when torch.compile first needs a compiler."""
    folders = [folder for folder in sys.path if not folder.endswith("_vendor")]
    finders = [finder for finder in sys.meta_path if type(finder).__module__ != "_distutils_hack"]
    return folders, list(map(id, finders)), list(map(id, sys.path_hooks))


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


_SETTINGS = _settings()
